// The part of the gated delta rule that needs no state, for all chunks of a sequence at once.
//
// One threadgroup per (chunk of 16 rows, key head).  K K^T and Q K^T are computed once per key
// head; each of its value heads then gets, with G the cumulative log gate of the chunk and Gam_ij =
// exp(G_i - G_j):
//
//   A = (I + tril(beta_i Gam_ij (K K^T)_ij, -1))^-1 beta_j       P = scale Gam tril(Q K^T)
//
// and per row the factors that scan needs.  With qk_l2norm the norms never touch K and Q, which
// would round them: they go into A, P and those factors.
//
// A and P stay fp32 whatever T is: A in 16 bits costs the state 1e-4.  They are lower triangular,
// so only the 8x8 tiles (0,0) (1,0) (1,1) are stored.  Rows past the end and masked rows are
// identity steps: k = q = 0, g = 0, beta = 0.
#pragma once

#include "common/two_float.h"
#include "gated_delta/options.h"

constant constexpr int kChunk = 16;                // rows of a chunk
constant constexpr int kTriangle = 3 * 64;         // floats of a stored triangle
constant constexpr int kFactors = 3 * kChunk + 4;  // floats of a chunk's row factors
constant constexpr int kPrepThreads = 128;

// Stages columns x0 .. x0 + DS - 1 of a chunk's rows of q or k, LD apart; rows that are not there
// as 0.
template <typename T, int D, int DS, int LD>
METAL_FUNC void stage_rows(
    threadgroup T* to,
    const device T* from,
    const device bool* live,
    int stride,
    int element,
    int x0,
    int rows,
    int tid,
    int threads) {
  for (int i = tid; i < kChunk * DS / 4; i += threads) {
    const int row = i / (DS / 4);
    const int x = i % (DS / 4) * 4;
    vec<T, 4> y = vec<T, 4>(T(0));
    if (row < rows && (!has_mask || live[row])) {
      y = load_key_columns<T, D>(from + long(row) * stride, x0 + x, element);
    }
    *(threadgroup vec<T, 4>*)(to + row * LD + x) = y;
  }
}

// Adds X Y^T's tiles in row tile H of the triangle, (H, 0) and for H = 1 (1, 1), over DS columns.
// Sums of 32 columns are added to the whole: rounding errors of one long chain, which near-repeated
// keys magnify, would be a third larger.
template <typename T, int DS, int LD, int H>
METAL_FUNC void accumulate_gram(
    thread simdgroup_float8x8& gram0,
    thread simdgroup_float8x8& gram1,
    const threadgroup T* x,
    const threadgroup T* y_transposed) {
  simdgroup_float8x8 a;
  simdgroup_float8x8 b;
  simdgroup_float8x8 sum0;
  simdgroup_float8x8 sum1;
  for (int c0 = 0; c0 < DS; c0 += 32) {
    fragment_zero(sum0);
    fragment_zero(sum1);
    UNROLL for (int c = c0; c < c0 + 32; c += 8) {
      fragment_load(a, x + H * 8 * LD + c);
      fragment_load_transposed(b, y_transposed + c, LD);
      simdgroup_multiply_accumulate(sum0, a, b, sum0);
      if (H == 1) {
        fragment_load_transposed(b, y_transposed + 8 * LD + c, LD);
        simdgroup_multiply_accumulate(sum1, a, b, sum1);
      }
    }
    fragment_add(gram0, sum0);
    if (H == 1) fragment_add(gram1, sum1);
  }
}

// Threadgroup: (128, 1, 1).  Grid: (chunks, key heads, 1) threadgroups.
template <typename T, int D>
[[kernel]] void gated_delta_prep(
    const device T* q [[buffer(0)]],                                     // [rows, Hk, Dk], strided
    const device T* k [[buffer(1)]],                                     // [rows, Hk, Dk], strided
    const device float* g [[buffer(2)]],                                 // [rows, Hv], log gates
    const device float* beta [[buffer(3)]],                              // [rows, Hv]
    const device bool* mask [[buffer(4), function_constant(has_mask)]],  // [rows]
    const device GatedDeltaChunk* chunks [[buffer(5)]],
    device float* inverse [[buffer(6)]],  // [chunks, Hv, 3, 64]: A's tiles
    device float* scores [[buffer(7)]],   // [chunks, Hv, 3, 64]: P's tiles
    device float* factors [[buffer(8)]],  // [chunks, Hv, 52]
    constant GatedDeltaParams& params [[buffer(9)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int DS = D > 128 ? D / 2 : D;  // columns staged at a time
  constexpr int LD = DS + 16 / sizeof(T);  // padded rows: no bank conflicts, plain or transposed
  constexpr int LS = kChunk + 4;
  constexpr int kStage = 2 * kChunk * LD * sizeof(T) / 16;  // in float4, as the next
  constexpr int kSystem = kChunk * LS / 4;
  constexpr int kHeads = 4;  // value heads at a time, one per simdgroup
  threadgroup float4 arena[kStage > kHeads * kSystem ? kStage : kHeads * kSystem];
  threadgroup float4 gates[kHeads * kChunk];  // per value head and row: G hi, G lo, beta
  threadgroup float norms[2 * kChunk];        // 1 / |k|, then 1 / |q|; qk_l2norm only

  const int num_v_heads = params.num_v_heads;
  const int group = params.group_size;
  const float scale = params.scale;
  const int k_head = tg.y;
  const int row0 = chunks[tg.x].row;
  const int rows = chunks[tg.x].rows;
  const FragmentLane at = fragment_lane(lane);
  const device bool* live = mask + (has_mask ? row0 : 0);

  // Simdgroups 0 and 1: row tiles 0 and 1 of K K^T.  2 and 3: of Q K^T.
  const bool is_scores = sg >= 2;
  const int i = sg & 1;
  simdgroup_float8x8 gram[2];
  fragment_zero(gram[0]);
  fragment_zero(gram[1]);
  {
    const int k_stride = params.k.row;
    const int q_stride = params.q.row;
    const int k_element = vectors ? 1 : params.k.element;
    const int q_element = vectors ? 1 : params.q.element;
    const device T* kd = k + long(row0) * k_stride + long(k_head) * params.k.head;
    const device T* qd = q + long(row0) * q_stride + long(k_head) * params.q.head;
    threadgroup T* ks = (threadgroup T*)arena;
    const threadgroup T* x = ks + (is_scores ? kChunk * LD : 0) + at.row * LD + at.col;
    const threadgroup T* y = ks + at.col * LD + at.row;
    float square = 0.0f;  // of a quarter of row tid / 4, K's rows and then Q's
    UNROLL for (int x0 = 0; x0 < D; x0 += DS) {
      if (x0 > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_rows<T, D, DS, LD>(ks, kd, live, k_stride, k_element, x0, rows, tid, kPrepThreads);
      stage_rows<T, D, DS, LD>(
          ks + kChunk * LD, qd, live, q_stride, q_element, x0, rows, tid, kPrepThreads);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (i == 0) accumulate_gram<T, DS, LD, 0>(gram[0], gram[1], x, y);
      else accumulate_gram<T, DS, LD, 1>(gram[0], gram[1], x, y);
      if (qk_l2norm) {
        const threadgroup T* row = ks + (tid / 4) * LD + (tid % 4) * 4;
        for (int c = 0; c < DS; c += 16) {
          const vec<T, 4> e = *(const threadgroup vec<T, 4>*)(row + c);
          const float4 f = float4(float(e.x), float(e.y), float(e.z), float(e.w));
          square = fma(f.x, f.x, fma(f.y, f.y, fma(f.z, f.z, fma(f.w, f.w, square))));
        }
      }
    }
    if (qk_l2norm) {
      square += simd_shuffle_xor(square, ushort(1));
      square += simd_shuffle_xor(square, ushort(2));
      if (tid % 4 == 0) norms[tid / 4] = precise::rsqrt(square + params.l2norm_eps);
    }
  }

  for (int base = 0; base < group; base += kHeads) {
    const int heads = min(kHeads, group - base);
    // K and Q, or the systems of the heads before, are done with; the norms are there.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (qk_l2norm && base == 0) {
      const float ri = norms[(is_scores ? kChunk : 0) + i * 8 + at.row];
      UNROLL for (int j = 0; j < 2; j++) {
        ELEMENT(gram[j], 0) *= ri * norms[j * 8 + at.col];
        ELEMENT(gram[j], 1) *= ri * norms[j * 8 + at.col + 1];
      }
    }
    const bool mine = int(sg) < heads;
    const int v_head =
        k_head * group + base + sg;  // whose gates and inverse this simdgroup computes
    const long slot = long(tg.x) * num_v_heads + v_head;
    if (mine) {
      float2 G = 0.0f;
      float b = 0.0f;
      if (int(lane) < rows && (!has_mask || live[lane])) {
        const long from = (long(row0) + lane) * num_v_heads + v_head;
        G.x = max(g[from], kLeastLogGate);
        b = beta[from];
      }
      UNROLL for (ushort s = 1; s < kChunk; s *= 2) {
        const float2 before = float2(simd_shuffle_up(G.x, s), simd_shuffle_up(G.y, s));
        if (lane >= s) G = two_float_add(before, G);
      }
      const float2 last =
          float2(simd_shuffle(G.x, ushort(kChunk - 1)), simd_shuffle(G.y, ushort(kChunk - 1)));
      if (int(lane) < kChunk) {
        gates[sg * kChunk + lane] = float4(G.x, G.y, b, 0.0f);
        const float rk = qk_l2norm ? norms[lane] : 1.0f;
        const float rq = qk_l2norm ? norms[kChunk + lane] : 1.0f;
        const float gamma = precise::exp(G.x + G.y);
        device float* f = factors + slot * kFactors + lane;
        f[0] = gamma * rk;
        f[kChunk] = scale * gamma * rq;
        f[2 * kChunk] = precise::exp(two_float_difference(last, G)) * rk;
        if (lane < 4) f[3 * kChunk] = precise::exp(last.x + last.y);  // padded to a float4
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Gates onto the Gram tiles, straight from the accumulators: P to device memory, the system
    // beta Gam K K^T to threadgroup memory.
    for (int u = 0; u < heads; u++) {
      const long out = (long(tg.x) * num_v_heads + k_head * group + base + u) * kTriangle;
      device float* P = scores + out + at.row * 8 + at.col;
      threadgroup float* L = (threadgroup float*)(arena + u * kSystem) + at.row * LS + at.col;
      const threadgroup float4* G = gates + u * kChunk;
      const float4 gi = G[i * 8 + at.row];
      const float factor = is_scores ? scale : gi.z;
      const int least = is_scores ? 0 : 1;  // P keeps its diagonal, the system does not
      UNROLL for (int j = 0; j < 2; j++) {
        if (j > i) continue;
        const float2 g0 = G[j * 8 + at.col].xy;
        const float2 g1 = G[j * 8 + at.col + 1].xy;
        const int d = (i - j) * 8 + at.row - at.col;  // row minus column of the first element
        float2 x;
        x.x = d >= least
                  ? factor * precise::exp(two_float_difference(gi.xy, g0)) * ELEMENT(gram[j], 0)
                  : 0.0f;
        x.y = d - 1 >= least
                  ? factor * precise::exp(two_float_difference(gi.xy, g1)) * ELEMENT(gram[j], 1)
                  : 0.0f;
        if (is_scores) store_pair(P + (i + j) * 64, x);
        else *(threadgroup float2*)(L + i * 8 * LS + j * 8) = x;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!mine) continue;

    // The unit lower triangular system's inverse by forward substitution, a lane to a column.
    threadgroup float* L = (threadgroup float*)(arena + sg * kSystem);
    float x[kChunk];
    if (lane < kChunk) {
      x[0] = lane == 0 ? 1.0f : 0.0f;
      UNROLL for (int r = 1; r < kChunk; r++) {
        float s = 0.0f;
        UNROLL for (int m = 0; m < r; m += 4) {
          const float4 l = *(const threadgroup float4*)(L + r * LS + m);
          s = fma(l.x, x[m], s);
          if (m + 1 < r) s = fma(l.y, x[m + 1], s);
          if (m + 2 < r) s = fma(l.z, x[m + 2], s);
          if (m + 3 < r) s = fma(l.w, x[m + 3], s);
        }
        x[r] = (r == int(lane) ? 1.0f : 0.0f) - s;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // all lanes have read the system
    if (lane < kChunk) {
      UNROLL for (int r = 0; r < kChunk; r++) L[r * LS + lane] = x[r];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    device float* A = inverse + slot * kTriangle + at.row * 8 + at.col;
    UNROLL for (int ti = 0; ti < 2; ti++) {
      UNROLL for (int tj = 0; tj <= ti; tj++) {
        const threadgroup float* from = L + (ti * 8 + at.row) * LS + tj * 8 + at.col;
        const threadgroup float4* G = gates + sg * kChunk + tj * 8 + at.col;
        const float2 y = *(const threadgroup float2*)from;
        store_pair(A + (ti + tj) * 64, float2(y.x * G[0].z, y.y * G[1].z));
      }
    }
  }
}
