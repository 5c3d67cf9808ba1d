// Reading and writing rows of pages; how they look is in page_format.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/isa.h"
#include "core/page_format.h"

namespace chunkdelta {

// Keys that are always consecutive in memory: a page size is a multiple of it.
constexpr int64_t kPageBlock = 16;

// decode_rows: `rows` consecutive rows of a page -> out[i * ld + d], fp32.
// encode_row: head_dim values of `dtype` -> one row. q8_0 and q4_0 give the bytes of ggml's
// reference; a block with a NaN or an infinity decodes to NaN, never to a number.
CHUNKDELTA_DECLARE_KERNEL(void decode_rows(PageFormat format, int head_dim, int64_t rows,
                                           const void* page_rows, float* out, ptrdiff_t ld);
                          void encode_row(PageFormat format, int head_dim, Dtype dtype,
                                          const void* x, void* page_row))

}  // namespace chunkdelta
