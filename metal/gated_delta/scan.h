// The walk over a sequence's chunks, with the state in registers.
//
// A simdgroup owns 8 NV value columns of one value head and holds S[Dk, its columns] as simdgroup
// matrices.  Per chunk, with prep's A, P and row factors:
//
//   Vd = A (V - gamma K S);   O = scale gamma (Q S) + P Vd;   S = gamma_C S + K^T (decay Vd)
//
// K S, W, Vd and O never leave the registers: an accumulator is laid out as the right operand of
// the next product.  K, Q, A and P are staged once for all simdgroups of the threadgroup.
#pragma once

#include "gated_delta/prep.h"

// Tile (i, n) of S from or to a state, which is [Dv, Dk]: p is at the simdgroup's first value row,
// of which `columns` exist.
METAL_FUNC void load_state_tile(
    thread simdgroup_float8x8& m,
    const device float* p,
    int i,
    int n,
    FragmentLane at,
    int columns) {
  const int x = i * 8 + at.row;
  UNROLL for (int e = 0; e < 2; e++) {
    const int y = n * 8 + at.col + e;
    ELEMENT(m, e) = x < head_k_dim && y < columns ? p[y * head_k_dim + x] : 0.0f;
  }
}

METAL_FUNC void store_state_tile(
    thread simdgroup_float8x8& m, device float* p, int i, int n, FragmentLane at, int columns) {
  const int x = i * 8 + at.row;
  UNROLL for (int e = 0; e < 2; e++) {
    const int y = n * 8 + at.col + e;
    if (x < head_k_dim && y < columns) p[y * head_k_dim + x] = ELEMENT(m, e);
  }
}

// Threadgroup: (32 simdgroups, 1, 1).  Grid: (ceil(Dv / (8 NV simdgroups)), Hv, sequences).
template <typename T, int D, int NV>
[[kernel]] void gated_delta_scan(
    const device T* q [[buffer(0)]],                                     // [rows, Hk, Dk], strided
    const device T* k [[buffer(1)]],                                     // [rows, Hk, Dk], strided
    const device T* v [[buffer(2)]],                                     // [rows, Hv, Dv], strided
    const device bool* mask [[buffer(3), function_constant(has_mask)]],  // [rows]
    const device GatedDeltaSequence* sequences [[buffer(4)]],
    const device float* inverse [[buffer(5)]],  // from prep, as the next two
    const device float* scores [[buffer(6)]],
    const device float* factors [[buffer(7)]],
    // [N, Hv, Dv, Dk]
    const device float* initial_state [[buffer(8), function_constant(has_initial)]],
    device float* state [[buffer(9)]],  // [N or slots, Hv, Dv, Dk]
    device T* o [[buffer(10)]],         // [rows, Hv, Dv]
    // [n, Hv, Dv, Dk]
    device float* checkpoints [[buffer(11), function_constant(has_checkpoints)]],
    constant GatedDeltaParams& params [[buffer(12)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
  constexpr int DT = D / 8;
  constexpr int LD = D + 16 / sizeof(T);  // padded rows: no bank conflicts, plain or transposed
  constexpr int kRows = kChunk * LD / 4;  // in vec<T, 4>
  // K and Q together, or, where they would take most of the threadgroup memory, one after the
  // other.
  constexpr bool kTogether = 2 * kChunk * LD * sizeof(T) <= 20480;
  threadgroup vec<T, 4> key_rows[(kTogether ? 2 : 1) * kRows];
  threadgroup float4 triangles[2 * kTriangle / 4];  // A, then P
  threadgroup float4 row_factors[kFactors / 4];

  const int num_v_heads = params.num_v_heads;
  const int q_stride = params.q.row;
  const int k_stride = params.k.row;
  const int v_stride = params.v.row;
  const int q_element = vectors ? 1 : params.q.element;
  const int k_element = vectors ? 1 : params.k.element;
  const int v_element = vectors ? 1 : params.v.element;
  const int v_head = tg.y;
  const int k_head = v_head / params.group_size;
  const device T* q_rows = q + long(k_head) * params.q.head;
  const device T* k_rows = k + long(k_head) * params.k.head;
  const device T* v_rows = v + long(v_head) * params.v.head;
  const int threads = 32 * simdgroups;
  const int column = (int(tg.x) * simdgroups + int(sg)) * 8 * NV;
  const int columns = head_v_dim - column;  // of this simdgroup's that exist, if below 8 NV
  const bool active = columns > 0;          // the others only stage
  const bool whole = head_v_dim % (8 * NV) == 0;
  const FragmentLane at = fragment_lane(lane);

  const device GatedDeltaSequence* sequence = sequences + tg.z;
  const int rows = sequence->rows;
  const int source = sequence->source;
  const int row0 = sequence->row;
  const long state_size = long(head_v_dim) * head_k_dim;
  const long state_at =
      (long(sequence->state) * num_v_heads + v_head) * state_size + long(column) * head_k_dim;
  const long initial_at =
      (long(sequence->initial) * num_v_heads + v_head) * state_size + long(column) * head_k_dim;
  long slot = long(sequence->chunk) * num_v_heads + v_head;
  long checkpoint_at =
      (long(sequence->checkpoint) * num_v_heads + v_head) * state_size + long(column) * head_k_dim;
  int until = sequence->until;
  const int checkpoint_every = has_checkpoints ? params.checkpoint_every : 0;

  simdgroup_float8x8 S[DT][NV];
  if (active && source != kGatedDeltaZeros) {
    const device float* from = state + state_at;
    if (has_initial && source == kGatedDeltaInitial) from = initial_state + initial_at;
    UNROLL for (int d = 0; d < DT; d++) {
      UNROLL for (int n = 0; n < NV; n++) load_state_tile(S[d][n], from, d, n, at, columns);
    }
  } else {
    UNROLL for (int d = 0; d < DT; d++) {
      UNROLL for (int n = 0; n < NV; n++) fragment_zero(S[d][n]);
    }
  }

  threadgroup T* ks = (threadgroup T*)key_rows;
  const threadgroup T* K = ks + at.row * LD + at.col;
  const threadgroup T* KT = ks + at.col * LD + at.row;
  threadgroup T* qs = ks + (kTogether ? kChunk * LD : 0);
  const threadgroup T* Q = qs + at.row * LD + at.col;
  const threadgroup float* A = (const threadgroup float*)triangles + at.row * 8 + at.col;
  const threadgroup float* P = A + kTriangle;
  const threadgroup float* F = (const threadgroup float*)row_factors;

  for (int done = 0; done < rows;) {
    const int live_rows = min(kChunk, min(rows - done, until));
    const long row = long(row0) + done;
    const device T* kd = k_rows + row * k_stride;
    const device T* qd = q_rows + row * q_stride;
    const device bool* live = mask + (has_mask ? row : 0);

    threadgroup_barrier(mem_flags::mem_threadgroup);  // the chunk before is done with
    if (kTogether)
      stage_rows<T, D, D, LD>(ks, kd, live, k_stride, k_element, 0, live_rows, tid, threads);
    stage_rows<T, D, D, LD>(qs, qd, live, q_stride, q_element, 0, live_rows, tid, threads);
    for (int e = tid; e < kTriangle / 4; e += threads) {
      triangles[e] = ((const device float4*)(inverse + slot * kTriangle))[e];
      triangles[kTriangle / 4 + e] = ((const device float4*)(scores + slot * kTriangle))[e];
    }
    for (int e = tid; e < kFactors / 4; e += threads) {
      row_factors[e] = ((const device float4*)(factors + slot * kFactors))[e];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_float8x8 a;
    simdgroup_float8x8 w[2][NV];  // K S, then W, then Vd, then decay Vd
    simdgroup_float8x8 y[2][NV];  // Q S, then O
    UNROLL for (int i = 0; i < 2; i++) {
      UNROLL for (int n = 0; n < NV; n++) {
        fragment_zero(w[i][n]);
        fragment_zero(y[i][n]);
      }
    }
    if (active) {
      UNROLL for (int d = 0; d < DT; d++) {
        UNROLL for (int i = 0; i < 2; i++) {
          fragment_load(a, Q + i * 8 * LD + d * 8);
          UNROLL for (int n = 0; n < NV; n++)
              simdgroup_multiply_accumulate(y[i][n], a, S[d][n], y[i][n]);
          if (kTogether) {
            fragment_load(a, K + i * 8 * LD + d * 8);
            UNROLL for (int n = 0; n < NV; n++)
                simdgroup_multiply_accumulate(w[i][n], a, S[d][n], w[i][n]);
          }
        }
      }
    }
    if (!kTogether) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // Q is done with
      stage_rows<T, D, D, LD>(ks, kd, live, k_stride, k_element, 0, live_rows, tid, threads);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (active) {
        UNROLL for (int d = 0; d < DT; d++) {
          UNROLL for (int i = 0; i < 2; i++) {
            fragment_load(a, K + i * 8 * LD + d * 8);
            UNROLL for (int n = 0; n < NV; n++)
                simdgroup_multiply_accumulate(w[i][n], a, S[d][n], w[i][n]);
          }
        }
      }
    }

    if (active) {
      // W = V - gamma K S
      const device T* vd = v_rows + (row + at.row) * v_stride + long(column + at.col) * v_element;
      bool present[2];  // rows at.row and 8 + at.row, neither past the end nor masked
      UNROLL for (int i = 0; i < 2; i++) {
        present[i] = i * 8 + at.row < live_rows && (!has_mask || live[i * 8 + at.row]);
        const float gamma = F[i * 8 + at.row];
        UNROLL for (int n = 0; n < NV; n++) {
          float2 x = 0.0f;
          if (present[i]) {
            const device T* from = vd + long(i * 8) * v_stride + long(n * 8) * v_element;
            if (whole && vectors) x = load_pair(from);
            else x = load_pair(from, columns - n * 8 - at.col, v_element);
          }
          ELEMENT(w[i][n], 0) = x.x - gamma * ELEMENT(w[i][n], 0);
          ELEMENT(w[i][n], 1) = x.y - gamma * ELEMENT(w[i][n], 1);
        }
      }
      // Vd = A W, the lower row tile first: the upper one needs only its own W.
      {
        simdgroup_float8x8 sum[NV];
        UNROLL for (int n = 0; n < NV; n++) fragment_zero(sum[n]);
        UNROLL for (int j = 0; j < 2; j++) {
          fragment_load(a, A + (1 + j) * 64);
          UNROLL for (int n = 0; n < NV; n++)
              simdgroup_multiply_accumulate(sum[n], a, w[j][n], sum[n]);
        }
        UNROLL for (int n = 0; n < NV; n++) w[1][n] = sum[n];
        UNROLL for (int n = 0; n < NV; n++) fragment_zero(sum[n]);
        fragment_load(a, A);
        UNROLL for (int n = 0; n < NV; n++)
            simdgroup_multiply_accumulate(sum[n], a, w[0][n], sum[n]);
        UNROLL for (int n = 0; n < NV; n++) w[0][n] = sum[n];
      }
      // O = scale gamma Q S + P Vd; 0 in masked rows
      device T* od = o + ((row + at.row) * num_v_heads + v_head) * head_v_dim + column + at.col;
      UNROLL for (int i = 0; i < 2; i++) {
        const float gamma = F[kChunk + i * 8 + at.row];
        UNROLL for (int n = 0; n < NV; n++) fragment_scale(y[i][n], gamma);
        UNROLL for (int j = 0; j <= i; j++) {
          fragment_load(a, P + (i + j) * 64);
          UNROLL for (int n = 0; n < NV; n++)
              simdgroup_multiply_accumulate(y[i][n], a, w[j][n], y[i][n]);
        }
        if (i * 8 + at.row < live_rows) {
          UNROLL for (int n = 0; n < NV; n++) {
            device T* to = od + long(i * 8) * num_v_heads * head_v_dim + n * 8;
            float2 x = float2(ELEMENT(y[i][n], 0), ELEMENT(y[i][n], 1));
            if (has_mask && !present[i]) x = 0.0f;
            if (whole) store_pair(to, x);
            else store_pair(to, x, columns - n * 8 - at.col);
          }
        }
      }
      // S = gamma_C S + K^T (decay Vd)
      UNROLL for (int i = 0; i < 2; i++) {
        const float decay = F[2 * kChunk + i * 8 + at.row];
        UNROLL for (int n = 0; n < NV; n++) fragment_scale(w[i][n], decay);
      }
      const float gamma_end = F[3 * kChunk];
      UNROLL for (int d = 0; d < DT; d++) {
        simdgroup_float8x8 sum[NV];  // from 0: S is then rounded once per chunk, not once per row
        UNROLL for (int n = 0; n < NV; n++) fragment_zero(sum[n]);
        UNROLL for (int i = 0; i < 2; i++) {
          fragment_load_transposed(a, KT + i * 8 * LD + d * 8, LD);
          UNROLL for (int n = 0; n < NV; n++) {
            simdgroup_multiply_accumulate(sum[n], a, w[i][n], sum[n]);
          }
        }
        UNROLL for (int n = 0; n < NV; n++) {
          ELEMENT(S[d][n], 0) = fma(gamma_end, ELEMENT(S[d][n], 0), ELEMENT(sum[n], 0));
          ELEMENT(S[d][n], 1) = fma(gamma_end, ELEMENT(S[d][n], 1), ELEMENT(sum[n], 1));
        }
      }
    }

    done += live_rows;
    slot += num_v_heads;
    until -= live_rows;
    if (has_checkpoints && until == 0) {
      if (active) {
        UNROLL for (int d = 0; d < DT; d++) {
          UNROLL for (int n = 0; n < NV; n++)
              store_state_tile(S[d][n], checkpoints + checkpoint_at, d, n, at, columns);
        }
      }
      checkpoint_at += num_v_heads * state_size;
      until = checkpoint_every;
    }
  }

  if (active) {
    UNROLL for (int d = 0; d < DT; d++) {
      UNROLL for (int n = 0; n < NV; n++)
          store_state_tile(S[d][n], state + state_at, d, n, at, columns);
    }
  }
}
