#include "core/merge_states.h"
#include "core/simd.h"

namespace chunkdelta::CHUNKDELTA_ISA {
namespace {

template <typename T>
void merge(const MergeStatesOptions& options, const T* outs, const float* lses, T* o, float* lse,
           int64_t begin, int64_t end) {
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
    int64_t d = 0;
    const auto columns = [&](auto zero, auto read, auto write) {
      auto sum = zero;
      for (int64_t s = 0; s < options.states; s++) {
        const float x = lses[s * options.rows + row];
        if (x == -infinity) continue;
        sum += read(outs + (s * options.rows + row) * D + d) * (__builtin_expf(x - m) / total);
      }
      write(o + row * D + d, sum);
    };
    for (; d + W <= D; d += W) {
      columns(vf{}, [](const T* p) { return load(p); }, [](T* p, vf x) { store(p, x); });
    }
    for (; d < D; d++) {
      columns(
          0.0f, [](const T* p) { return to_float(*p); }, [](T* p, float x) { from_float(x, p); });
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
