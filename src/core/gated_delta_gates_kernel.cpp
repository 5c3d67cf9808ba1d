// Log gates and writing strengths, compiled once per instruction set.
#include "core/gated_delta_kernel.h"
#include "core/simd.h"

namespace chunkdelta::CHUNKDELTA_ISA {

namespace {

// log(1 + u) for u in [0, 1]: 2 atanh(s), s = u / (2 + u) <= 1/3. The series' next term is 3e-9.
static inline vf log1p_unit(vf u) {
  const vf s = u / (u + 2.0f), s2 = s * s;
  vf p = splat(1.0f / 15);
  p = p * s2 + 1.0f / 13;
  p = p * s2 + 1.0f / 11;
  p = p * s2 + 1.0f / 9;
  p = p * s2 + 1.0f / 7;
  p = p * s2 + 1.0f / 5;
  p = p * s2 + 1.0f / 3;
  return 2.0f * (p * s2 * s + s);
}

static inline vf abs(vf x) {
  return (vf)((vu)x & 0x7fffffff);
}

// Both without cancellation: exp only sees -|x|.
static inline vf softplus(vf x) {
  const vf positive = x < 0.0f ? splat(0.0f) : x;  // NaN passes
  return positive + log1p_unit(exp(-abs(x)));
}
static inline vf sigmoid(vf x) {
  const vf e = exp(-abs(x));
  const vf small = e / (e + 1.0f), large = 1.0f / (e + 1.0f);
  return x < 0.0f ? small : large;
}

template <typename T>
static inline void gates(const GatedDeltaGates& options, int64_t rows, const T* a, const T* b,
                         const float* rate, const float* dt_bias, float* g, float* beta) {
  const bool bounded = options.lower_bound == options.lower_bound;
  for (int64_t t = 0; t < rows; t++) {
    for (int64_t h = 0; h < options.heads; h += W) {
      const int n = static_cast<int>(options.heads - h < W ? options.heads - h : W);
      const int64_t i = t * options.heads + h;
      const vf x = load_first(a + i, n) + load_first(dt_bias + h, n), r = load_first(rate + h, n);
      store_first(g + i, bounded ? options.lower_bound * sigmoid(r * x) : -r * softplus(x), n);
      store_first(beta + i, options.beta_scale * sigmoid(load_first(b + i, n)), n);
    }
  }
}

}  // namespace

void gated_delta_gates_rows(const GatedDeltaGates& options, int64_t rows, const void* a,
                            const void* b, const float* rate, const float* dt_bias, float* g,
                            float* beta) {
  switch (options.dtype) {
    case Dtype::f32:
      return gates(options, rows, static_cast<const float*>(a), static_cast<const float*>(b), rate,
                   dt_bias, g, beta);
    case Dtype::f16:
      return gates(options, rows, static_cast<const f16_t*>(a), static_cast<const f16_t*>(b), rate,
                   dt_bias, g, beta);
    case Dtype::bf16:
      return gates(options, rows, static_cast<const bf16_t*>(a), static_cast<const bf16_t*>(b),
                   rate, dt_bias, g, beta);
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
