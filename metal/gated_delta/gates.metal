// Log gates and betas of the gated delta rule, in fp32, from the projections a and b.
//
//   x = a + dt_bias,  rate = exp(A_log)
//   g = -rate softplus(x), or lower_bound sigmoid(rate x);  beta = beta_scale sigmoid(b)
//
// A head that remembers 100,000 tokens has g = -7e-6: the smallest gates need all their bits, so
// softplus never passes through 1 + exp(x) rounded (log1p below). Compile with safe math.
#include "gated_delta/gates_params.h"

#include <metal_stdlib>

using namespace metal;
using namespace chunkdelta;

constant bool bounded [[function_constant(GATED_DELTA_GATES_BOUNDED)]];

// log(1 + u) for u >= 0: the rounding of 1 + u is divided out again (Kahan).
METAL_FUNC float log1p_positive(float u) {
  const float w = 1.0f + u;
  return w == 1.0f ? u : precise::log(w) * (u / (w - 1.0f));
}

METAL_FUNC float softplus(float x) {
  return max(x, 0.0f) + log1p_positive(precise::exp(-abs(x)));
}

METAL_FUNC float sigmoid(float x) {
  const float e = precise::exp(-abs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// Threadgroup: (256, 1, 1), a thread per element. Grid: (ceil(count / 256), 1, 1) threadgroups.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_delta_gates(
    const device T* a [[buffer(0)]],            // [rows, heads]
    const device T* b [[buffer(1)]],            // [rows, heads]
    const device float* A_log [[buffer(2)]],    // [heads]
    const device float* dt_bias [[buffer(3)]],  // [heads]
    device float* g [[buffer(4)]],              // [rows, heads]
    device float* beta [[buffer(5)]],           // [rows, heads]
    constant GatedDeltaGatesParams& params [[buffer(6)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint i = tg.x * 256 + thread_index;
  if (i >= params.count) return;
  const uint head = i % params.heads;
  const float x = float(a[i]) + dt_bias[head];
  const float rate = precise::exp(A_log[head]);
  g[i] = bounded ? params.lower_bound * sigmoid(rate * x) : -rate * softplus(x);
  beta[i] = params.beta_scale * sigmoid(float(b[i]));
}

#define GATES(NAME, T) \
  template [[host_name(NAME)]] [[kernel]] decltype(gated_delta_gates<T>) gated_delta_gates<T>;

GATES("gated_delta_gates_float32", float)
GATES("gated_delta_gates_float16", half)
GATES("gated_delta_gates_bfloat16", bfloat)
