// Storage types of activations and pages, and their scalar conversion to and from fp32 (round to
// nearest even; the vector forms are in core/simd.h). Everything here is static inline: kernel
// sources are compiled once per instruction set, and a shared inline symbol would let the linker
// put AVX-512 code into the baseline.
#pragma once

#include <cstdint>
#include <cstring>

namespace chunkdelta {

enum class Dtype : uint8_t { f32, f16, bf16 };

struct f16_t {
  uint16_t bits;
};
struct bf16_t {
  uint16_t bits;
};

static inline int64_t size_of(Dtype dtype) {
  return dtype == Dtype::f32 ? 4 : 2;
}
static inline const char* dtype_name(Dtype dtype) {
  return dtype == Dtype::f32 ? "float32" : dtype == Dtype::f16 ? "float16" : "bfloat16";
}

static inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static inline float float_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline float to_float(float x) {
  return x;
}
static inline float to_float(bf16_t x) {
  return float_from_bits(uint32_t(x.bits) << 16);
}
static inline float to_float(f16_t x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Scaling by 2^112 moves the exponent's bias from 15 to 127, subnormals included.
  return float_from_bits(sign | float_bits(float_from_bits(magnitude << 13) * 0x1p112f));
}

static inline void from_float(float x, float* out) {
  *out = x;
}
static inline void from_float(float x, bf16_t* out) {
  const uint32_t bits = float_bits(x);
  out->bits = (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(bits >> 16 | 0x40)  // keep NaN a NaN
                                               : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline void from_float(float x, f16_t* out) {
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out->bits = uint16_t(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // rounds to 2^16 or is larger
    out->bits = uint16_t(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded mantissa below
    out->bits = uint16_t(sign | (float_bits(float_from_bits(magnitude) + 0.5f) - 0x3f000000));
  } else {
    out->bits = uint16_t(sign | (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13);
  }
}

}  // namespace chunkdelta
