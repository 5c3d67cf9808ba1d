// Launch plan of the causal convolution.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/launch_plan.h"

namespace chunkdelta {

struct CausalConv1dCall {
  Dtype dtype = Dtype::f32;  // of all arrays
  int32_t channels = 1;
  int32_t width = 4;                // K, 2..8
  std::vector<int32_t> cu_seqlens;  // [N+1] row offsets, from 0, ascending
  bool bias = false;
  bool initial_state = false;
  bool mask = false;
  bool silu = false;
  bool aligned = true;  // all arrays begin at multiples of 4 elements
};

// Roles of the plan's buffers: x, weight, bias, initial_state, mask, y, state.
// Throws std::invalid_argument on metadata that would address anything outside of them.
Plan plan_causal_conv1d(const CausalConv1dCall& call);

}  // namespace chunkdelta
