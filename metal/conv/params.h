// Arguments of the causal convolution kernel, shared by src/core/plans/causal_conv1d.cpp and the
// shader.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Function constants.
#define CONV_WIDTH 400        // int: taps K, 2..8
#define CONV_HAS_BIAS 401     // bool
#define CONV_HAS_INITIAL 402  // bool: an initial state, else zeros
#define CONV_HAS_MASK 403     // bool
#define CONV_SILU 404         // bool

#define CONV_MAX_TAPS 8

namespace chunkdelta {

// Consecutive rows of one sequence, for one thread per few channels.
struct ConvBlock {
  int32_t sequence;
  int32_t begin;  // first row of the sequence
  int32_t row;    // first row of the block
  int32_t rows;
  int32_t last;  // 1 in the sequence's last block: it writes the state
};

struct CausalConv1dParams {
  int32_t channels;
  int32_t first_block;  // of this launch in blocks
};

}  // namespace chunkdelta
