#include "core/paged_attention_kernel.h"

#include <utility>

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

// x[i][j] -> x[j][i], exchanging bit h of the row with bit h of the lane.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define CHUNKDELTA_SHUFFLE 1
#endif
#endif
#if defined(CHUNKDELTA_SHUFFLE)
template <int H, int... LANE>
void exchange(vf& a, vf& b, std::integer_sequence<int, LANE...>) {
  const vf low = __builtin_shufflevector(a, b, (LANE & H ? W + (LANE ^ H) : LANE)...);
  b = __builtin_shufflevector(a, b, (LANE & H ? W + LANE : LANE ^ H)...);
  a = low;
}
#else
template <int H, int... LANE>
void exchange(vf& a, vf& b, std::integer_sequence<int, LANE...>) {
  const vf low{(LANE & H ? b[LANE ^ H] : a[LANE])...};
  b = vf{(LANE & H ? b[LANE] : a[LANE ^ H])...};
  a = low;
}
#endif

template <int H>
inline void transpose(vf (&x)[W]) {
  if constexpr (H < W) {
    CHUNKDELTA_UNROLL for (int i = 0; i < W; i++) {
      if ((i & H) == 0) exchange<H>(x[i], x[i + H], std::make_integer_sequence<int, W>());
    }
    transpose<2 * H>(x);
  }
}

// The P keys from `key` on as a panel [head_dim][P]; keys that do not exist are 0.
void pack_panel(const SegmentKeys& keys, int key, float* panel) {
  const int D = keys.head_dim;
  const int64_t row_bytes = page_row_bytes(keys.k_format, D);
  constexpr int STEP = BLOCK < P ? BLOCK : P;
  float rows[STEP * 256];
  for (int j = 0; j < P; j += STEP) {
    const int first = key + j, left = keys.count - first;
    const int n = left < 0 ? 0 : left > STEP ? STEP : left;
    if (n > 0) {
      const char* block = static_cast<const char*>(keys.k_blocks[first / BLOCK]);
      decode_rows(keys.k_format, D, n, block + first % BLOCK * row_bytes, rows, D);
    }
    for (int i = n * D; i < STEP * D; i++) rows[i] = 0;
    for (int i = 0; i < STEP; i += W) {
      int d = 0;
      for (; d + W <= D; d += W) {
        vf x[W];
        CHUNKDELTA_UNROLL for (int l = 0; l < W; l++) x[l] = load(rows + (i + l) * D + d);
        transpose<1>(x);
        CHUNKDELTA_UNROLL for (int l = 0; l < W; l++) store(panel + (d + l) * P + j + i, x[l]);
      }
      for (; d < D; d++) {
        for (int l = 0; l < W; l++) panel[d * P + j + i + l] = rows[(i + l) * D + d];
      }
    }
  }
}

void pack_values(const SegmentKeys& keys, int begin, int end) {
  const int padded = padded_head_dim(keys.head_dim);
  float rows[BLOCK * 256];
  for (int i = 0; i < BLOCK * padded; i++) rows[i] = 0;  // the padding stays 0
  for (int key = begin; key < end && key < keys.count; key += BLOCK) {
    const int n = keys.count - key < BLOCK ? keys.count - key : BLOCK;
    decode_rows(keys.v_format, keys.head_dim, n, keys.v_blocks[key / BLOCK], rows, padded);
    for (int column = 0; column < padded; column += P) {
      const int width = padded - column < P ? padded - column : P;
      float* panel = keys.packed_values + int64_t(column) * keys.capacity + int64_t(key) * width;
      for (int i = 0; i < n; i++) {
        for (int j = 0; j < width; j += W) {
          store(panel + i * width + j, load(rows + i * padded + column + j));
        }
      }
    }
  }
}

template <typename T>
void load_queries(const RowTile& t, float* out) {
  for (int i = 0; i < t.rows; i++, out += kTileLd) {
    const int64_t row = t.row_begin + i;
    const T* q =
        static_cast<const T*>(t.q) + (row / t.group * t.num_q_heads + row % t.group) * t.head_dim;
    int d = 0;
    for (; d + W <= t.head_dim; d += W) store(out + d, load(q + d) * t.q_scale);
    for (; d < t.head_dim; d++) out[d] = to_float(q[d]) * t.q_scale;
  }
}

void load_queries(const RowTile& t, float* out) {
  switch (t.dtype) {
    case Dtype::f32:
      return load_queries<float>(t, out);
    case Dtype::f16:
      return load_queries<f16_t>(t, out);
    case Dtype::bf16:
      return load_queries<bf16_t>(t, out);
  }
}

// Scores of one row, columns [0, n) of which [low, high) are visible -> P; m, l and O follow.
void softmax_row(const RowTile& t, int row, float* s, int n, int low, int high) {
  if (t.softcap != 0) {
    for (int j = 0; j < n; j += W) store(s + j, tanh(load(s + j)) * t.softcap);
  }
  for (int j = 0; j < low; j++) s[j] = -infinity();
  for (int j = high; j < n; j++) s[j] = -infinity();
  vf top = splat(-infinity());
  for (int j = 0; j < n; j += W) top = max(load(s + j), top);
  const float old = t.m[row], highest = max(top);
  const float m = highest > old ? highest : old;
  // Nothing visible so far: any finite reference gives P = 0.
  const float reference = m == -infinity() ? 0.0f : m;
  if (m != old) {
    const float rescale = exp2(old - reference);
    const int padded = padded_head_dim(t.head_dim);
    float* o = t.o + row * padded;
    t.m[row] = m;
    t.l[row] *= rescale;
    for (int d = 0; d < padded; d += W) store(o + d, load(o + d) * rescale);
  }
  vf total = splat(0);
  for (int j = 0; j < n; j += W) {
    const vf p = exp2(load(s + j) - reference);
    store(s + j, p);
    total += p;
  }
  t.l[row] += sum(total);
}

// The tile's scores of the keys [begin, begin + count) of a segment.
void softmax_tile(const RowTile& t, const SegmentKeys& keys, int begin, int count, float* scores) {
  for (int i = 0; i < t.rows; i++) {
    const int64_t position = (t.row_begin + i) / t.group + t.shift - keys.begin - begin;
    int low = 0, high = count;
    if (t.causal && position + 1 < high) high = position < 0 ? 0 : static_cast<int>(position + 1);
    if (t.window && position - t.window + 1 > 0) {
      low = position - t.window + 1 < high ? static_cast<int>(position - t.window + 1) : high;
    }
    softmax_row(t, i, scores + i * kTileLd, round_up(count, P), low, high);
  }
}

struct KeyRange {
  int begin, end;
};

// Keys of the segment that a row of the tile sees; begin is a multiple of every P.
KeyRange visible_keys(const RowTile& t, const SegmentKeys& keys) {
  const int64_t first = t.row_begin / t.group + t.shift - keys.begin;
  const int64_t last = (t.row_begin + t.rows - 1) / t.group + t.shift - keys.begin;
  KeyRange range{0, keys.count};
  if (t.causal && last + 1 < keys.count) range.end = last < 0 ? 0 : static_cast<int>(last + 1);
  const int64_t seen = t.window ? first - t.window + 1 : 0;
  if (seen > 0) range.begin = static_cast<int>(seen < range.end ? seen / 64 * 64 : range.end);
  return range;
}

template <typename T>
void store_output(const RowTile& t, void* out, float* lse) {
  const int padded = padded_head_dim(t.head_dim);
  for (int i = 0; i < t.rows; i++) {
    const int64_t row = t.row_begin + i;
    const int64_t at = row / t.group * t.num_q_heads + row % t.group;
    T* o = static_cast<T*>(out) + at * t.head_dim;
    const float l = t.l[i], inverse = l == 0 ? 0.0f : 1.0f / l;
    const float* x = t.o + i * padded;
    int d = 0;
    for (; d + W <= t.head_dim; d += W) store(o + d, load(x + d) * inverse);
    for (; d < t.head_dim; d++) from_float(x[d] * inverse, o + d);
    if (lse) lse[at] = l == 0 ? -infinity() : t.m[i] * LN_2 + __builtin_logf(l);
  }
}

}  // namespace

void pack_segment(const SegmentKeys& keys, int begin, int end) {
  for (int key = begin; key < end; key += P) {
    pack_panel(keys, key, keys.packed_keys + int64_t(key) * keys.head_dim);
  }
  pack_values(keys, begin, end);
}

void attend_packed(const RowTile& t, const SegmentKeys& keys) {
  float *q = t.scratch, *scores = q + kTileRows * kTileLd;
  load_queries(t, q);
  const int padded = padded_head_dim(t.head_dim);
  const KeyRange range = visible_keys(t, keys);
  for (int begin = range.begin; begin < range.end; begin += kTileKeys) {
    const int count = range.end - begin < kTileKeys ? range.end - begin : kTileKeys;
    for (int j = 0; j < count; j += P) {
      gemm_columns<GEMM_VECTORS>(t.rows, t.head_dim, Matrix{q, kTileLd, 1},
                                 keys.packed_keys + int64_t(begin + j) * t.head_dim, P, scores + j,
                                 kTileLd, false);
    }
    softmax_tile(t, keys, begin, count, scores);
    for (int column = 0; column < padded; column += P) {
      const int width = padded - column < P ? padded - column : P;
      const float* v =
          keys.packed_values + int64_t(column) * keys.capacity + int64_t(begin) * width;
      gemm(t.rows, width, count, Matrix{scores, kTileLd, 1}, v, width, t.o + column, padded, true);
    }
  }
}

void attend_pages(const RowTile& t, const SegmentKeys& keys) {
  float *q = t.scratch, *scores = q + kTileRows * kTileLd;
  float *panel = scores + kTileRows * kTileLd, *values = panel + P * 256;
  static_assert(P <= 32);
  load_queries(t, q);
  const int padded = padded_head_dim(t.head_dim);
  for (int i = 0; i < BLOCK * padded; i++) values[i] = 0;  // the padding stays 0
  const KeyRange range = visible_keys(t, keys);
  for (int begin = range.begin; begin < range.end; begin += kTileKeys) {
    const int count = range.end - begin < kTileKeys ? range.end - begin : kTileKeys;
    for (int j = 0; j < count; j += P) {
      pack_panel(keys, begin + j, panel);
      gemm_columns<GEMM_VECTORS>(t.rows, t.head_dim, Matrix{q, kTileLd, 1}, panel, P, scores + j,
                                 kTileLd, false);
    }
    softmax_tile(t, keys, begin, count, scores);
    for (int j = 0; j < count; j += BLOCK) {
      const int n = count - j < BLOCK ? count - j : BLOCK;
      decode_rows(keys.v_format, t.head_dim, n, keys.v_blocks[(begin + j) / BLOCK], values, padded);
      gemm(t.rows, padded, n, Matrix{scores + j, kTileLd, 1}, values, padded, t.o, padded, true);
    }
  }
}

void merge_splits(const RowTile& t, int64_t splits) {
  const int64_t padded = padded_head_dim(t.head_dim);
  for (int i = 0; i < t.rows; i++) {
    float m = t.m[i];
    for (int64_t s = 1; s < splits; s++) {
      const float other = t.m[s * t.rows + i];
      m = other > m ? other : m;
    }
    if (m == -infinity()) continue;  // no split saw a key
    float l = 0;
    float* o = t.o + i * padded;
    for (int64_t s = 0; s < splits; s++) {
      const int64_t row = s * t.rows + i;
      const float weight = exp2(t.m[row] - m);
      l += weight * t.l[row];
      for (int64_t d = 0; d < padded; d += W) {
        const vf x = load(t.o + row * padded + d) * weight;
        store(o + d, s == 0 ? x : load(o + d) + x);
      }
    }
    t.m[i] = m;
    t.l[i] = l;
  }
}

void finish_tile(const RowTile& t, void* out, float* lse) {
  switch (t.dtype) {
    case Dtype::f32:
      return store_output<float>(t, out, lse);
    case Dtype::f16:
      return store_output<f16_t>(t, out, lse);
    case Dtype::bf16:
      return store_output<bf16_t>(t, out, lse);
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
