#include "core/page_codec_kernel.h"
#include "core/simd.h"

namespace chunkdelta::CHUNKDELTA_ISA {
namespace {

template <typename T>
void decode_dense(int head_dim, int64_t rows, const T* x, float* out, ptrdiff_t ld) {
  for (int64_t i = 0; i < rows; i++, x += head_dim, out += ld) {
    int d = 0;
    for (; d + W <= head_dim; d += W) store(out + d, load(x + d));
    if (d < head_dim) store_first(out + d, load_first(x + d, head_dim - d), head_dim - d);
  }
}

f16_t read_f16(const uint8_t* p) {
  f16_t x;
  std::memcpy(&x, p, 2);
  return x;
}

static_assert(kQ80Values % W == 0);

void decode_q8_0(int head_dim, int64_t rows, const uint8_t* x, float* out, ptrdiff_t ld) {
  for (int64_t i = 0; i < rows; i++, out += ld) {
    for (int d = 0; d < head_dim; d += kQ80Values, x += kQ80Bytes) {
      const vf scale = splat(to_float(read_f16(x)));
      const int8_t* values = reinterpret_cast<const int8_t*>(x + 2);
      const int n = head_dim - d;
      if (n >= kQ80Values) {
        CHUNKDELTA_UNROLL for (int j = 0; j < kQ80Values; j += W) {
          store(out + d + j, scale * load(values + j));
        }
      } else {
        for (int j = 0; j < n; j++) out[d + j] = scale[0] * values[j];
      }
    }
  }
}

template <typename T>
void read_values(int n, const T* x, float* out) {
  for (int i = 0; i < n; i++) out[i] = to_float(x[i]);
}

// ggml rounds the quotients away from zero at one half, and keeps the unrounded 1/d for them.
void encode_q8_0(int n, const float* x, uint8_t* block) {
  float largest = 0;
  bool finite = true;
  for (int i = 0; i < n; i++) {
    const float magnitude = x[i] < 0 ? -x[i] : x[i];
    finite = finite && magnitude <= 3.4028234663852886e38f;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float d = finite ? largest / 127 : __builtin_nanf("");
  const float inverse = finite && d != 0 ? 1.0f / d : 0.0f;
  f16_t scale;
  from_float(d, &scale);
  std::memcpy(block, &scale, 2);
  for (int i = 0; i < kQ80Values; i++) {
    const float q = i < n && finite ? x[i] * inverse : 0.0f;
    block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(__builtin_roundf(q)));
  }
}

}  // namespace

void decode_rows(PageFormat format, int head_dim, int64_t rows, const void* page_rows, float* out,
                 ptrdiff_t ld) {
  switch (format) {
    case PageFormat::f32:
      return decode_dense(head_dim, rows, static_cast<const float*>(page_rows), out, ld);
    case PageFormat::f16:
      return decode_dense(head_dim, rows, static_cast<const f16_t*>(page_rows), out, ld);
    case PageFormat::bf16:
      return decode_dense(head_dim, rows, static_cast<const bf16_t*>(page_rows), out, ld);
    case PageFormat::q8_0:
      return decode_q8_0(head_dim, rows, static_cast<const uint8_t*>(page_rows), out, ld);
  }
}

void encode_row(PageFormat format, int head_dim, Dtype dtype, const void* x, void* page_row) {
  if (page_format_is(format, dtype)) {
    std::memcpy(page_row, x, page_row_bytes(format, head_dim));
    return;
  }
  for (int begin = 0; begin < head_dim; begin += kQ80Values) {
    const int n = head_dim - begin < kQ80Values ? head_dim - begin : kQ80Values;
    float values[kQ80Values];
    switch (dtype) {
      case Dtype::f32:
        read_values(n, static_cast<const float*>(x) + begin, values);
        break;
      case Dtype::f16:
        read_values(n, static_cast<const f16_t*>(x) + begin, values);
        break;
      case Dtype::bf16:
        read_values(n, static_cast<const bf16_t*>(x) + begin, values);
        break;
    }
    switch (format) {
      case PageFormat::f32:
        for (int i = 0; i < n; i++) static_cast<float*>(page_row)[begin + i] = values[i];
        break;
      case PageFormat::f16:
        for (int i = 0; i < n; i++)
          from_float(values[i], static_cast<f16_t*>(page_row) + begin + i);
        break;
      case PageFormat::bf16:
        for (int i = 0; i < n; i++) {
          from_float(values[i], static_cast<bf16_t*>(page_row) + begin + i);
        }
        break;
      case PageFormat::q8_0:
        encode_q8_0(n, values, static_cast<uint8_t*>(page_row) + begin / kQ80Values * kQ80Bytes);
        break;
    }
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
