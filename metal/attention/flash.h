// Flash attention over one segment of keys: paged, GQA-packed, resumable.
//
// A threadgroup owns kRows = 8 RF WM query rows of one KV head; rows are position * group_size +
// head, so every ratio of heads packs without waste (group_size 4: 64 rows are 16 positions x 4
// heads). WN simdgroups share the 8 RF rows of a row group:
//
//   Q K^T  the tile's BK keys are split over WN / DS of them and the head dimension over DS; with
//          DS > 1 the partial scores are exchanged, so that each ends with the whole scores of its
//          own BK / WN keys;
//   P V    each owns D / WN value columns and takes the others' P lane by lane.
//
// DS > 1 is for registers: Q takes 8 RF D / DS elements of a simdgroup, O takes 8 RF D / WN floats.
//
// Nothing is transposed. The operands of an 8x8 product may see the contracted dimension in any
// order that they share, so in a block of 8 F head dimensions index kk of fragment f is d = F kk +
// f: a lane needs F consecutive elements of a K row. In the same way column pair j of fragment f in
// a block of 8 F value columns is d = 2 F j + 2 f. Blocks are 64 and 32 wide, the last one may be
// narrower.
//
// (m, l, O) is the running maximum (log2 units), sum and unnormalised output of Dao et al. (2022),
// "FlashAttention"; the lazy rescale is FlashAttention-4's.
#pragma once

#include "attention/options.h"

// Copies keys [k0, k0 + BK) of one KV head to a tile. Keys outside [begin, end) are not read and
// become 0, so that nothing an unused slot holds can reach a product.
template <typename T, int D, int LD, int BK, int NT>
METAL_FUNC void stage_keys(
    threadgroup T* tile,
    const device T* pool,
    uint row0,
    uint row1,
    int k0,
    int begin,
    int end,
    int tid) {
  constexpr int E = 16 / int(sizeof(T));  // elements of a 16-byte word
  constexpr int W = D / E;                // words of a key
  constexpr int N = (BK * W + NT - 1) / NT;
  UNROLL for (int i = 0; i < N; i++) {
    const int p = tid + i * NT;
    if (BK * W % NT == 0 || p < BK * W) {
      const int r = p / W;
      const int c = p % W * E;
      uint4 x = uint4(0);
      if (k0 + r >= begin && k0 + r < end) {
        const uint row = (r < 16 ? row0 : row1) + uint(r & 15);
        x = *(const device uint4*)(pool + size_t(row) * D + c);
      }
      *(threadgroup uint4*)(tile + r * LD + c) = x;
    }
  }
}

// Q's fragments of RF row fragments, one block of 8 F head dimensions; src is the row's block.
template <typename T, int F>
METAL_FUNC void load_query_block(thread vec<T, 2>* qf, const device T* src, bool valid, int fc) {
  Pack<T, F> x;
  Pack<T, F> y;
  zero_pack(x);
  zero_pack(y);
  if (valid) {
    load_pack(x, src + fc * F);
    load_pack(y, src + fc * F + F);
  }
  UNROLL for (int f = 0; f < F; f++) qf[f] = vec<T, 2>(x[f], y[f]);
}

// sx[i * NX + n] += Q K^T over one block of 8 F head dimensions; keys points at this lane's two
// keys.
template <typename T, int F, int RF, int NX, int QF, int LD>
METAL_FUNC void multiply_scores(
    thread float2* sx, const thread vec<T, 2>* qf, const threadgroup T* keys, int fr) {
  UNROLL for (int n = 0; n < NX; n++) {
    Pack<T, F> x;
    Pack<T, F> y;
    load_pack(x, keys + n * 8 * LD + fr * F);
    load_pack(y, keys + n * 8 * LD + LD + fr * F);
    UNROLL for (int f = 0; f < F; f++) {
      UNROLL for (int i = 0; i < RF; i++) {
        fragment_mma<T>(sx[i * NX + n], qf[i * QF + f], vec<T, 2>(x[f], y[f]));
      }
    }
  }
}

// o += P V for eight keys over one block of 8 F value columns; values points at this lane's key.
template <typename T, int F, int RF, int OF>
METAL_FUNC void multiply_values(
    thread float2* o, const thread vec<T, 2>* p, const threadgroup T* values, int fc) {
  Pack<T, 2 * F> x;
  load_pack(x, values + fc * F);
  UNROLL for (int f = 0; f < F; f++) {
    UNROLL for (int i = 0; i < RF; i++) {
      fragment_mma<T>(o[i * OF + f], p[i], vec<T, 2>(x[f * 2], x[f * 2 + 1]));
    }
  }
}

// Threadgroup: (32 WM WN, 1, 1). Grid: (tiles of this launch, KV heads, 1) threadgroups.
//
// SHARED: K and V tiles take turns in one buffer, which costs barriers and halves the memory.
template <typename T, int D, int BK, int WM, int WN, int DS, int RF, bool SHARED>
[[kernel, max_total_threads_per_threadgroup(WM * WN * 32)]] void flash(
    const device T* q [[buffer(0)]],                  // [tokens, Hq, D]
    const device T* k [[buffer(1)]],                  // [pages, Hkv, page_size, D], or gathered
    const device T* v [[buffer(2)]],                  // the same; gathered: [Hkv, gathered_rows, D]
    const device int* block_table [[buffer(3)]],      // [sequences, max_pages]
    const device AttentionTile* tiles [[buffer(4)]],  // those of all launches
    constant PagedAttentionParams& params [[buffer(5)]],
    const device float* sinks [[buffer(6), function_constant(has_sinks)]],  // [Hq]
    device T* out [[buffer(7)]],                                            // [tokens, Hq, D]
    device float* lse [[buffer(8), function_constant(writes_lse)]],         // [tokens, Hq]
    device float* state_o [[buffer(9), function_constant(carries)]],        // [state rows, Hkv, D]
    device float* state_m [[buffer(10), function_constant(carries)]],       // [state rows, Hkv]
    device float* state_l [[buffer(11), function_constant(carries)]],       // [state rows, Hkv]
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int NT = WM * WN * 32;
  constexpr int LD = D + 16 / int(sizeof(T));  // padded rows: no bank conflicts among eight keys
  constexpr int KN = BK / WN;                  // keys whose scores this simdgroup ends up with,
  constexpr int NK = KN / 8;                   // in fragments
  constexpr int NX = NK * DS;  // key fragments it multiplies, over D / DS dimensions
  constexpr int QD = D / DS;
  constexpr int QF = QD / 8;       // Q fragments of a row fragment
  constexpr int QB = QD / 64;      // whole blocks of the contracted dimension,
  constexpr int QT = QD % 64 / 8;  // and the fragments of its narrower last one
  constexpr int DC = D / WN;       // its value columns
  constexpr int OF = DC / 8;
  constexpr int OB = DC / 32;
  constexpr int OT = DC % 32 / 8;
  constexpr bool kOverlay =
      SHARED && DS > 1;  // P may lie over the partial scores: barriers part them
  constexpr int kKeyWords = (SHARED ? 1 : 2) * BK * LD * int(sizeof(T)) / 16;
  constexpr int kPWords = WN > 1 && !kOverlay ? WM * WN * RF * NK * 32 : 1;
  constexpr int kXWords = DS > 1 ? WM * WN * (DS - 1) * RF * NK * 32 : 1;
  static_assert(NK > 0 && WN % DS == 0, "tile shape");
  static_assert(BK == 16 || BK == 32, "one or two 16-key blocks");
  static_assert(QB * 64 + QT * 8 == QD && OB * 32 + OT * 8 == DC, "head dimension");

  threadgroup uint4 kv[kKeyWords];
  threadgroup vec<T, 2> p_own[kPWords];
  threadgroup float2 xs[kXWords];              // partial scores for the other parts of D
  threadgroup float row_of[WM * WN * RF * 8];  // row maxima per simdgroup; at the end, row sums
  threadgroup vec<T, 2>* ps = kOverlay ? (threadgroup vec<T, 2>*)xs : p_own;
  threadgroup T* kt = (threadgroup T*)kv;
  threadgroup T* vt = SHARED ? kt : kt + BK * LD;

  const int rg = int(sg) / WN;    // row group
  const int cg = int(sg) % WN;    // place in it
  const int ds = cg % DS;         // part of D
  const int kx = (cg - ds) * KN;  // first key multiplied
  const FragmentLane at = fragment_lane(lane);
  const int fr = at.row;
  const int fc = at.col;

  const int hkv = params.num_kv_heads;
  const int kv_head = int(tg.y);
  const int hq = hkv * group_size;
  const float scale = params.scale;
  const float softcap = params.softcap;
  const int window = params.window;
  const device AttentionTile* tile = tiles + params.first_tile + int(tg.x);
  const int token = tile->token;
  const int rows = tile->rows;
  const int row0 = tile->row;
  const int shift = tile->shift;
  const int begin = tile->key_begin;
  const int end = tile->key_end;
  const int state_row = tile->state - row0;  // of the sequence's row 0
  const bool first = (tile->flags & kAttentionTileFirst) != 0;
  const bool last = (tile->flags & kAttentionTileLast) != 0;

  // Keys that no row of the row group sees; keys that all rows of the tile see.
  const int last_row = min(row0 + 8 * RF * WM, rows) - 1;
  const int group_end =
      causal ? min(end, (row0 + (rg + 1) * RF * 8 - 1) / group_size + shift + 1) : end;
  const int all_end = causal ? min(end, row0 / group_size + shift + 1) : end;
  const int all_begin = has_window ? max(begin, last_row / group_size + shift - window + 1) : begin;

  int row_at[RF];  // row of q and out, token * Hq + head; -1 past the end
  int see_from[RF];
  int see_to[RF];  // last visible key
  vec<T, 2> qf[RF * QF];
  float2 o[RF * OF];
  float m[RF];
  float l[RF];
  UNROLL for (int i = 0; i < RF; i++) {
    const int r = row0 + (rg * RF + i) * 8 + fr;
    const int position = r / group_size;
    const bool valid = r < rows;
    row_at[i] =
        valid ? (token + position) * hq + kv_head * group_size + (r - position * group_size) : -1;
    see_from[i] = has_window ? max(begin, position + shift - window + 1) : begin;
    see_to[i] = causal ? min(end - 1, position + shift) : end - 1;
    const device T* src = q + size_t(valid ? row_at[i] : 0) * D + ds * QD;
    UNROLL for (int b = 0; b < QB; b++) {
      load_query_block<T, 8>(qf + i * QF + b * 8, src + b * 64, valid, fc);
    }
    if (QT > 0) load_query_block<T, QT ? QT : 2>(qf + i * QF + QB * 8, src + QB * 64, valid, fc);
    m[i] = kNone;
    l[i] = 0;  // partial: this lane's columns of this simdgroup's keys
    UNROLL for (int c = 0; c < OF; c++) o[i * OF + c] = float2(0);
    if (carries && !first && valid) {
      const int from_row = (state_row + r) * hkv + kv_head;
      m[i] = state_m[from_row];
      if (cg == 0 && fc == 0) l[i] = state_l[from_row];
      const device float* from = state_o + size_t(from_row) * D + cg * DC;
      UNROLL for (int c = 0; c < OB * 4; c++) {
        o[i * OF + c] = *(const device float2*)(from + c / 4 * 32 + fc * 4 + c % 4 * 2);
      }
      UNROLL for (int c = 0; c < OT; c++) {
        o[i * OF + OB * 4 + c] = *(const device float2*)(from + OB * 32 + fc * OT + c * 2);
      }
    }
  }

  PageCursor pages = page_cursor(
      block_table, tile->table, params.table_length, params.num_pages, hkv, kv_head, int(lane));
  const uint gathered = uint(kv_head * params.gathered_rows + tile->gathered);
  const bool paged = !k_gathered || !v_gathered;
  uint page_row[2] = {0, 0};  // pool rows of the tile's 16-key blocks
  uint k_row[2];
  uint v_row[2];

  // Tiles begin at multiples of BK whatever the chunk or segment, so that a row's bits do not
  // depend on how queries were chunked, nor O's on segments cut at such multiples.
  const int start = begin / BK * BK;
  if (!SHARED) {
    if (start < end) {
      UNROLL for (int b = 0; b < BK / 16; b++) {
        if (paged) page_row[b] = pages.row(start + b * 16);
        k_row[b] = k_gathered ? gathered + uint(start + b * 16) : page_row[b];
      }
      stage_keys<T, D, LD, BK, NT>(
          kt, k, k_row[0], k_row[BK / 16 - 1], start, begin, end, int(tid));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the first K is here
  }

  for (int k0 = start; k0 < end; k0 += BK) {
    if (SHARED) {
      UNROLL for (int b = 0; b < BK / 16; b++) {
        if (paged) page_row[b] = pages.row(k0 + b * 16);
        k_row[b] = k_gathered ? gathered + uint(k0 + b * 16) : page_row[b];
      }
      stage_keys<T, D, LD, BK, NT>(kt, k, k_row[0], k_row[BK / 16 - 1], k0, begin, end, int(tid));
      threadgroup_barrier(mem_flags::mem_threadgroup);  // K is here
    }

    // S = Q K^T
    float2 sx[RF * NX];
    UNROLL for (int n = 0; n < RF * NX; n++) sx[n] = float2(0);
    if (k0 + kx < group_end) {
      const threadgroup T* src = kt + (kx + fc) * LD + ds * QD;
      UNROLL for (int b = 0; b < QB; b++) {
        multiply_scores<T, 8, RF, NX, QF, LD>(sx, qf + b * 8, src + b * 64, fr);
      }
      if (QT > 0)
        multiply_scores<T, QT ? QT : 2, RF, NX, QF, LD>(sx, qf + QB * 8, src + QB * 64, fr);
    }
    float2 s[RF * NK];
    if (DS > 1) {  // hand the others their fragments, add theirs to ours
      UNROLL for (int w = 1; w < DS; w++) {
        UNROLL for (int i = 0; i < RF; i++) {
          UNROLL for (int n = 0; n < NK; n++) {
            float2 x = sx[i * NX + n];
            UNROLL for (int d = 1; d < DS; d++) {
              if ((ds + w) % DS == d) x = sx[i * NX + d * NK + n];
            }
            xs[(((int(sg) * (DS - 1) + w - 1) * RF + i) * NK + n) * 32 + int(lane)] = x;
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // partial scores are here
    }
    UNROLL for (int i = 0; i < RF; i++) {
      UNROLL for (int n = 0; n < NK; n++) {
        s[i * NK + n] = sx[i * NX + n];
        UNROLL for (int d = 1; d < DS; d++) {
          if (ds == d) s[i * NK + n] = sx[i * NX + d * NK + n];
        }
        UNROLL for (int w = 1; w < DS; w++) {
          const int from = int(sg) - ds + (ds + DS - w) % DS;
          s[i * NK + n] += xs[(((from * (DS - 1) + w - 1) * RF + i) * NK + n) * 32 + int(lane)];
        }
      }
    }

    // Scale, mask (only in tiles that some row does not see whole), row maximum.
    const bool masked = k0 + BK > all_end || k0 < all_begin;
    float top[RF];
    UNROLL for (int i = 0; i < RF; i++) {
      top[i] = kNone;
      UNROLL for (int n = 0; n < NK; n++) {
        float2 x = score(s[i * NK + n], scale, softcap);
        if (masked) {
          const int key = k0 + cg * KN + n * 8 + fc;
          if (key > see_to[i] || key < see_from[i]) x.x = kMasked;
          if (key + 1 > see_to[i] || key + 1 < see_from[i]) x.y = kMasked;
        }
        top[i] = max(top[i], max(x.x, x.y));
        s[i * NK + n] = x;
      }
      top[i] = max(top[i], simd_shuffle_xor(top[i], ushort(1)));
      top[i] = max(top[i], simd_shuffle_xor(top[i], ushort(8)));
      if (WN > 1 && fc == 0) row_of[(int(sg) * RF + i) * 8 + fr] = top[i];
    }
    threadgroup_barrier(
        mem_flags::mem_threadgroup);  // maxima are here; K, the last V and P are done with

    UNROLL for (int b = 0; b < BK / 16; b++) {
      v_row[b] = v_gathered ? gathered + uint(k0 + b * 16) : page_row[b];
    }
    stage_keys<T, D, LD, BK, NT>(vt, v, v_row[0], v_row[BK / 16 - 1], k0, begin, end, int(tid));
    if (!SHARED && k0 + BK < end) {
      UNROLL for (int b = 0; b < BK / 16; b++) {
        if (paged) page_row[b] = pages.row(k0 + BK + b * 16);
        k_row[b] = k_gathered ? gathered + uint(k0 + BK + b * 16) : page_row[b];
      }
      stage_keys<T, D, LD, BK, NT>(
          kt, k, k_row[0], k_row[BK / 16 - 1], k0 + BK, begin, end, int(tid));
    }

    // P = exp2(S - m), with the maximum of the whole tile: all lanes and simdgroups of a row agree.
    vec<T, 2> p[NK * RF];
    UNROLL for (int i = 0; i < RF; i++) {
      UNROLL for (int w = 1; w < WN; w++) {
        top[i] = max(top[i], row_of[((rg * WN + (cg + w) % WN) * RF + i) * 8 + fr]);
      }
      if (top[i] > m[i] + kLazy || m[i] == kNone) {
        const float rescale = fast::exp2(m[i] - top[i]);
        m[i] = top[i];
        l[i] *= rescale;
        UNROLL for (int c = 0; c < OF; c++) o[i * OF + c] *= rescale;
      }
      UNROLL for (int n = 0; n < NK; n++) {
        const float2 x = s[i * NK + n];
        const float2 e = float2(fast::exp2(x.x - m[i]), fast::exp2(x.y - m[i]));
        l[i] += e.x + e.y;
        p[n * RF + i] = vec<T, 2>(T(e.x), T(e.y));
        if (WN > 1) ps[((int(sg) * RF + i) * NK + n) * 32 + int(lane)] = p[n * RF + i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // V, P and the next K are here

    // O += P V: this simdgroup's own keys first, from registers.
    UNROLL for (int w = 0; w < WN; w++) {
      const int from = (cg + w) % WN;
      if (k0 + from * KN < group_end) {
        const threadgroup T* src = vt + (from * KN + fr) * LD + cg * DC;
        UNROLL for (int n = 0; n < NK; n++) {
          vec<T, 2> a[RF];
          UNROLL for (int i = 0; i < RF; i++) {
            a[i] = w == 0 ? p[n * RF + i]
                          : ps[(((rg * WN + from) * RF + i) * NK + n) * 32 + int(lane)];
          }
          UNROLL for (int c = 0; c < OB; c++) {
            multiply_values<T, 4, RF, OF>(o + c * 4, a, src + n * 8 * LD + c * 32, fc);
          }
          if (OT > 0) {
            multiply_values<T, OT ? OT : 1, RF, OF>(o + OB * 4, a, src + n * 8 * LD + OB * 32, fc);
          }
        }
      }
    }
    if (SHARED) threadgroup_barrier(mem_flags::mem_threadgroup);  // V is done with
  }

  // Row sums: the four lanes of a row, then the simdgroups of the row group. The barrier also
  // stands between the reads of state_m and state_l by a whole row group and their new values from
  // one lane.
  UNROLL for (int i = 0; i < RF; i++) {
    l[i] += simd_shuffle_xor(l[i], ushort(1));
    l[i] += simd_shuffle_xor(l[i], ushort(8));
  }
  if (WN > 1) {
    UNROLL for (int i = 0; i < RF; i++) {
      if (fc == 0) row_of[(int(sg) * RF + i) * 8 + fr] = l[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    UNROLL for (int i = 0; i < RF; i++) {
      l[i] = 0;
      UNROLL for (int w = 0; w < WN; w++) l[i] += row_of[((rg * WN + w) * RF + i) * 8 + fr];
    }
  }

  UNROLL for (int i = 0; i < RF; i++) {
    if (row_at[i] >= 0) {
      if (last) {
        const size_t to = size_t(row_at[i]) * D + cg * DC;
        const float sink = has_sinks ? sinks[row_at[i] % hq] : 0.0f;
        const FinishedRow row = finish_row(m[i], l[i], sink, has_sinks);
        UNROLL for (int c = 0; c < OB; c++) {
          const thread float2* x = o + i * OF + c * 4;
          *(device vec<T, 4>*)(out + to + c * 32 + fc * 4) =
              vec<T, 4>(float4(x[0], x[1]) * row.factor);
          *(device vec<T, 4>*)(out + to + c * 32 + fc * 4 + 4) =
              vec<T, 4>(float4(x[2], x[3]) * row.factor);
        }
        UNROLL for (int c = 0; c < OT; c++) {
          *(device vec<T, 2>*)(out + to + OB * 32 + fc * OT + c * 2) =
              vec<T, 2>(o[i * OF + OB * 4 + c] * row.factor);
        }
        if (writes_lse && cg == 0 && fc == 0) lse[row_at[i]] = row.lse;
      } else if (carries) {
        const int to_row = (state_row + row0 + (rg * RF + i) * 8 + fr) * hkv + kv_head;
        const size_t to = size_t(to_row) * D + cg * DC;
        UNROLL for (int c = 0; c < OB * 4; c++) {
          *(device float2*)(state_o + to + c / 4 * 32 + fc * 4 + c % 4 * 2) = o[i * OF + c];
        }
        UNROLL for (int c = 0; c < OT; c++) {
          *(device float2*)(state_o + to + OB * 32 + fc * OT + c * 2) = o[i * OF + OB * 4 + c];
        }
        if (cg == 0 && fc == 0) {
          state_m[to_row] = m[i];
          state_l[to_row] = l[i];
        }
      }
    }
  }
}

#define FLASH(NAME, ...) \
  template [[host_name(NAME)]] [[kernel]] decltype(flash<__VA_ARGS__>) flash<__VA_ARGS__>;
