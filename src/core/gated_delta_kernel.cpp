// The arithmetic of gated_delta.cpp, compiled once per instruction set.
//
// Per chunk, with G the cumulative log gate, gamma = exp(G), Gam_ij = exp(G_i - G_j) for i >= j:
//   (I + tril(beta Gam K K^T, -1)) Vd = beta (V - gamma K S)
//   O = gamma (Q S) + (Gam Q K^T) Vd              (q carries the scale)
//   S <- gamma_last S + K^T (exp(G_last - G) Vd)
// A register block of rows x value columns goes through all of it: K S, the right-hand side, the
// solved rows above, the substitution inside the block. Nothing in between is stored.
#include "core/gated_delta_kernel.h"

#include "core/gemm_tile.h"

namespace chunkdelta::CHUNKDELTA_ISA {

namespace {

constexpr int SLICE = GATED_DELTA_SLICE;

template <typename T>
static inline const T* row_of(const HeadRows& rows, int64_t t) {
  return static_cast<const T*>(rows.data) + t * rows.row;
}

// n values at p, `element` apart, to floats.
template <typename T>
static inline void load_row(const T* p, int64_t element, int n, float* out) {
  if (element != 1) {
    for (int i = 0; i < n; i++) out[i] = to_float(p[i * element]);
    return;
  }
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, load(p + i));
  if (i < n) store_first(out + i, load_first(p + i, n - i), n - i);
}

static inline void scale_row(float* x, int n, float factor) {
  for (int i = 0; i < n; i++) x[i] *= factor;
}

// 1 / sqrt(sum of squares + eps).
static inline float l2norm_factor(const float* x, int n) {
  vf squares = {};
  int i = 0;
  for (; i + W <= n; i += W) squares = load(x + i) * load(x + i) + squares;
  if (i < n) {
    const vf rest = load_first(x + i, n - i);
    squares = rest * rest + squares;
  }
  return 1.0f / __builtin_sqrtf(sum(squares) + GATED_DELTA_L2NORM_EPS);
}

template <typename T>
static inline void load_qk(const GatedDeltaOptions& options, const T* p, int64_t element, int n,
                           float scale, float* out) {
  load_row(p, element, n, out);
  if (options.qk_l2norm) scale *= l2norm_factor(out, n);
  if (scale != 1.0f) scale_row(out, n, scale);
}

typedef float v4 __attribute__((vector_size(16)));

// out[j][i] = in[i][j] for a 4x4 block.
static inline void transpose_4x4(const float* in, int64_t ld, float* out, int64_t ld_out) {
  const v4 a = load_bits<v4>(in), b = load_bits<v4>(in + ld), c = load_bits<v4>(in + 2 * ld),
           d = load_bits<v4>(in + 3 * ld);
  const v4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const v4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const v4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const v4 cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const v4 out0 = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  const v4 out1 = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  const v4 out2 = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  const v4 out3 = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
  std::memcpy(out, &out0, 16);
  std::memcpy(out + ld_out, &out1, 16);
  std::memcpy(out + 2 * ld_out, &out2, 16);
  std::memcpy(out + 3 * ld_out, &out3, 16);
}

// Rows and columns are multiples of 4.
static inline void transpose(int64_t rows, int64_t columns, const float* in, int64_t ld, float* out,
                             int64_t ld_out) {
  for (int64_t i = 0; i < rows; i += 4) {
    for (int64_t j = 0; j < columns; j += 4) {
      transpose_4x4(in + i * ld + j, ld, out + j * ld_out + i, ld_out);
    }
  }
}

// The sums of four vectors. Lanes are folded to four, then added across.
static inline v4 fold(vf x) {
#if defined(CHUNKDELTA_ISA_avx512)
  typedef float v8 __attribute__((vector_size(32)));
  const v8 y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
#elif defined(CHUNKDELTA_ISA_avx2)
  return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
  return (v4)x;
#endif
}
static inline v4 sums(const vf (&x)[4]) {
  const v4 a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
  const v4 ab = __builtin_shufflevector(a, b, 0, 4, 2, 6) +
                __builtin_shufflevector(a, b, 1, 5, 3, 7);  // a01 b01 a23 b23
  const v4 cd =
      __builtin_shufflevector(c, d, 0, 4, 2, 6) + __builtin_shufflevector(c, d, 1, 5, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// exp(x) for x <= 0 as value + rest, to about 2^-24 of |exp(x) - 2^round(x / ln 2)|: where the gate
// is close to 1, far below a rounding of it.
struct Parts {
  vf value, rest;
};
static inline Parts exp_parts(vf x) {
  const vf clamped = max(x, splat(-88.0f));
  const vf shifted = clamped * 1.44269504088896341f + 12582912.0f;  // as exp in core/simd.h
  const vf n = shifted - 12582912.0f;
  const vf r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r;  // e^r - 1
  const vf value = p + 1.0f, rest = p - (value - 1.0f);
  const vf scale = (vf)((((vi)shifted) << 23) + 0x3f800000);
  const vf zero = {};
  return {x < -87.0f ? zero : x == x ? value * scale : x, x < -87.0f ? zero : rest * scale};
}

static inline float load_gate(const HeadRows& g, int64_t t) {
  const float x = *row_of<float>(g, t);
  return x < GATED_DELTA_MIN_LOG_GATE ? GATED_DELTA_MIN_LOG_GATE : x;  // NaN stays NaN
}

static inline float load_beta(Dtype dtype, const HeadRows& beta, int64_t t) {
  switch (dtype) {
    case Dtype::f16:
      return to_float(*row_of<f16_t>(beta, t));
    case Dtype::bf16:
      return to_float(*row_of<bf16_t>(beta, t));
    default:
      return *row_of<float>(beta, t);
  }
}

template <typename T>
static inline void chunk_rows(const GatedDeltaOptions& options, const HeadRows& k,
                              const HeadRows& q, const KeyChunk& chunk) {
  const int dim = static_cast<int>(options.key_dim);
  for (int t = 0; t < chunk.padded; t++) {
    float *kt = chunk.k + int64_t(t) * chunk.ld, *qt = chunk.q + int64_t(t) * chunk.ld;
    if (t >= chunk.rows || (chunk.counts && !chunk.counts[t])) {
      std::memset(kt, 0, dim * sizeof(float));
      std::memset(qt, 0, dim * sizeof(float));
      continue;
    }
    load_qk(options, row_of<T>(k, t), k.element, dim, 1.0f, kt);
    load_qk(options, row_of<T>(q, t), q.element, dim, options.scale, qt);
  }
}

// acc[i][j] += sign A[i][k] B[k][j] over k < n; A by broadcast with rows of lda.
template <int ROWS, int VECTORS, bool SUBTRACT>
static inline void multiply(vf (&acc)[ROWS][VECTORS], int n, const float* a, ptrdiff_t lda,
                            const float* b) {
  for (int k = 0; k < n; k++, a++, b += SLICE) {
    vf bk[VECTORS];
    CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) bk[j] = load(b + j * W);
    CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
      const vf x = splat(a[i * lda]);
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
        acc[i][j] = SUBTRACT ? acc[i][j] - x * bk[j] : x * bk[j] + acc[i][j];
      }
    }
  }
}

template <int VECTORS, typename T>
struct Tile {  // VECTORS * W value columns of a slice
  const KeyChunk& chunk;
  const HeadChunk& head;
  int key_dim, chunk_size;
  HeadRows v;
  T* o;
  int64_t o_row;
  int columns;  // of this tile that exist
  float* state;
  float* vd;

  bool counts(int t) const { return t < chunk.rows && (!chunk.counts || chunk.counts[t]); }

  vf load_v(int t, int j) const {
    const T* p = row_of<T>(v, t) + j * W * v.element;
    const int n = columns - j * W;
    if (n <= 0) return vf{};
    if (v.element != 1) {
      float x[W] = {};
      for (int i = 0; i < W && i < n; i++) x[i] = to_float(p[i * v.element]);
      return load(x);
    }
    return n >= W ? load(p) : load_first(p, n);
  }
  void store_o(int t, int j, vf x) const {
    T* p = o + t * o_row + j * W;
    const int n = columns - j * W;
    if (n >= W) {
      store(p, x);
    } else if (n > 0) {
      store_first(p, x, n);
    }
  }

  // Vd of rows [t, t + ROWS), those above being solved.
  template <int ROWS>
  void solve(int t) const {
    vf acc[ROWS][VECTORS] = {};
    multiply<ROWS, VECTORS, false>(acc, key_dim, chunk.k + int64_t(t) * chunk.ld, chunk.ld, state);
    CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
      const bool counted = counts(t + i);
      const vf gamma = splat(head.gamma[t + i]), rest = splat(head.gamma_rest[t + i]);
      const vf beta = splat(head.beta[t + i]);
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
        const vf decayed = gamma * acc[i][j] + rest * acc[i][j];
        acc[i][j] = counted ? beta * (load_v(t + i, j) - decayed) : vf{};
      }
    }
    const float* l = head.l + int64_t(t) * chunk_size;
    multiply<ROWS, VECTORS, true>(acc, t, l, chunk_size, vd);
    CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {  // column by column: independent updates
      CHUNKDELTA_UNROLL for (int below = i + 1; below < ROWS; below++) {
        const vf x = splat(l[below * chunk_size + t + i]);
        CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
          acc[below][j] = acc[below][j] - x * acc[i][j];
        }
      }
    }
    CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
        store(vd + (t + i) * SLICE + j * W, acc[i][j]);
      }
    }
  }

  // O of rows [t, t + ROWS), whose Vd is known.
  template <int ROWS>
  void read(int t) const {
    vf acc[ROWS][VECTORS] = {};
    multiply<ROWS, VECTORS, false>(acc, key_dim, chunk.q + int64_t(t) * chunk.ld, chunk.ld, state);
    CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
      const vf gamma = splat(head.gamma[t + i]);
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) acc[i][j] = gamma * acc[i][j];
    }
    const float* p = head.p + int64_t(t) * chunk_size;
    multiply<ROWS, VECTORS, false>(acc, t, p, chunk_size, vd);
    CHUNKDELTA_UNROLL for (int above = 0; above < ROWS; above++) {  // rows of the block itself
      vf row[VECTORS];
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
        row[j] = load(vd + (t + above) * SLICE + j * W);
      }
      CHUNKDELTA_UNROLL for (int i = above; i < ROWS; i++) {
        const vf x = splat(p[i * chunk_size + t + above]);
        CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) acc[i][j] = x * row[j] + acc[i][j];
      }
    }
    CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
      if (t + i >= chunk.rows) break;
      const bool counted = counts(t + i);
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
        store_o(t + i, j, counted ? acc[i][j] : vf{});
      }
    }
  }

  // Rows [i, i + ROWS) of the state.
  template <int ROWS>
  void write(int i) const {
    vf acc[ROWS][VECTORS] = {};
    const float *k = chunk.k + i, *b = vd;
    for (int t = 0; t < chunk.rows; t++, k += chunk.ld, b += SLICE) {
      vf bt[VECTORS];
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) bt[j] = load(b + j * W);
      CHUNKDELTA_UNROLL for (int r = 0; r < ROWS; r++) {
        const vf x = splat(k[r]);
        CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) acc[r][j] = x * bt[j] + acc[r][j];
      }
    }
    // The state joins last: it is rounded once per chunk, not once per row.
    const vf last = splat(head.last[0]), rest = splat(head.last[1]);
    CHUNKDELTA_UNROLL for (int r = 0; r < ROWS; r++) {
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
        float* p = state + (i + r) * SLICE + j * W;
        const vf s = load(p);
        store(p, last * s + (rest * s + acc[r][j]));
      }
    }
  }

  void run() const {
    int t = 0;
    for (; t + GEMM_ROWS <= chunk.padded; t += GEMM_ROWS) {
      solve<GEMM_ROWS>(t);
      read<GEMM_ROWS>(t);
    }
    for (; t < chunk.padded; t += 4) {
      solve<4>(t);
      read<4>(t);
    }
    for (t = 0; t < chunk.rows; t++) {
      const vf decay = splat(head.decay[t]), rest = splat(head.decay_rest[t]);
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
        float* p = vd + t * SLICE + j * W;
        const vf x = load(p);
        store(p, decay * x + rest * x);
      }
    }
    int i = 0;
    for (; i + GEMM_ROWS <= key_dim; i += GEMM_ROWS) write<GEMM_ROWS>(i);
    for (; i < key_dim; i += 4) write<4>(i);
  }
};

template <typename T>
static inline void advance(const GatedDeltaOptions& options, const HeadRows& v, T* o, int64_t o_row,
                           int columns, const KeyChunk& chunk, const HeadChunk& head, float* state,
                           float* vd) {
  const int dim = static_cast<int>(options.key_dim), C = options.chunk_size;
  const auto v_at = [&](int j) {
    return HeadRows{static_cast<const T*>(v.data) + j * v.element, v.row, v.element};
  };
  int j = 0;
  for (; j + (GEMM_VECTORS - 1) * W < columns; j += GEMM_VECTORS * W) {
    const Tile<GEMM_VECTORS, T> tile{chunk, head,  dim,         C,         v_at(j),
                                     o + j, o_row, columns - j, state + j, vd + j};
    tile.run();
  }
  for (; j < columns; j += W) {
    const Tile<1, T> tile{chunk, head,  dim,         C,         v_at(j),
                          o + j, o_row, columns - j, state + j, vd + j};
    tile.run();
  }
}

template <typename T>
static inline void steps(const GatedDeltaOptions& options, int64_t length, const HeadRows& q,
                         const HeadRows& k, const HeadRows& v, const HeadRows& g,
                         const HeadRows& beta, const bool* counts, T* o, int64_t o_row, int rows,
                         const float* state_in, float* state_out, float* scratch) {
  const int dim = static_cast<int>(options.key_dim);
  struct Step {
    float decay, rest, beta, qk, counted;
  };
  Step* all_steps = reinterpret_cast<Step*>(scratch);
  float* vectors = scratch + 5 * length;  // k_0 q_0 k_1 q_1 ...
  for (int64_t t = 0; t < length; t++) {
    Step& step = all_steps[t];
    step.counted = !counts || counts[t];
    if (!step.counted) continue;
    float *kt = vectors + 2 * t * dim, *qt = kt + dim;
    load_qk(options, row_of<T>(k, t), k.element, dim, 1.0f, kt);
    load_qk(options, row_of<T>(q, t), q.element, dim, options.scale, qt);
    vf product = {};
    int i = 0;
    for (; i + W <= dim; i += W) product = load(kt + i) * load(qt + i) + product;
    if (i < dim) product = load_first(kt + i, dim - i) * load_first(qt + i, dim - i) + product;
    step.qk = sum(product);
    const Parts decay = exp_parts(splat(load_gate(g, t)));
    step.decay = decay.value[0];
    step.rest = decay.rest[0];
    step.beta = load_beta(options.beta_dtype, beta, t);
  }
  constexpr int ROWS = 4;  // Dv is a multiple of 4
  for (int r = 0; r < rows; r += ROWS) {
    const float* s_in = state_in ? state_in + int64_t(r) * dim : nullptr;
    float* s_out = state_out + int64_t(r) * dim;
    if (!s_in) {
      std::memset(s_out, 0, ROWS * dim * sizeof(float));
      s_in = s_out;
    }
    for (int64_t t = 0; t < length; t++) {
      const Step& step = all_steps[t];
      if (!step.counted) {
        for (int i = 0; i < ROWS; i++) from_float(0.0f, o + t * o_row + r + i);
        continue;
      }
      const float *kt = vectors + 2 * t * dim, *qt = kt + dim;
      // One pass reads k . S and q . S: with d = beta (v - decay k . S) the output is
      // q . (decay S + d k) = decay q . S + d (q . k).
      vf sk[ROWS] = {}, sq[ROWS] = {};
      int c = 0;
      for (; c + W <= dim; c += W) {
        const vf kc = load(kt + c), qc = load(qt + c);
        CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
          const vf s = load(s_in + i * dim + c);
          sk[i] = s * kc + sk[i];
          sq[i] = s * qc + sq[i];
        }
      }
      if (c < dim) {
        const vf kc = load_first(kt + c, dim - c), qc = load_first(qt + c, dim - c);
        CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
          const vf s = load_first(s_in + i * dim + c, dim - c);
          sk[i] = s * kc + sk[i];
          sq[i] = s * qc + sq[i];
        }
      }
      v4 vt;
      for (int i = 0; i < ROWS; i++) vt[i] = to_float(row_of<T>(v, t)[(r + i) * v.element]);
      const v4 ks = sums(sk), qs = sums(sq);
      const v4 dt = step.beta * (vt - (step.decay * ks + step.rest * ks));
      const v4 ot = (step.decay * qs + step.rest * qs) + step.qk * dt;
      const vf decay = splat(step.decay), rest = splat(step.rest);
      vf d[ROWS];
      CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
        from_float(ot[i], o + t * o_row + r + i);
        d[i] = splat(dt[i]);
      }
      for (c = 0; c + W <= dim; c += W) {
        const vf kc = load(kt + c);
        CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
          const vf s = load(s_in + i * dim + c);
          store(s_out + i * dim + c, decay * s + (rest * s + d[i] * kc));
        }
      }
      if (c < dim) {
        const vf kc = load_first(kt + c, dim - c);
        CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
          const vf s = load_first(s_in + i * dim + c, dim - c);
          store_first(s_out + i * dim + c, decay * s + (rest * s + d[i] * kc), dim - c);
        }
      }
      s_in = s_out;
    }
    if (s_in != s_out) std::memcpy(s_out, s_in, ROWS * dim * sizeof(float));  // all steps masked
  }
}

}  // namespace

void gated_delta_chunk(const GatedDeltaOptions& options, HeadRows k, HeadRows q,
                       const KeyChunk& chunk, float* transposed) {
  switch (options.dtype) {
    case Dtype::f32:
      chunk_rows<float>(options, k, q, chunk);
      break;
    case Dtype::f16:
      chunk_rows<f16_t>(options, k, q, chunk);
      break;
    case Dtype::bf16:
      chunk_rows<bf16_t>(options, k, q, chunk);
      break;
  }
  const int dim = static_cast<int>(options.key_dim), C = options.chunk_size;
  constexpr int LD = GATED_DELTA_TRANSPOSED_LD;
  transpose(chunk.padded, dim, chunk.k, chunk.ld, transposed, LD);
  for (int i = 0; i < dim; i++) {  // the products below read columns by 16
    for (int j = chunk.padded; j < (chunk.padded + 15) / 16 * 16; j++) transposed[i * LD + j] = 0;
  }
  for (int i = 0; i < chunk.padded; i += 16) {
    const int rows = chunk.padded - i < 16 ? chunk.padded - i : 16;
    const Matrix q_rows{chunk.q + int64_t(i) * chunk.ld, chunk.ld, 1};
    const Matrix k_rows{chunk.k + int64_t(i) * chunk.ld, chunk.ld, 1};
    gemm(rows, i + 16, dim, k_rows, transposed, LD, chunk.kk + i * C, C, false);
    gemm(rows, i + 16, dim, q_rows, transposed, LD, chunk.qk + i * C, C, false);
  }
}

void gated_delta_head(const GatedDeltaOptions& options, HeadRows g, HeadRows beta,
                      const KeyChunk& chunk, const HeadChunk& head) {
  const int C = options.chunk_size, rows = chunk.rows;
  // The cumulative log gate in two floats: differences of a plain fp32 sum lose 1e-5 once a token
  // of g = -30 has passed among those of -0.01.
  float hi[GATED_DELTA_MAX_CHUNK], lo[GATED_DELTA_MAX_CHUNK];
  float sum_hi = 0, sum_lo = 0;
  for (int t = 0; t < C; t++) {
    const bool counted = t < rows && (!chunk.counts || chunk.counts[t]);
    head.beta[t] = counted ? load_beta(options.beta_dtype, beta, t) : 0.0f;
    if (counted) {
      const float x = load_gate(g, t), s = sum_hi + x, y = s - sum_hi;
      const float error = ((sum_hi - (s - y)) + (x - y)) + sum_lo;
      sum_hi = s + error;
      sum_lo = error - (sum_hi - s);
    }
    hi[t] = sum_hi;
    lo[t] = sum_lo;
  }
  const Parts last = exp_parts(splat(sum_hi + sum_lo));
  head.last[0] = last.value[0];
  head.last[1] = last.rest[0];
  const vf last_hi = splat(sum_hi), last_lo = splat(sum_lo);
  for (int t = 0; t < C; t += W) {
    const Parts gamma = exp_parts(load(hi + t) + load(lo + t));
    store(head.gamma + t, gamma.value);
    store(head.gamma_rest + t, gamma.rest);
    const Parts decay = exp_parts((last_hi - load(hi + t)) + (last_lo - load(lo + t)));
    store(head.decay + t, decay.value);
    store(head.decay_rest + t, decay.rest);
  }
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  for (int i = 0; i < chunk.padded; i++) {
    const float *kk = chunk.kk + i * C, *qk = chunk.qk + i * C;
    float *l = head.l + i * C, *p = head.p + i * C;
    const vf hi_i = splat(hi[i]), lo_i = splat(lo[i]), beta_i = splat(head.beta[i]);
    for (int j = 0; j <= i; j += W) {
      const vi visible = lane + j <= i;
      // The mask comes before exp: above the diagonal the difference is positive and may overflow.
      const vf difference = (hi_i - load(hi + j)) + (lo_i - load(lo + j));
      const Parts gates = exp_parts(visible ? difference : splat(-128.0f));
      const vf kk_j = load(kk + j), qk_j = load(qk + j);
      store(l + j, visible ? beta_i * (gates.value * kk_j + gates.rest * kk_j) : vf{});
      store(p + j, visible ? gates.value * qk_j + gates.rest * qk_j : vf{});
    }
  }
}

void gated_delta_advance(const GatedDeltaOptions& options, HeadRows v, void* o, int64_t o_row,
                         int columns, const KeyChunk& chunk, const HeadChunk& head, float* state,
                         float* vd) {
  switch (options.dtype) {
    case Dtype::f32:
      return advance(options, v, static_cast<float*>(o), o_row, columns, chunk, head, state, vd);
    case Dtype::f16:
      return advance(options, v, static_cast<f16_t*>(o), o_row, columns, chunk, head, state, vd);
    case Dtype::bf16:
      return advance(options, v, static_cast<bf16_t*>(o), o_row, columns, chunk, head, state, vd);
  }
}

void gated_delta_load_slice(int64_t key_dim, int columns, const float* from, float* slice) {
  if (!from || columns < SLICE) std::memset(slice, 0, key_dim * SLICE * sizeof(float));
  if (from) transpose(columns, key_dim, from, key_dim, slice, SLICE);
}

void gated_delta_store_slice(int64_t key_dim, int columns, const float* slice, float* to) {
  transpose(key_dim, columns, slice, SLICE, to, key_dim);
}

void gated_delta_steps(const GatedDeltaOptions& options, int64_t length, HeadRows q, HeadRows k,
                       HeadRows v, HeadRows g, HeadRows beta, const bool* counts, void* o,
                       int64_t o_row, int rows, const float* state_in, float* state_out,
                       float* scratch) {
  switch (options.dtype) {
    case Dtype::f32:
      return steps(options, length, q, k, v, g, beta, counts, static_cast<float*>(o), o_row, rows,
                   state_in, state_out, scratch);
    case Dtype::f16:
      return steps(options, length, q, k, v, g, beta, counts, static_cast<f16_t*>(o), o_row, rows,
                   state_in, state_out, scratch);
    case Dtype::bf16:
      return steps(options, length, q, k, v, g, beta, counts, static_cast<bf16_t*>(o), o_row, rows,
                   state_in, state_out, scratch);
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
