#include "core/causal_conv1d.h"

#include <algorithm>
#include <cstring>

#include "core/causal_conv1d_kernel.h"
#include "core/compute.h"

namespace chunkdelta {
namespace {

// A task is a block of rows by a range of channels: four input rows of 1,024 channels stay in L1
// while the range is swept, and transposing the weights is a few percent of 64 rows' work.
constexpr int BLOCK_ROWS = 64;
constexpr int BLOCK_CHANNELS = 1024;
// Below this many outputs (about 20 microseconds of work) waking the workers costs more than it
// saves.
constexpr int64_t SERIAL_OUTPUTS = 1 << 16;

struct RowBlock {
  int sequence;
  int32_t begin;
  int32_t end;
  bool last;  // of its sequence: it also writes the state
};

class Rows {
 public:
  explicit Rows(const CausalConv1d& op)
      : op_(op), stride_(int64_t(op.channels) * size_of(op.dtype)) {}

  const void* input(int64_t row) const { return static_cast<const char*>(op_.x) + row * stride_; }
  void* output(int64_t row) const { return static_cast<char*>(op_.y) + row * stride_; }
  void* state(int sequence, int slot) const {
    return static_cast<char*>(op_.state) + carried(sequence, slot) * stride_;
  }
  bool exists(int64_t row) const { return !op_.mask || op_.mask[row]; }

  // The K-1 rows that come before row `end` of its sequence, oldest first; null where there is
  // neither a row nor an initial state.
  void before(int sequence, int32_t end, const void** rows) const {
    int missing = op_.width - 1;
    for (int32_t row = end - 1; row >= op_.cu_seqlens[sequence] && missing > 0; row--) {
      if (exists(row)) rows[--missing] = input(row);
    }
    // `missing` slots are left: the newest `missing` rows of the initial state.
    for (int i = 0; i < missing; i++) {
      const int slot = op_.width - 1 - missing + i;
      rows[i] = op_.initial_state ? static_cast<const char*>(op_.initial_state) +
                                        carried(sequence, slot) * stride_
                                  : nullptr;
    }
  }

 private:
  int64_t carried(int sequence, int slot) const {
    return int64_t(sequence) * (op_.width - 1) + slot;
  }
  const CausalConv1d& op_;
  int64_t stride_;
};

std::vector<RowBlock> row_blocks(const std::vector<int32_t>& cu_seqlens) {
  std::vector<RowBlock> blocks;
  for (size_t n = 0; n + 1 < cu_seqlens.size(); n++) {
    int32_t begin = cu_seqlens[n];
    const int32_t end = cu_seqlens[n + 1];
    do {  // a sequence without rows still carries its state over
      const int32_t stop = std::min<int64_t>(end, int64_t(begin) + BLOCK_ROWS);
      blocks.push_back({static_cast<int>(n), begin, stop, stop == end});
      begin = stop;
    } while (begin < end);
  }
  return blocks;
}

}  // namespace

void causal_conv1d(const CausalConv1d& op) {
  const std::vector<RowBlock> blocks = row_blocks(op.cu_seqlens);
  const int ranges = (op.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
  const int64_t item = size_of(op.dtype);
  const Rows rows(op);

  Compute compute;
  const auto task = [&](int64_t index, int worker) {
    const RowBlock& block = blocks[index / ranges];
    const int first = static_cast<int>(index % ranges) * BLOCK_CHANNELS;
    const int channels = std::min(BLOCK_CHANNELS, op.channels - first);
    const void* source[BLOCK_ROWS + CONV_MAX_WIDTH - 1];
    void* target[BLOCK_ROWS];

    rows.before(block.sequence, block.begin, source);
    int n = 0;
    for (int32_t row = block.begin; row < block.end; row++) {
      if (rows.exists(row)) {
        source[op.width - 1 + n] = rows.input(row);
        target[n++] = rows.output(row);
      } else {
        std::memset(static_cast<char*>(rows.output(row)) + first * item, 0, channels * item);
      }
    }
    if (n > 0) {
      void* scratch = compute.worker_workspace(
          worker, sizeof(float) * conv_scratch_floats(op.width, BLOCK_CHANNELS));
      const ConvBlock conv{op.dtype,
                           op.width,
                           op.silu,
                           n,
                           channels,
                           first,
                           source,
                           target,
                           op.weight,
                           op.bias,
                           static_cast<float*>(scratch)};
      CHUNKDELTA_DISPATCH(causal_conv1d_block, conv);
    }
    if (block.last) {
      for (int slot = 0; slot < op.width - 1; slot++) {
        char* out = static_cast<char*>(rows.state(block.sequence, slot)) + first * item;
        const void* row = source[n + slot];
        if (row) {
          std::memcpy(out, static_cast<const char*>(row) + first * item, channels * item);
        } else {
          std::memset(out, 0, channels * item);
        }
      }
    }
  };
  const int64_t tasks = static_cast<int64_t>(blocks.size()) * ranges;
  if (int64_t(op.cu_seqlens.back()) * op.channels <= SERIAL_OUTPUTS) {
    for (int64_t index = 0; index < tasks; index++) task(index, 0);
  } else {
    compute.parallel_for(tasks, task);
  }
}

}  // namespace chunkdelta
