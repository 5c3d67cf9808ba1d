// Attention of a few queries over many keys: 1 to 8 positions of a sequence, keys split.
//
// A threadgroup owns 8 rows (position * group_size + head) of one KV head and the keys of one
// split; its simdgroups take 16-key blocks in turn, each with a (m, l, O) of its own, and add them
// up at the end. K and V go from the pages straight into fragments: no other simdgroup needs them,
// and the bandwidth of device memory is what binds. The splits of a row are merged by
// merge_states.h.
#pragma once

#include "attention/options.h"
#include "attention/page_codec.h"

constant int k_format [[function_constant(ATTENTION_K_FORMAT)]];
constant int v_format [[function_constant(ATTENTION_V_FORMAT)]];

constant constexpr int kDecodeRows = 8;
constant constexpr int kDecodeSimdgroups = 4;
constant constexpr int kDecodeBlock = 16;  // keys

// Bytes of a key's or value's row.
template <typename T, int D>
METAL_FUNC int decode_row_bytes(int format) {
  if (format == kAttentionPageF32) return PlainCodec<float>::row_bytes(D);
  if (format == kAttentionPageF16) return PlainCodec<half>::row_bytes(D);
  if (format == kAttentionPageBF16) return PlainCodec<bfloat>::row_bytes(D);
  if (format == kAttentionPageQ80) return Q80Codec::row_bytes(D);
  if (format == kAttentionPageQ40) return Q40Codec::row_bytes(D);
  if (format == kAttentionPageTurbo4) return Turbo4Codec::row_bytes(D);
  return D * int(sizeof(T));
}

// Elements [d, d + N) of a row in the queries' own type, 0 where the key is not ours.
template <typename T, int N>
METAL_FUNC void load_run(
    thread Pack<T, N>& x, const device uchar* row, int d, int format, bool ours) {
  zero_pack(x);
  if (ours) load_pack(x, (const device T*)row + d);
}

// Eight elements in any format. The formats are function constants: one branch is left of these.
template <typename T>
METAL_FUNC void load_run(
    thread Pack<T, 8>& x, const device uchar* row, int d, int format, bool ours) {
  zero_pack(x);
  if (!ours) return;
  if (format == kAttentionPageOwn) {
    load_pack(x, (const device T*)row + d);
    return;
  }
  Run8 run;
  if (format == kAttentionPageF32) run = PlainCodec<float>::decode(row, d / 8);
  else if (format == kAttentionPageF16) run = PlainCodec<half>::decode(row, d / 8);
  else if (format == kAttentionPageBF16) run = PlainCodec<bfloat>::decode(row, d / 8);
  else if (format == kAttentionPageQ80) run = Q80Codec::decode(row, d / 8);
  else if (format == kAttentionPageQ40) run = Q40Codec::decode(row, d / 8);
  else run = Turbo4Codec::decode(row, d / 8);
  x.lo = vec<T, 4>(run.lo);
  x.hi = vec<T, 4>(run.hi);
}

// s[n] += Q K^T for 16 keys over one block of 8 F head dimensions from d0 on; k is the row of the
// first key, q this lane's row.
template <typename T, int F>
METAL_FUNC void decode_scores(
    thread float2* s,
    const threadgroup T* q,
    const device uchar* k,
    int row_bytes,
    int d0,
    int key,
    int begin,
    int end,
    int fr,
    int fc) {
  Pack<T, F> qx;
  Pack<T, F> qy;
  load_pack(qx, q + d0 + fc * F);
  load_pack(qy, q + d0 + fc * F + F);
  UNROLL for (int n = 0; n < 2; n++) {
    const int at = key + n * 8 + fc;
    const device uchar* row = k + (n * 8 + fc) * row_bytes;
    Pack<T, F> x;
    Pack<T, F> y;
    load_run(x, row, d0 + fr * F, k_format, at >= begin && at < end);
    load_run(y, row + row_bytes, d0 + fr * F, k_format, at + 1 >= begin && at + 1 < end);
    UNROLL for (int f = 0; f < F; f++) {
      fragment_mma<T>(s[n], vec<T, 2>(qx[f], qy[f]), vec<T, 2>(x[f], y[f]));
    }
  }
}

// o += P V for eight keys over one block of 8 F value columns from d0 on; row is this lane's key's.
template <typename T, int F>
METAL_FUNC void decode_values(
    thread float2* o, vec<T, 2> p, const device uchar* row, int d0, bool ours, int fc) {
  Pack<T, 2 * F> x;
  load_run(x, row, d0 + fc * F, v_format, ours);
  UNROLL for (int f = 0; f < F; f++) fragment_mma<T>(o[f], p, vec<T, 2>(x[f * 2], x[f * 2 + 1]));
}

// Threadgroup: (128, 1, 1). Grid: (tiles of this launch, KV heads, 1) threadgroups. A tile without
// the flag kAttentionTileLast writes a partial result instead of o and lse.
template <typename T, int D>
[[kernel, max_total_threads_per_threadgroup(128)]] void decode(
    const device T* q [[buffer(0)]],                  // [tokens, Hq, D]
    const device uchar* k [[buffer(1)]],              // [pages, Hkv, page_size, row], or gathered
    const device uchar* v [[buffer(2)]],              // the same; gathered: [Hkv, gathered_rows, D]
    const device int* block_table [[buffer(3)]],      // [sequences, max_pages]
    const device AttentionTile* tiles [[buffer(4)]],  // those of all launches
    constant PagedAttentionParams& params [[buffer(5)]],
    const device float* sinks [[buffer(6), function_constant(has_sinks)]],  // [Hq]
    device T* out [[buffer(7)]],                                            // [tokens, Hq, D]
    device float* lse [[buffer(8), function_constant(writes_lse)]],         // [tokens, Hq]
    device float* partial_o [[buffer(9), function_constant(carries)]],      // [partials, Hq, D]
    device float* partial_lse [[buffer(10), function_constant(carries)]],   // [partials, Hq]
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int NT = kDecodeSimdgroups * 32;
  constexpr int LQ = D + 16 / int(sizeof(T));  // padded rows: no bank conflicts
  constexpr int LO = D + 4;
  constexpr int QB = D / 64;  // whole blocks of the contracted dimension,
  constexpr int QT = D % 64 / 8;
  constexpr int OB = D / 32;  // of the value columns
  constexpr int OT = D % 32 / 8;
  constexpr int OF = D / 8;
  constexpr int W = D / 4;  // runs of four elements in a row

  threadgroup vec<T, 4> q_tile[kDecodeRows * LQ / 4];
  threadgroup float4 o_sum[kDecodeRows * LO / 4];
  threadgroup float m_of[kDecodeSimdgroups * 8];
  threadgroup float l_of[kDecodeSimdgroups * 8];
  threadgroup T* qs = (threadgroup T*)q_tile;
  threadgroup float* os = (threadgroup float*)o_sum;

  const FragmentLane at = fragment_lane(lane);
  const int fr = at.row;
  const int fc = at.col;
  const int hkv = params.num_kv_heads;
  const int kv_head = int(tg.y);
  const int hq = hkv * group_size;
  const float scale = params.scale;
  const float softcap = params.softcap;
  const device AttentionTile* tile = tiles + params.first_tile + int(tg.x);
  const int token = tile->token;
  const int rows = tile->rows;
  const int row0 = tile->row;
  const int begin = tile->key_begin;
  const int end = tile->key_end;
  const int partial = tile->state;
  const bool last = (tile->flags & kAttentionTileLast) != 0;

  for (int i = int(tid); i < kDecodeRows * W; i += NT) {
    const int r = row0 + i / W;
    const int position = r / group_size;
    vec<T, 4> x = vec<T, 4>(T(0));
    if (r < rows) {
      const int row = (token + position) * hq + kv_head * group_size + (r - position * group_size);
      x = *(const device vec<T, 4>*)(q + size_t(row) * D + i % W * 4);
    }
    *(threadgroup vec<T, 4>*)(qs + i / W * LQ + i % W * 4) = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // Q is here

  const int position = (row0 + fr) / group_size;
  const int see_from = has_window ? max(begin, position + tile->shift - params.window + 1) : begin;
  const int see_to = causal ? min(end - 1, position + tile->shift) : end - 1;
  PageCursor pages = page_cursor(
      block_table, tile->table, params.table_length, params.num_pages, hkv, kv_head, int(lane));
  const uint gathered = uint(kv_head * params.gathered_rows + tile->gathered);
  const bool paged = !k_gathered || !v_gathered;
  const int k_bytes = decode_row_bytes<T, D>(k_format);
  const int v_bytes = decode_row_bytes<T, D>(v_format);

  float m = kNone;
  float l = 0;  // partial: this lane's columns
  float2 o[OF];
  UNROLL for (int c = 0; c < OF; c++) o[c] = float2(0);

  const int stride = kDecodeBlock * kDecodeSimdgroups;
  for (int key = begin / kDecodeBlock * kDecodeBlock + int(sg) * kDecodeBlock; key < end;
       key += stride) {
    const uint page_row = paged ? pages.row(key) : 0;
    const device uchar* kp = k + size_t(k_gathered ? gathered + uint(key) : page_row) * k_bytes;
    const device uchar* vp = v + size_t(v_gathered ? gathered + uint(key) : page_row) * v_bytes;

    float2 s[2] = {float2(0), float2(0)};
    const threadgroup T* q_row = qs + fr * LQ;
    UNROLL for (int b = 0; b < QB; b++) {
      decode_scores<T, 8>(s, q_row, kp, k_bytes, b * 64, key, begin, end, fr, fc);
    }
    if (QT > 0)
      decode_scores<T, QT ? QT : 2>(s, q_row, kp, k_bytes, QB * 64, key, begin, end, fr, fc);

    float top = kNone;
    UNROLL for (int n = 0; n < 2; n++) {
      s[n] = score(s[n], scale, softcap);
      const int at_key = key + n * 8 + fc;
      if (at_key > see_to || at_key < see_from) s[n].x = kMasked;
      if (at_key + 1 > see_to || at_key + 1 < see_from) s[n].y = kMasked;
      top = max(top, max(s[n].x, s[n].y));
    }
    top = max(top, simd_shuffle_xor(top, ushort(1)));
    top = max(top, simd_shuffle_xor(top, ushort(8)));
    if (top > m + kLazy || m == kNone) {
      const float rescale = fast::exp2(m - top);
      m = top;
      l *= rescale;
      UNROLL for (int c = 0; c < OF; c++) o[c] *= rescale;
    }
    UNROLL for (int n = 0; n < 2; n++) {
      const float2 e = float2(fast::exp2(s[n].x - m), fast::exp2(s[n].y - m));
      l += e.x + e.y;
      const vec<T, 2> p = vec<T, 2>(T(e.x), T(e.y));
      const int own = key + n * 8 + fr;
      const bool ours = own >= begin && own < end;
      const device uchar* row = vp + (n * 8 + fr) * v_bytes;
      UNROLL for (int b = 0; b < OB; b++) decode_values<T, 4>(o + b * 4, p, row, b * 32, ours, fc);
      if (OT > 0) decode_values<T, OT ? OT : 1>(o + OB * 4, p, row, OB * 32, ours, fc);
    }
  }

  // The simdgroups' sums of each row, in turn so that the result never depends on their pace.
  l += simd_shuffle_xor(l, ushort(1));
  l += simd_shuffle_xor(l, ushort(8));
  if (fc == 0) {
    m_of[int(sg) * 8 + fr] = m;
    l_of[int(sg) * 8 + fr] = l;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // maxima are here
  float top = m;
  UNROLL for (int w = 0; w < kDecodeSimdgroups; w++) top = max(top, m_of[w * 8 + fr]);
  const float rescale = exp2(m - top);
  UNROLL for (int w = 0; w < kDecodeSimdgroups; w++) {
    if (int(sg) == w) {
      UNROLL for (int c = 0; c < OF; c++) {
        const int col =
            c < OB * 4 ? c / 4 * 32 + fc * 4 + c % 4 * 2 : OB * 32 + fc * OT + (c - OB * 4) * 2;
        const float2 x = o[c] * rescale;
        threadgroup float* to = os + fr * LO + col;
        to[0] = w == 0 ? x.x : to[0] + x.x;
        to[1] = w == 0 ? x.y : to[1] + x.y;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // w's share is in
  }

  for (int i = int(tid); i < kDecodeRows * W; i += NT) {
    const int r = row0 + i / W;
    if (r < rows) {
      const int pos = r / group_size;
      const int head = kv_head * group_size + (r - pos * group_size);
      float all_m = kNone;
      float all_l = 0;
      UNROLL for (int w = 0; w < kDecodeSimdgroups; w++) all_m = max(all_m, m_of[w * 8 + i / W]);
      UNROLL for (int w = 0; w < kDecodeSimdgroups; w++) {
        all_l += l_of[w * 8 + i / W] * exp2(m_of[w * 8 + i / W] - all_m);
      }
      const float sink = has_sinks && last ? sinks[head] : 0.0f;
      const FinishedRow row = finish_row(all_m, all_l, sink, has_sinks && last);
      const float4 x = *(const threadgroup float4*)(os + i / W * LO + i % W * 4) * row.factor;
      if (last) {
        const int to = (token + pos) * hq + head;
        *(device vec<T, 4>*)(out + size_t(to) * D + i % W * 4) = vec<T, 4>(x);
        if (writes_lse && i % W == 0) lse[to] = row.lse;
      } else if (carries) {
        const int to = (partial + pos) * hq + head;
        *(device float4*)(partial_o + size_t(to) * D + i % W * 4) = x;
        if (i % W == 0) partial_lse[to] = row.lse;
      }
    }
  }
}

#define DECODE(NAME, ...) \
  template [[host_name(NAME)]] [[kernel]] decltype(decode<__VA_ARGS__>) decode<__VA_ARGS__>;
