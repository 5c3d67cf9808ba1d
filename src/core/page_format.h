// How a key or value row [head_dim] is stored in a page.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace chunkdelta {

// q8_0 is ggml's: blocks of 32 values, each an fp16 scale and 32 int8.
enum class PageFormat : uint8_t { f32, f16, bf16, q8_0 };

constexpr int64_t kQ80Values = 32;
constexpr int64_t kQ80Bytes = 34;

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
  }
  return "";
}

// Bytes of one row; a q8_0 row is filled up to whole blocks.
static inline int64_t page_row_bytes(PageFormat format, int64_t head_dim) {
  switch (format) {
    case PageFormat::f32:
      return head_dim * 4;
    case PageFormat::f16:
    case PageFormat::bf16:
      return head_dim * 2;
    case PageFormat::q8_0:
      return (head_dim + kQ80Values - 1) / kQ80Values * kQ80Bytes;
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
