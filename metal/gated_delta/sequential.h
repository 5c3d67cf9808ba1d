// The gated delta rule token by token: one kernel for decode (T = 1) and for short prompts.
//
// A simdgroup holds 8 value rows of S, 4 lanes to a row, each lane Dk / 4 of its elements in
// float4s that alternate between the lanes (a row's lanes then read 64 contiguous bytes).  Sums
// over Dk take two shuffles; nothing goes through threadgroup memory.  States are read and written
// in place.
#pragma once

#include "gated_delta/options.h"

// Sum over the four lanes of a value row.
METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(2));
}

// Four elements of a state row from x on, 0 past head_k_dim.
template <int D>
METAL_FUNC float4 load_state_columns(const device float* row, int x) {
  if (head_k_dim == D) return *(const device float4*)(row + x);
  float4 y = 0.0f;
  UNROLL for (int e = 0; e < 4; e++) {
    if (x + e < head_k_dim) y[e] = row[x + e];
  }
  return y;
}

template <int D>
METAL_FUNC void store_state_columns(device float* row, int x, float4 y) {
  if (head_k_dim == D) {
    *(device float4*)(row + x) = y;
    return;
  }
  UNROLL for (int e = 0; e < 4; e++) {
    if (x + e < head_k_dim) row[x + e] = y[e];
  }
}

// Threadgroup: (32 simdgroups, 1, 1).  Grid: (ceil(Dv / (8 simdgroups)), Hv, sequences).
template <typename T, int D>
[[kernel]] void gated_delta_sequential(
    const device T* q [[buffer(0)]],                                     // [rows, Hk, Dk], strided
    const device T* k [[buffer(1)]],                                     // [rows, Hk, Dk], strided
    const device T* v [[buffer(2)]],                                     // [rows, Hv, Dv], strided
    const device float* g [[buffer(3)]],                                 // [rows, Hv], log gates
    const device float* beta [[buffer(4)]],                              // [rows, Hv]
    const device bool* mask [[buffer(5), function_constant(has_mask)]],  // [rows]
    const device GatedDeltaSequence* sequences [[buffer(6)]],
    // [N, Hv, Dv, Dk]
    const device float* initial_state [[buffer(7), function_constant(has_initial)]],
    device float* state [[buffer(8)]],  // [N or slots, Hv, Dv, Dk]
    device T* o [[buffer(9)]],          // [rows, Hv, Dv]
    // [n, Hv, Dv, Dk]
    device float* checkpoints [[buffer(10), function_constant(has_checkpoints)]],
    constant GatedDeltaParams& params [[buffer(11)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int N = D / 16;  // float4s of a lane
  const int num_v_heads = params.num_v_heads;
  const int q_stride = params.q.row;
  const int k_stride = params.k.row;
  const int v_stride = params.v.row;
  const int q_element = vectors ? 1 : params.q.element;
  const int k_element = vectors ? 1 : params.k.element;
  const int v_element = vectors ? 1 : params.v.element;
  const float scale = params.scale;
  const float eps = params.l2norm_eps;
  const int checkpoint_every = has_checkpoints ? params.checkpoint_every : 0;
  const int v_head = tg.y;
  const int k_head = v_head / params.group_size;
  const device T* q_rows = q + long(k_head) * params.q.head;
  const device T* k_rows = k + long(k_head) * params.k.head;
  const device T* v_rows = v + long(v_head) * params.v.head;
  const int value_row = (int(tg.x) * simdgroups + int(sg)) * 8 + int(lane >> 2);
  const bool present = value_row < head_v_dim;
  const int dv = present ? value_row : head_v_dim - 1;  // the others repeat the last row, unwritten
  const int first = (lane & 3) * 4;

  const device GatedDeltaSequence* sequence = sequences + tg.z;
  const int rows = sequence->rows;
  const int source = sequence->source;
  const int row0 = sequence->row;
  int until = sequence->until;
  const long row_at = (long(v_head) * head_v_dim + dv) * head_k_dim;
  const long state_size = long(num_v_heads) * head_v_dim * head_k_dim;  // all heads
  const long state_at = long(sequence->state) * state_size + row_at;
  const long initial_at = long(sequence->initial) * state_size + row_at;
  long checkpoint_at = long(sequence->checkpoint) * state_size + row_at;

  float4 S[N];
  if (source == kGatedDeltaZeros) {
    UNROLL for (int i = 0; i < N; i++) S[i] = 0.0f;
  } else {
    const device float* from = state + state_at;
    if (has_initial && source == kGatedDeltaInitial) from = initial_state + initial_at;
    UNROLL for (int i = 0; i < N; i++) S[i] = load_state_columns<D>(from, i * 16 + first);
  }

  for (int t = 0; t < rows; t++) {
    const long row = long(row0) + t;
    device T* to = o + (row * num_v_heads + v_head) * head_v_dim + dv;
    const bool skip = has_mask && !mask[row];
    if (skip) {
      if (present && first == 0) *to = T(0.0f);
    } else {
      const device T* kd = k_rows + row * k_stride;
      const device T* qd = q_rows + row * q_stride;
      const float gamma = precise::exp(max(g[row * num_v_heads + v_head], kLeastLogGate));
      const float b = beta[row * num_v_heads + v_head];
      const float value = float(v_rows[row * v_stride + long(dv) * v_element]);
      float4 kx[N];
      float4 kS = 0.0f;
      float4 kk = 0.0f;
      UNROLL for (int i = 0; i < N; i++) {
        const vec<T, 4> x = load_key_columns<T, D>(kd, i * 16 + first, k_element);
        kx[i] = float4(float(x.x), float(x.y), float(x.z), float(x.w));
        S[i] *= gamma;
        kS = fma(kx[i], S[i], kS);
        if (qk_l2norm) kk = fma(kx[i], kx[i], kk);
      }
      float rk = 1.0f;
      if (qk_l2norm) rk = precise::rsqrt(row_sum(kk.x + kk.y + kk.z + kk.w) + eps);
      const float delta = b * (value - rk * row_sum(kS.x + kS.y + kS.z + kS.w)) * rk;
      float4 qS = 0.0f;
      float4 qq = 0.0f;
      UNROLL for (int i = 0; i < N; i++) {
        const vec<T, 4> x = load_key_columns<T, D>(qd, i * 16 + first, q_element);
        const float4 qx = float4(float(x.x), float(x.y), float(x.z), float(x.w));
        S[i] = fma(float4(delta), kx[i], S[i]);
        qS = fma(qx, S[i], qS);
        if (qk_l2norm) qq = fma(qx, qx, qq);
      }
      float y = scale * row_sum(qS.x + qS.y + qS.z + qS.w);
      if (qk_l2norm) y *= precise::rsqrt(row_sum(qq.x + qq.y + qq.z + qq.w) + eps);
      if (present && first == 0) *to = T(y);
    }
    until -= 1;
    if (has_checkpoints && until == 0) {
      if (present) {
        UNROLL for (int i = 0; i < N; i++)
            store_state_columns<D>(checkpoints + checkpoint_at, i * 16 + first, S[i]);
      }
      checkpoint_at += state_size;
      until = checkpoint_every;
    }
  }

  if (present) {
    UNROLL for (int i = 0; i < N; i++)
        store_state_columns<D>(state + state_at, i * 16 + first, S[i]);
  }
}
