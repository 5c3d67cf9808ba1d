// What the gated delta kernels have in common: options, loads of masked rows and of states.
#pragma once

#include "common/fragment.h"
#include "gated_delta/params.h"

using namespace chunkdelta;

constant int simdgroups [[function_constant(GATED_DELTA_SIMDGROUPS)]];
constant int head_k_dim [[function_constant(GATED_DELTA_HEAD_K_DIM)]];
constant int head_v_dim [[function_constant(GATED_DELTA_HEAD_V_DIM)]];
constant bool has_mask [[function_constant(GATED_DELTA_HAS_MASK)]];
constant bool has_initial [[function_constant(GATED_DELTA_HAS_INITIAL)]];
constant bool has_checkpoints [[function_constant(GATED_DELTA_CHECKPOINTS)]];
constant bool vectors [[function_constant(GATED_DELTA_VECTORS)]];
constant bool qk_l2norm [[function_constant(GATED_DELTA_QK_L2NORM)]];

// Log gates below this are 0 in fp32 once exponentiated; the clamp keeps sums and differences
// finite.
constant constexpr float kLeastLogGate = -128.0f;

// Columns x .. x + 3 of a q or k row, 0 past head_k_dim.  D is the kernel's padded head dim.
template <typename T, int D>
METAL_FUNC vec<T, 4> load_key_columns(const device T* row, int x, int stride) {
  if (vectors && head_k_dim == D) return *(const device vec<T, 4>*)(row + x);
  vec<T, 4> y = vec<T, 4>(T(0));
  UNROLL for (int e = 0; e < 4; e++) {
    if (x + e < head_k_dim) y[e] = row[long(x + e) * (vectors ? 1 : stride)];
  }
  return y;
}
