#include "core/paged_attention_kernel.h"

#include "core/gemm_tile.h"
#include "core/page_codec_kernel.h"
#include "core/simd.h"

namespace chunkdelta::CHUNKDELTA_ISA {
namespace {

constexpr int P = GEMM_VECTORS * W;  // columns of a packed panel
constexpr int BLOCK = static_cast<int>(kPageBlock);
static_assert(kTileKeys % P == 0 && 64 % P == 0 && P % 8 == 0 && W <= 16);

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;

int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

float infinity() {
  return __builtin_inff();
}

// 2^x for x <= 0 within 1 ulp; below 2^-126 it is 0, and NaN stays NaN.
vf exp2(vf x) {
  const vf clamped = max(x, splat(-126.0f));
  const vf shifted = clamped + 12582912.0f;  // rounds to an integer, which its low bits then hold
  const vf r = clamped - (shifted - 12582912.0f);
  vf p = splat(1.535336188319500e-4f);
  p = p * r + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  const vf scale = (vf)((((vi)shifted) << 23) + 0x3f800000);
  const vf y = x < -126.0f ? splat(0.0f) : p * scale;
  return x == x ? y : x;
}

float exp2(float x) {
  return exp2(splat(x))[0];
}

// A polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel (Cephes' tanhf).
vf tanh(vf x) {
  const vf magnitude = max(x, -x), z = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const vf small = (p * z) * x + x;
  const vf e = exp2(magnitude * (-2 * LOG2_E));
  const vf large = (1.0f - e) / (1.0f + e);
  const vf signed_large = x < 0.0f ? -large : large;
  const vf y = magnitude < 0.625f ? small : signed_large;
  return x == x ? y : x;
}

void pack_keys(const PackArguments& a, int begin, int end) {
  float rows[P * 256];
  for (int key = begin; key < end; key += P) {
    for (int j = 0; j < P; j += BLOCK < P ? BLOCK : P) {
      const int first = key + j, step = BLOCK < P ? BLOCK : P;
      int n = a.count - first;
      n = n < 0 ? 0 : n > step ? step : n;
      if (n > 0) {
        const char* block = static_cast<const char*>(a.k_blocks[first / BLOCK]);
        block += first % BLOCK * page_row_bytes(a.k_format, a.head_dim);
        decode_rows(a.k_format, a.head_dim, n, block, rows + j * a.head_dim, a.head_dim);
      }
      for (int i = n * a.head_dim; i < step * a.head_dim; i++) rows[j * a.head_dim + i] = 0;
    }
    float* panel = a.segment.keys + int64_t(key) * a.head_dim;
    for (int d = 0; d < a.head_dim; d++) {
      for (int j = 0; j < P; j++) panel[d * P + j] = rows[j * a.head_dim + d];
    }
  }
}

void pack_values(const PackArguments& a, int begin, int end) {
  const int padded = padded_head_dim(a.head_dim);
  float rows[BLOCK * 256];
  for (int i = 0; i < BLOCK * 256; i++) rows[i] = 0;
  for (int key = begin; key < end && key < a.count; key += BLOCK) {
    const int n = a.count - key < BLOCK ? a.count - key : BLOCK;
    decode_rows(a.v_format, a.head_dim, n, a.v_blocks[key / BLOCK], rows, padded);
    for (int column = 0; column < padded; column += P) {
      const int width = padded - column < P ? padded - column : P;
      float* panel = a.segment.values + int64_t(column) * a.segment.capacity + int64_t(key) * width;
      for (int i = 0; i < n; i++) {
        for (int j = 0; j < width; j += W) {
          store(panel + i * width + j, load(rows + i * padded + column + j));
        }
      }
    }
  }
}

template <typename T>
void load_queries(const TileArguments& a, float* out, int ld) {
  for (int i = 0; i < a.rows; i++, out += ld) {
    const int64_t row = a.row_begin + i;
    const T* q =
        static_cast<const T*>(a.q) + (row / a.group * a.num_q_heads + row % a.group) * a.head_dim;
    int d = 0;
    for (; d + W <= a.head_dim; d += W) store(out + d, load(q + d) * a.q_scale);
    for (; d < a.head_dim; d++) out[d] = to_float(q[d]) * a.q_scale;
  }
}

// One row of scores [0, n): the columns in [low, high) are visible.
void softmax_row(const TileArguments& a, int row, float* s, int n, int low, int high) {
  if (a.softcap != 0) {
    for (int j = 0; j < n; j += W) store(s + j, tanh(load(s + j)) * a.softcap);
  }
  for (int j = 0; j < low; j++) s[j] = -infinity();
  for (int j = high; j < n; j++) s[j] = -infinity();
  vf top = splat(-infinity());
  for (int j = 0; j < n; j += W) top = max(load(s + j), top);
  const float old = a.m[row];
  const float m = max(top) > old ? max(top) : old;
  // Nothing visible so far: any finite reference gives P = 0.
  const float reference = m == -infinity() ? 0.0f : m;
  if (m != old) {
    const float rescale = exp2(old - reference);
    a.m[row] = m;
    a.l[row] *= rescale;
    float* o = a.o + row * padded_head_dim(a.head_dim);
    for (int d = 0; d < padded_head_dim(a.head_dim); d += W) store(o + d, load(o + d) * rescale);
  }
  vf total = splat(0);
  for (int j = 0; j < n; j += W) {
    const vf p = exp2(load(s + j) - reference);
    store(s + j, p);
    total += p;
  }
  a.l[row] += sum(total);
}

template <typename T>
void store_output(const TileArguments& a, void* out, float* lse) {
  const int padded = padded_head_dim(a.head_dim);
  for (int i = 0; i < a.rows; i++) {
    const int64_t row = a.row_begin + i;
    const int64_t at = row / a.group * a.num_q_heads + row % a.group;
    T* o = static_cast<T*>(out) + at * a.head_dim;
    const float l = a.l[i], inverse = l == 0 ? 0.0f : 1.0f / l;
    for (int d = 0; d < a.head_dim; d++) from_float(a.o[i * padded + d] * inverse, o + d);
    if (lse) lse[at] = l == 0 ? -infinity() : a.m[i] * LN_2 + __builtin_logf(l);
  }
}

}  // namespace

void pack_segment(const PackArguments& arguments, int begin, int end) {
  pack_keys(arguments, begin, end);
  pack_values(arguments, begin, end);
}

void attend_tile(const TileArguments& a) {
  const int q_ld = round_up(a.head_dim, 16) + 16, s_ld = kTileKeys + 16;
  float* q = a.scratch;
  float* scores = q + kTileRows * (256 + 16);
  switch (a.dtype) {
    case Dtype::f32:
      load_queries<float>(a, q, q_ld);
      break;
    case Dtype::f16:
      load_queries<f16_t>(a, q, q_ld);
      break;
    case Dtype::bf16:
      load_queries<bf16_t>(a, q, q_ld);
      break;
  }
  const int padded = padded_head_dim(a.head_dim);
  // Visible keys of the tile's first and last position, counted from the segment's first.
  const int64_t first = a.row_begin / a.group + a.shift - a.key_begin;
  const int64_t last = (a.row_begin + a.rows - 1) / a.group + a.shift - a.key_begin;
  int end = a.count, begin = 0;
  if (a.causal && last + 1 < end) end = static_cast<int>(last + 1);
  if (a.window && first - a.window + 1 > 0) begin = static_cast<int>(first - a.window + 1) / P * P;
  for (; begin < end; begin += kTileKeys) {
    const int keys = end - begin < kTileKeys ? end - begin : kTileKeys;
    const int columns = round_up(keys, P);
    for (int j = 0; j < columns; j += P) {
      gemm_columns<GEMM_VECTORS>(a.rows, a.head_dim, Matrix{q, q_ld, 1},
                                 a.segment.keys + int64_t(begin + j) * a.head_dim, P, scores + j,
                                 s_ld, false);
    }
    for (int i = 0; i < a.rows; i++) {
      const int64_t position = (a.row_begin + i) / a.group + a.shift - a.key_begin - begin;
      int low = 0, high = keys;
      if (a.causal && position + 1 < high) high = position < 0 ? 0 : static_cast<int>(position + 1);
      if (a.window && position - a.window + 1 > 0) {
        low = position - a.window + 1 < high ? static_cast<int>(position - a.window + 1) : high;
      }
      softmax_row(a, i, scores + i * s_ld, columns, low, high);
    }
    const Matrix p{scores, s_ld, 1};
    for (int column = 0; column < padded; column += P) {
      const int width = padded - column < P ? padded - column : P;
      const float* v =
          a.segment.values + int64_t(column) * a.segment.capacity + int64_t(begin) * width;
      gemm(a.rows, width, keys, p, v, width, a.o + column, padded, true);
    }
  }
}

void finish_tile(const TileArguments& arguments, void* out, float* lse) {
  switch (arguments.dtype) {
    case Dtype::f32:
      return store_output<float>(arguments, out, lse);
    case Dtype::f16:
      return store_output<f16_t>(arguments, out, lse);
    case Dtype::bf16:
      return store_output<bf16_t>(arguments, out, lse);
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
