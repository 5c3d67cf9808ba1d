// The convolution of a block of rows, compiled per instruction set.
#pragma once

#include <cstddef>

#include "core/dtype.h"
#include "core/isa.h"

namespace chunkdelta {

// A range of channels and a block of rows that follow one another.
struct ConvBlock {
  Dtype dtype;
  int width;  // K
  bool silu;
  int rows;      // of output
  int channels;  // of this range
  ptrdiff_t first_channel;
  const void* const* source;  // rows + K - 1 input rows, oldest first; null stands for zeros
  void* const* target;        // rows output rows
  const void* weight;         // [all channels, K]
  const void* bias;           // [all channels], or null
  float* scratch;             // conv_scratch_floats(K, channels)
};

inline size_t conv_scratch_floats(int width, int channels) {
  return size_t(width + 2) * channels;
}

CHUNKDELTA_DECLARE_KERNEL(void causal_conv1d_block(const ConvBlock& block))

}  // namespace chunkdelta
