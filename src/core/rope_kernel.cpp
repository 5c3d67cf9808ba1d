#include "core/rope.h"
#include "core/simd.h"

namespace chunkdelta::CHUNKDELTA_ISA {
namespace {

template <typename T>
void rotate(T* first, T* second, const T* x1, const T* x2, ptrdiff_t step, int pairs,
            const float* cosines, const float* sines) {
  int i = 0;
  if (step == 1) {
    for (; i + W <= pairs; i += W) {
      const vf a = load(x1 + i), b = load(x2 + i), c = load(cosines + i), s = load(sines + i);
      store(first + i, a * c - b * s);
      store(second + i, b * c + a * s);
    }
  }
  for (; i < pairs; i++) {
    const float a = to_float(x1[i * step]), b = to_float(x2[i * step]);
    from_float(a * cosines[i] - b * sines[i], first + i * step);
    from_float(b * cosines[i] + a * sines[i], second + i * step);
  }
}

template <typename T>
void rotate_heads(const RopeOptions& options, const T* x, const float* cosines, const float* sines,
                  T* out) {
  const int pairs = static_cast<int>(options.inv_freq.size());
  const int second = options.traditional ? 1 : pairs, step = options.traditional ? 2 : 1;
  for (int h = 0; h < options.heads; h++, x += options.head_dim, out += options.head_dim) {
    rotate(out, out + second, x, x + second, step, pairs, cosines, sines);
    if (out != x) {  // a donated input is rotated in place
      std::memcpy(out + 2 * pairs, x + 2 * pairs, (options.head_dim - 2 * pairs) * sizeof(T));
    }
  }
}

}  // namespace

void rope_token(const RopeOptions& options, Dtype dtype, const void* x, const float* cosines,
                const float* sines, void* out) {
  switch (dtype) {
    case Dtype::f32:
      return rotate_heads(options, (const float*)x, cosines, sines, (float*)out);
    case Dtype::f16:
      return rotate_heads(options, (const f16_t*)x, cosines, sines, (f16_t*)out);
    case Dtype::bf16:
      return rotate_heads(options, (const bf16_t*)x, cosines, sines, (bf16_t*)out);
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
