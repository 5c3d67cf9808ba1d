#include "core/merge_states.h"
#include "core/simd.h"

namespace chunkdelta::CHUNKDELTA_ISA {
namespace {

template <typename T>
void merge(const MergeStatesOptions& options, const T* outs, const float* lses, T* o, float* lse,
           int64_t begin, int64_t end) {
  constexpr int64_t COLUMNS = 512;  // at a time
  const float infinity = __builtin_inff();
  const int64_t D = options.head_dim;
  for (int64_t row = begin; row < end; row++) {
    float m = -infinity;
    for (int64_t s = 0; s < options.states; s++) {
      const float x = lses[s * options.rows + row];
      if (!(x <= m)) m = x;  // a NaN stays
    }
    float total = 0;
    for (int64_t s = 0; s < options.states; s++) {
      const float x = lses[s * options.rows + row];
      if (x != -infinity) total += __builtin_expf(x - m);
    }
    lse[row] = total == 0 ? -infinity : m + __builtin_logf(total);
    for (int64_t column = 0; column < D; column += COLUMNS) {
      const int64_t n = D - column < COLUMNS ? D - column : COLUMNS;
      float sums[COLUMNS] = {};
      for (int64_t s = 0; s < options.states; s++) {
        const float x = lses[s * options.rows + row];
        if (x == -infinity) continue;
        const float weight = __builtin_expf(x - m) / total;
        const T* out = outs + (s * options.rows + row) * D + column;
        int64_t d = 0;
        for (; d + W <= n; d += W) store(sums + d, load(out + d) * weight + load(sums + d));
        for (; d < n; d++) sums[d] += to_float(out[d]) * weight;
      }
      T* to = o + row * D + column;
      int64_t d = 0;
      for (; d + W <= n; d += W) store(to + d, load(sums + d));
      for (; d < n; d++) from_float(sums[d], to + d);
    }
  }
}

}  // namespace

void merge_rows(const MergeStatesOptions& options, const void* outs, const float* lses, void* o,
                float* lse, int64_t begin, int64_t end) {
  switch (options.dtype) {
    case Dtype::f32:
      return merge(options, static_cast<const float*>(outs), lses, static_cast<float*>(o), lse,
                   begin, end);
    case Dtype::f16:
      return merge(options, static_cast<const f16_t*>(outs), lses, static_cast<f16_t*>(o), lse,
                   begin, end);
    case Dtype::bf16:
      return merge(options, static_cast<const bf16_t*>(outs), lses, static_cast<bf16_t*>(o), lse,
                   begin, end);
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
