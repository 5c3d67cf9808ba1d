// Arguments of the gates kernel, shared by src/core/plans/gated_delta_gates.cpp and the shader.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Function constants.
#define GATED_DELTA_GATES_BOUNDED 210  // bool: g = lower_bound sigmoid(rate x)

namespace chunkdelta {

struct GatedDeltaGatesParams {
  uint32_t count;  // rows * heads
  uint32_t heads;
  float lower_bound;
  float beta_scale;  // 1, or 2 with negative eigenvalues
};

}  // namespace chunkdelta
