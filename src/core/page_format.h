// How a key or value row [head_dim] is stored in a page.
#pragma once

#include <cstdint>

#include "attention/turbo4.h"
#include "core/dtype.h"

namespace chunkdelta {

// Blocks, each with its own scale:
//   q8_0    ggml: 32 values, an fp16 scale and 32 int8
//   q4_0    ggml: 32 values, an fp16 scale and 32 nibbles + 8; byte i holds values i and i + 16
//   turbo4  llama.cpp forks, after TurboQuant: 128 values, an fp16 norm, two bytes of 0 and 128
//           nibbles that index centroids; byte i holds values 2i and 2i + 1. The values are
//           rotated: the op rotates q and k before and o after, so codecs know nothing of it.
enum class PageFormat : uint8_t { f32, f16, bf16, q8_0, q4_0, turbo4 };

constexpr int64_t kQ80Values = 32, kQ80Bytes = 34;
constexpr int64_t kQ40Values = 32, kQ40Bytes = 18;
constexpr int64_t kTurbo4Values = 128, kTurbo4Bytes = 68;

static inline const char* page_format_name(PageFormat format) {
  switch (format) {
    case PageFormat::f32:
      return "float32";
    case PageFormat::f16:
      return "float16";
    case PageFormat::bf16:
      return "bfloat16";
    case PageFormat::q8_0:
      return "q8_0";
    case PageFormat::q4_0:
      return "q4_0";
    case PageFormat::turbo4:
      return "turbo4";
  }
  return "";
}

// Bytes of one row, which is filled up to whole blocks.
static inline int64_t page_row_bytes(PageFormat format, int64_t head_dim) {
  switch (format) {
    case PageFormat::f32:
      return head_dim * 4;
    case PageFormat::f16:
    case PageFormat::bf16:
      return head_dim * 2;
    case PageFormat::q8_0:
      return (head_dim + kQ80Values - 1) / kQ80Values * kQ80Bytes;
    case PageFormat::q4_0:
      return (head_dim + kQ40Values - 1) / kQ40Values * kQ40Bytes;
    case PageFormat::turbo4:
      return (head_dim + kTurbo4Values - 1) / kTurbo4Values * kTurbo4Bytes;
  }
  return 0;
}

// Whether a kernel computing in `dtype` reads such pages as they are.
static inline bool page_format_is(PageFormat format, Dtype dtype) {
  return (format == PageFormat::f32 && dtype == Dtype::f32) ||
         (format == PageFormat::f16 && dtype == Dtype::f16) ||
         (format == PageFormat::bf16 && dtype == Dtype::bf16);
}

}  // namespace chunkdelta
