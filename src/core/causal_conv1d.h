// Depthwise causal convolution over time with carried rows, on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace chunkdelta {

constexpr int CONV_MIN_WIDTH = 2;
constexpr int CONV_MAX_WIDTH = 8;

// Row-major arrays of one storage type; rows of all sequences lie one after another.
struct CausalConv1d {
  Dtype dtype;
  int channels;
  int width;                        // K
  const void* x;                    // [rows, channels]
  const void* weight;               // [channels, K], tap K-1 multiplies the newest row
  const void* bias;                 // [channels], or null
  const void* initial_state;        // [N, K-1, channels], or null for zeros
  const bool* mask;                 // [rows], or null; rows where it is false do not exist
  std::vector<int32_t> cu_seqlens;  // [N+1] row offsets, from 0, ascending
  bool silu;
  void* y;      // [rows, channels]
  void* state;  // [N, K-1, channels]: the last K-1 rows, oldest first
};

void causal_conv1d(const CausalConv1d& op);

}  // namespace chunkdelta
