// Vectors of the instruction set that the including source is compiled for.
//
// Only kernel sources include this (chunkdelta_add_kernels in CMakeLists.txt): each is compiled
// once per instruction set, and all it defines lives in namespace chunkdelta::<isa>. Keep std::
// templates out of kernel sources, and helpers static inline: a weak symbol compiled for AVX-512
// could be the one that the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef CHUNKDELTA_ISA
#error "core/simd.h is for sources added with chunkdelta_add_kernels"
#endif

#if defined(__clang__)
#define CHUNKDELTA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define CHUNKDELTA_UNROLL _Pragma("GCC unroll 32")
#endif

namespace chunkdelta::CHUNKDELTA_ISA {

#if defined(CHUNKDELTA_ISA_avx512)
constexpr int W = 16;  // floats a vector
#elif defined(CHUNKDELTA_ISA_avx2)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef int8_t vb __attribute__((vector_size(W)));
typedef uint8_t vub __attribute__((vector_size(W)));

static inline vf splat(float x) {
#if defined(CHUNKDELTA_ISA_avx512)
  return (vf)_mm512_set1_ps(x);
#elif defined(CHUNKDELTA_ISA_avx2)
  return (vf)_mm256_set1_ps(x);
#elif defined(__x86_64__)
  return (vf)_mm_set1_ps(x);
#elif defined(__aarch64__)
  return (vf)vdupq_n_f32(x);
#else
  return vf{} + x;
#endif
}

template <typename V, typename T>
static inline V load_bits(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

// Loads convert W values of any storage type to fp32.
static inline vf load(const float* p) {
  return load_bits<vf>(p);
}
static inline vf load(const bf16_t* p) {
  return (vf)(__builtin_convertvector(load_bits<vh>(p), vu) << 16);
}
static inline vf load(const int8_t* p) {
  return __builtin_convertvector(__builtin_convertvector(load_bits<vb>(p), vi), vf);
}
static inline vf load(const f16_t* p) {
#if defined(CHUNKDELTA_ISA_avx512)
  return (vf)_mm512_maskz_cvtph_ps(-1, _mm256_loadu_si256((const __m256i*)p));
#elif defined(CHUNKDELTA_ISA_avx2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
#endif
}

static inline void store(float* p, vf v) {
  std::memcpy(p, &v, sizeof(v));
}
static inline void store(bf16_t* p, vf v) {
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  const vu nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
  const vh out = __builtin_convertvector((nan & quiet) | (~nan & rounded), vh);
  std::memcpy(p, &out, sizeof(out));
}
static inline void store(f16_t* p, vf v) {
#if defined(CHUNKDELTA_ISA_avx512)
  _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(-1, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CHUNKDELTA_ISA_avx2)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  for (int i = 0; i < W; i++) from_float(v[i], p + i);
#endif
}

// The first n < W values; the others load as 0 and are not stored.
template <typename T>
static inline vf load_first(const T* p, int n) {
  T buffer[W] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <typename T>
static inline void store_first(T* p, vf v, int n) {
  T buffer[W];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

static inline vf max(vf a, vf b) {
  return a > b ? a : b;
}
static inline vf min(vf a, vf b) {
  return a < b ? a : b;
}

// Halves are added pairwise: the order, and so the result, is the same for every caller.
static inline float sum(vf v) {
  float x[W];
  store(x, v);
  for (int n = W / 2; n; n /= 2) {
    for (int i = 0; i < n; i++) x[i] += x[i + n];
  }
  return x[0];
}
static inline float max(vf v) {
  float x[W];
  store(x, v);
  for (int n = W / 2; n; n /= 2) {
    for (int i = 0; i < n; i++) x[i] = x[i] > x[i + n] ? x[i] : x[i + n];
  }
  return x[0];
}

// exp within 1 ulp on [-87, 88]; smaller arguments, -inf included, give 0 and NaN stays NaN. Larger
// arguments saturate: the kernels exponentiate differences <= 0.
static inline vf exp(vf x) {
  const vf clamped = max(min(x, splat(88.0f)), splat(-88.0f));
  // n = round(x / ln 2) by the 1.5 * 2^23 trick, r = x - n ln 2 in two steps (Cody and Waite).
  const vf shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const vf n = shifted - 12582912.0f;
  const vf r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  // Minimax polynomial of e^r on [-ln2/2, ln2/2].
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const vf scale = (vf)((((vi)shifted) << 23) + 0x3f800000);  // low bits of `shifted` hold n
  const vf y = p * scale;
  const vf flushed = x < -87.0f ? splat(0.0f) : y;
  return x == x ? flushed : x;
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
