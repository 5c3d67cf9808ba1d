#include "core/plans/rope.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "rope/params.h"

namespace chunkdelta {
namespace {

constexpr uint32_t kThreads = 128;
constexpr int32_t kTokensPerGroup = 4;  // a simdgroup each
constexpr float kLargestFrequency = 0x1p24f;

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
  throw std::invalid_argument("[rope] expected " + expected + "; got " + got);
}

// radians / (2 pi) modulo 1, in units of 2^-64: exact but for the last unit, so that 2^31 positions
// are off by 1e-9 radians at most.
uint64_t turn_of(float radians) {
  __extension__ typedef unsigned __int128 u128;
  // 1 / (2 pi) in units of 2^-128.
  constexpr uint64_t INVERSE_HIGH = 0x28be60db9391054a, INVERSE_LOW = 0x7f09d5f47d4d3770;
  int exponent = 0;
  const float fraction = std::frexp(std::fabs(radians), &exponent);
  const auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, 24));
  // |radians| = mantissa 2^(exponent - 24); the upper 128 bits of mantissa / (2 pi), in units of
  // 2^-64.
  const u128 low = u128(mantissa) * INVERSE_LOW;
  const u128 high = u128(mantissa) * INVERSE_HIGH + (low >> 64);
  const int shift = 24 - exponent;  // >= 0 below kLargestFrequency
  const uint64_t turn = shift < 128 ? static_cast<uint64_t>(high >> shift) : 0;
  return radians < 0 ? -turn : turn;
}

}  // namespace

Plan plan_rope(const RopeOptions& options, Dtype dtype, int64_t tokens) {
  const auto pairs = static_cast<int64_t>(options.inv_freq.size());
  if (options.heads < 0 || options.head_dim < 1 || 2 * pairs > options.head_dim) {
    refuse("heads >= 0 and at most head_dim / 2 pairs",
           std::to_string(options.heads) + " heads of " + std::to_string(options.head_dim) + ", " +
               std::to_string(pairs) + " pairs");
  }
  if (tokens < 0 || tokens > std::numeric_limits<int32_t>::max()) {
    refuse("tokens below 2^31", std::to_string(tokens));
  }
  if (options.axis.size() != options.inv_freq.size()) {
    refuse("an axis per pair", std::to_string(options.axis.size()));
  }
  std::vector<RopePair> turns;
  for (int64_t i = 0; i < pairs; i++) {
    const float frequency = options.inv_freq[i];
    if (!(std::fabs(frequency) < kLargestFrequency)) {
      refuse("inverse frequencies below 2^24", std::to_string(frequency));
    }
    if (options.axis[i] < 0 || options.axis[i] > 2) {
      refuse("axes in 0..2", std::to_string(options.axis[i]));
    }
    const uint64_t turn = turn_of(frequency);
    turns.push_back(
        {static_cast<uint32_t>(turn), static_cast<uint32_t>(turn >> 32), options.axis[i]});
  }

  Plan plan;
  plan.op = "rope";
  plan.why = "a simdgroup per token and " + std::to_string(ROPE_GROUP_HEADS) +
             " heads, angles in units of 2^-64 turns";
  plan.host_data.push_back({"pairs", to_bytes(turns)});
  if (tokens == 0 || options.heads == 0) return plan;
  Launch launch;
  launch.source = "rope/rope";
  launch.kernel = "rope_" + std::string(dtype_name(dtype));
  launch.constants = {{ROPE_TRADITIONAL, options.traditional}};
  launch.buffers = {{0, "x", Access::Read},
                    {1, "positions", Access::Read},
                    {2, "pairs", Access::Read},
                    {4, "out", Access::Write}};
  launch.params = {{3, to_bytes(RopeParams{static_cast<int32_t>(tokens), options.heads,
                                           options.head_dim, static_cast<int32_t>(pairs)})}};
  launch.grid = {static_cast<uint32_t>((tokens + kTokensPerGroup - 1) / kTokensPerGroup),
                 static_cast<uint32_t>((options.heads + ROPE_GROUP_HEADS - 1) / ROPE_GROUP_HEADS),
                 1};
  launch.threadgroup = {kThreads, 1, 1};
  plan.launches.push_back(std::move(launch));
  return plan;
}

}  // namespace chunkdelta
