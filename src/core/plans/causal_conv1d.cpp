#include "core/plans/causal_conv1d.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "conv/params.h"

namespace chunkdelta {
namespace {

constexpr int32_t kBlockRows = 16;
constexpr uint32_t kThreads = 128;
// Elements that one launch reads and writes once: 10 ms at 54 GB/s (80 % of an M1) in 16 bits.
constexpr int64_t kLaunchElements = int64_t(1) << 27;

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
  throw std::invalid_argument("[causal_conv1d] expected " + expected + "; got " + got);
}

void check(const CausalConv1dCall& call) {
  if (call.channels < 1) refuse("channels >= 1", std::to_string(call.channels));
  if (call.width < 2 || call.width > CONV_MAX_TAPS) {
    refuse("2 to 8 taps", std::to_string(call.width));
  }
  const auto& cu = call.cu_seqlens;
  if (cu.size() < 2 || cu.front() != 0 || !std::is_sorted(cu.begin(), cu.end())) {
    refuse("cu_seqlens [N+1] of N >= 1 sequences, from 0, ascending",
           std::to_string(cu.size()) + " offsets");
  }
}

// A sequence without rows has one block too: it hands the state on.
std::vector<ConvBlock> blocks_of(const std::vector<int32_t>& cu_seqlens) {
  std::vector<ConvBlock> blocks;
  for (size_t n = 0; n + 1 < cu_seqlens.size(); n++) {
    const int32_t begin = cu_seqlens[n], end = cu_seqlens[n + 1];
    int32_t row = begin;
    do {
      const int32_t rows = std::min(kBlockRows, end - row);
      blocks.push_back({static_cast<int32_t>(n), begin, row, rows, row + rows == end});
      row += rows;
    } while (row < end);
  }
  return blocks;
}

}  // namespace

Plan plan_causal_conv1d(const CausalConv1dCall& call) {
  check(call);
  const std::vector<ConvBlock> blocks = blocks_of(call.cu_seqlens);
  const int32_t vector = call.aligned && call.channels % 4 == 0 ? 4 : 1;
  const uint32_t lanes = static_cast<uint32_t>(call.channels / vector);
  const uint32_t threads = std::min(kThreads, (lanes + 31) / 32 * 32);
  const int64_t most =
      std::clamp<int64_t>(kLaunchElements / (int64_t(kBlockRows) * call.channels), 1, 65535);

  Plan plan;
  plan.op = "causal_conv1d";
  plan.host_data.push_back({"blocks", to_bytes(blocks)});
  const int64_t count = static_cast<int64_t>(blocks.size());
  for (int64_t first = 0; first < count; first += most) {
    Launch launch;
    launch.source = "conv/causal_conv1d";
    launch.kernel =
        "causal_conv1d_" + std::string(dtype_name(call.dtype)) + "_v" + std::to_string(vector);
    launch.constants = {{CONV_WIDTH, call.width},
                        {CONV_HAS_BIAS, call.bias},
                        {CONV_HAS_INITIAL, call.initial_state},
                        {CONV_HAS_MASK, call.mask},
                        {CONV_SILU, call.silu}};
    launch.buffers = {{0, "x", Access::Read}, {1, "weight", Access::Read}};
    if (call.bias) launch.buffers.push_back({2, "bias", Access::Read});
    if (call.initial_state) launch.buffers.push_back({3, "initial_state", Access::Read});
    if (call.mask) launch.buffers.push_back({4, "mask", Access::Read});
    launch.buffers.push_back({5, "blocks", Access::Read});
    launch.buffers.push_back({7, "y", Access::Write});
    launch.buffers.push_back({8, "state", Access::Write});
    launch.params = {{6, to_bytes(CausalConv1dParams{call.channels, static_cast<int32_t>(first)})}};
    launch.grid = {(lanes + threads - 1) / threads,
                   static_cast<uint32_t>(std::min(most, count - first)), 1};
    launch.threadgroup = {threads, 1, 1};
    plan.launches.push_back(std::move(launch));
  }
  const std::string reason = vector == 4    ? ""
                             : call.aligned ? " (C is no multiple of 4)"
                                            : " (an array begins between vectors)";
  plan.why = std::to_string(vector) + (vector == 1 ? " channel" : " channels") + " a thread" +
             reason + ", " + std::to_string(kBlockRows) +
             " rows a block, the last K-1 rows in registers";
  return plan;
}

}  // namespace chunkdelta
