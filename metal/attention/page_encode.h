// How a simdgroup writes a key or value row [head_dim] to a page: the inverse of page_codec.h, with
// the arithmetic of src/core/page_codec_kernel.cpp.
#pragma once

#include <metal_stdlib>

#include "attention/turbo4.h"

using namespace metal;

// The largest value that counts as finite.
constant constexpr float kLargestFloat = 3.4028234663852886e38f;

// A row of plain values of type P, four a lane where rows allow it.
template <typename P, int V>
struct PlainEncoder {
  static METAL_FUNC int row_bytes(int head_dim) { return head_dim * int(sizeof(P)); }

  template <typename T>
  static METAL_FUNC void encode(const device T* x, device uchar* row, int head_dim, int lane) {
    device P* out = (device P*)row;
    for (int d = lane * V; d < head_dim; d += 32 * V) {
      if (V == 4) {
        *(device vec<P, 4>*)(out + d) = vec<P, 4>(float4(*(const device vec<T, 4>*)(x + d)));
      } else {
        out[d] = P(float(x[d]));
      }
    }
  }
};

// Value `lane` of a block of 32, or 0 behind the row's end.
template <typename T>
METAL_FUNC float block_value(const device T* x, int d, int head_dim) {
  return d < head_dim ? float(x[d]) : 0.0f;
}

// The largest magnitude of the simdgroup's values; infinite where one of them is not finite.
METAL_FUNC float largest_magnitude(float x) {
  const float magnitude = fabs(x);
  return simd_max(magnitude <= kLargestFloat ? magnitude : INFINITY);
}

// ggml's q8_0: an fp16 scale and 32 int8. The quotients use the unrounded scale and are rounded
// away from zero at one half; a block that holds something not finite decodes to NaN.
struct Q80Encoder {
  static METAL_FUNC int row_bytes(int head_dim) { return (head_dim + 31) / 32 * 34; }

  template <typename T>
  static METAL_FUNC void encode(const device T* x, device uchar* row, int head_dim, int lane) {
    for (int first = 0; first < head_dim; first += 32, row += 34) {
      const float value = block_value(x, first + lane, head_dim);
      const float most = largest_magnitude(value);
      const bool finite = most <= kLargestFloat;
      const float d = finite ? most / 127.0f : NAN;
      const float inverse = finite && d > 0.0f ? 1.0f / d : 0.0f;
      if (lane == 0) *(device half*)row = half(d);
      const float q = inverse != 0.0f ? value * inverse : 0.0f;
      row[2 + lane] = uchar(char(round(q)));
    }
  }
};

// ggml's q4_0: an fp16 scale and 16 bytes of nibbles + 8, values i and i + 16 in byte i. The
// extreme value is -8 d with its own sign, the first of them where several are.
struct Q40Encoder {
  static METAL_FUNC int row_bytes(int head_dim) { return (head_dim + 31) / 32 * 18; }

  template <typename T>
  static METAL_FUNC void encode(const device T* x, device uchar* row, int head_dim, int lane) {
    for (int first = 0; first < head_dim; first += 32, row += 18) {
      const float value = block_value(x, first + lane, head_dim);
      const float most = largest_magnitude(value);
      const bool finite = most <= kLargestFloat;
      const int at = simd_min(fabs(value) == most ? lane : 32);
      const float extreme = simd_shuffle(value, ushort(at & 31));
      const float d = finite ? extreme / -8.0f : NAN;
      const float inverse = finite && d != 0.0f ? 1.0f / d : 0.0f;
      if (lane == 0) *(device half*)row = half(d);
      const int q = inverse != 0.0f ? min(int(value * inverse + 8.5f), 15) : 8;
      const int upper = simd_shuffle_xor(q, ushort(16));
      if (lane < 16) row[2 + lane] = uchar(q | upper << 4);
    }
  }
};

constexpr constant static float kTurbo4Centroids[8] = {CHUNKDELTA_TURBO4_CENTROIDS};
constexpr constant static float kTurbo4Midpoints[7] = {CHUNKDELTA_TURBO4_MIDPOINTS};

// turbo4: 128 values, an fp16 norm, an unused half and nibbles that index centroids, values 2 i and
// 2 i + 1 in byte i. The stored norm makes the reconstruction as long as the row's block is.
struct Turbo4Encoder {
  static METAL_FUNC int row_bytes(int head_dim) { return (head_dim + 127) / 128 * 68; }

  template <typename T>
  static METAL_FUNC void encode(const device T* x, device uchar* row, int head_dim, int lane) {
    for (int first = 0; first < head_dim; first += 128, row += 68) {
      float values[4];
      float squares = 0.0f;
      for (int i = 0; i < 4; i++) {
        values[i] = block_value(x, first + 4 * lane + i, head_dim);
        squares += values[i] * values[i];
      }
      const float norm = sqrt(simd_sum(squares));
      const bool finite = norm <= kLargestFloat;
      const float inverse = finite && norm > 1e-10f ? 1.0f / norm : 0.0f;
      float reconstructed = 0.0f;
      int nibbles[4];
      for (int i = 0; i < 4; i++) {
        const float u = inverse != 0.0f ? values[i] * inverse : 0.0f;
        // A value on a midpoint belongs to the upper centroid: below zero that is the smaller
        // magnitude.
        int step = 0;
        for (int m = 0; m < 7; m++) {
          const bool above = u < 0.0f ? -u > kTurbo4Midpoints[m] : u >= kTurbo4Midpoints[m];
          step += above ? 1 : 0;
        }
        nibbles[i] = u < 0.0f ? 7 - step : 8 + step;
        reconstructed += kTurbo4Centroids[step] * kTurbo4Centroids[step];
      }
      reconstructed = simd_sum(reconstructed);
      if (lane == 0) {
        *(device half*)row = half(finite ? norm / sqrt(reconstructed) : NAN);
        *(device half*)(row + 2) = half(0.0f);
      }
      row[4 + 2 * lane] = uchar(nibbles[0] | nibbles[1] << 4);
      row[4 + 2 * lane + 1] = uchar(nibbles[2] | nibbles[3] << 4);
    }
  }
};
