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

static_assert(kQ80Values % W == 0 && kQ40Values / 2 % W == 0 && kTurbo4Values % W == 0);

// One block -> fp32.
void decode_block_q8_0(const uint8_t* block, float* out) {
  const vf scale = splat(to_float(read_f16(block)));
  const int8_t* values = reinterpret_cast<const int8_t*>(block + 2);
  CHUNKDELTA_UNROLL for (int j = 0; j < kQ80Values; j += W)
      store(out + j, scale * load(values + j));
}

void decode_block_q4_0(const uint8_t* block, float* out) {
  const vf scale = splat(to_float(read_f16(block)));
  CHUNKDELTA_UNROLL for (int j = 0; j < kQ40Values / 2; j += W) {
    const vi q = __builtin_convertvector(load_bits<vub>(block + 2 + j), vi);
    store(out + j, (__builtin_convertvector(q & 15, vf) - 8.0f) * scale);
    store(out + kQ40Values / 2 + j, (__builtin_convertvector(q >> 4, vf) - 8.0f) * scale);
  }
}

constexpr float kCentroids[8] = {CHUNKDELTA_TURBO4_CENTROIDS};
constexpr float kMidpoints[7] = {CHUNKDELTA_TURBO4_MIDPOINTS};

void decode_block_turbo4(const uint8_t* block, float* out) {
  const float norm = to_float(read_f16(block));
  float table[16];
  for (int i = 0; i < 8; i++) {
    table[8 + i] = norm * kCentroids[i];
    table[7 - i] = -table[8 + i];
  }
  for (int i = 0; i < kTurbo4Values / 2; i++) {
    const uint8_t q = block[4 + i];
    out[2 * i] = table[q & 15];
    out[2 * i + 1] = table[q >> 4];
  }
}

template <int VALUES, int BYTES, void (*DECODE)(const uint8_t*, float*)>
void decode_blocks(int head_dim, int64_t rows, const uint8_t* x, float* out, ptrdiff_t ld) {
  for (int64_t i = 0; i < rows; i++, out += ld) {
    for (int d = 0; d < head_dim; d += VALUES, x += BYTES) {
      if (head_dim - d >= VALUES) {
        DECODE(x, out + d);
      } else {  // the row's last block is filled up
        float values[VALUES];
        DECODE(x, values);
        std::memcpy(out + d, values, (head_dim - d) * sizeof(float));
      }
    }
  }
}

template <typename T>
void read_values(int n, const T* x, float* out) {
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i));
  for (; i < n; i++) out[i] = to_float(x[i]);
}

template <typename T>
void write_values(int n, const float* x, T* out) {
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i));
  for (; i < n; i++) from_float(x[i], out + i);
}

void write_f16(float x, uint8_t* p) {
  f16_t half;
  from_float(x, &half);
  std::memcpy(p, &half, 2);
}

// The value of largest magnitude; NaN when one is not finite.
float extreme(int n, const float* x) {
  float largest = 0, value = 0;
  for (int i = 0; i < n; i++) {
    const float magnitude = x[i] < 0 ? -x[i] : x[i];
    if (!(magnitude <= 3.4028234663852886e38f)) return __builtin_nanf("");
    if (magnitude > largest) largest = magnitude, value = x[i];
  }
  return value;
}

// ggml rounds the quotients away from zero at one half, and keeps the unrounded 1/d for them.
void encode_block_q8_0(const float* x, uint8_t* block) {
  const float most = extreme(kQ80Values, x), d = (most < 0 ? -most : most) / 127;
  const float inverse = d > 0 ? 1.0f / d : 0.0f;  // 0 for NaN too
  write_f16(d, block);
  for (int i = 0; i < kQ80Values; i++) {
    const float q = inverse != 0 ? x[i] * inverse : 0.0f;
    block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(__builtin_roundf(q)));
  }
}

// The extreme value is -8 d, with its own sign: the range is [-8, 7] d.
void encode_block_q4_0(const float* x, uint8_t* block) {
  const float d = extreme(kQ40Values, x) / -8;
  const float inverse = d < 0 || d > 0 ? 1.0f / d : 0.0f;
  write_f16(d, block);
  const auto nibble = [&](int i) {
    const int q = inverse != 0 ? static_cast<int>(x[i] * inverse + 8.5f) : 8;
    return q < 15 ? q : 15;
  };
  for (int i = 0; i < kQ40Values / 2; i++) {
    block[2 + i] = static_cast<uint8_t>(nibble(i) | nibble(i + kQ40Values / 2) << 4);
  }
}

// Nearest centroids of the direction; the stored norm makes the reconstruction as long as x.
void encode_block_turbo4(const float* x, uint8_t* block) {
  vf squares{};
  for (int i = 0; i < kTurbo4Values; i += W) squares += load(x + i) * load(x + i);
  const float norm = __builtin_sqrtf(sum(squares));
  const bool finite = norm <= 3.4028234663852886e38f;
  const float inverse = finite && norm > 1e-10f ? 1.0f / norm : 0.0f;
  float reconstructed = 0;
  uint8_t index[kTurbo4Values];
  for (int i = 0; i < kTurbo4Values; i++) {
    const float u = inverse != 0 ? x[i] * inverse : 0.0f, magnitude = u < 0 ? -u : u;
    // A value on a midpoint belongs to the upper centroid: below zero that is the smaller
    // magnitude.
    int step = 0;
    for (int m = 0; m < 7; m++) step += u < 0 ? magnitude > kMidpoints[m] : u >= kMidpoints[m];
    index[i] = static_cast<uint8_t>(u < 0 ? 7 - step : 8 + step);
    reconstructed += kCentroids[step] * kCentroids[step];
  }
  write_f16(finite ? norm / __builtin_sqrtf(reconstructed) : __builtin_nanf(""), block);
  write_f16(0.0f, block + 2);
  for (int i = 0; i < kTurbo4Values / 2; i++) {
    block[4 + i] = static_cast<uint8_t>(index[2 * i] | index[2 * i + 1] << 4);
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
      return decode_blocks<kQ80Values, kQ80Bytes, decode_block_q8_0>(
          head_dim, rows, static_cast<const uint8_t*>(page_rows), out, ld);
    case PageFormat::q4_0:
      return decode_blocks<kQ40Values, kQ40Bytes, decode_block_q4_0>(
          head_dim, rows, static_cast<const uint8_t*>(page_rows), out, ld);
    case PageFormat::turbo4:
      return decode_blocks<kTurbo4Values, kTurbo4Bytes, decode_block_turbo4>(
          head_dim, rows, static_cast<const uint8_t*>(page_rows), out, ld);
  }
}

void encode_row(PageFormat format, int head_dim, Dtype dtype, const void* x, void* page_row) {
  if (page_format_is(format, dtype)) {
    std::memcpy(page_row, x, page_row_bytes(format, head_dim));
    return;
  }
  constexpr int RUN = 128;  // whole blocks of every format
  static_assert(RUN % kQ80Values == 0 && RUN % kQ40Values == 0 && RUN % kTurbo4Values == 0);
  for (int begin = 0; begin < head_dim; begin += RUN) {
    const int n = head_dim - begin < RUN ? head_dim - begin : RUN;
    float values[RUN] = {};
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
    uint8_t* blocks = static_cast<uint8_t*>(page_row) + page_row_bytes(format, begin);
    switch (format) {
      case PageFormat::f32:
        write_values(n, values, static_cast<float*>(page_row) + begin);
        break;
      case PageFormat::f16:
        write_values(n, values, static_cast<f16_t*>(page_row) + begin);
        break;
      case PageFormat::bf16:
        write_values(n, values, static_cast<bf16_t*>(page_row) + begin);
        break;
      case PageFormat::q8_0:
        for (int i = 0; i < n; i += kQ80Values, blocks += kQ80Bytes) {
          encode_block_q8_0(values + i, blocks);
        }
        break;
      case PageFormat::q4_0:
        for (int i = 0; i < n; i += kQ40Values, blocks += kQ40Bytes) {
          encode_block_q4_0(values + i, blocks);
        }
        break;
      case PageFormat::turbo4:
        encode_block_turbo4(values, blocks);
        break;
    }
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
