// Writes new key or value rows into the pages of one slab, encoding them on the way.
#include "attention/append_params.h"
#include "attention/page_encode.h"

using namespace chunkdelta;

// Threadgroup: (128, 1, 1), a simdgroup per (token, KV head). Grid: (ceil(rows / 4), 1, 1)
// threadgroups. Rows whose slot lies in another slab, or is -1, are left out: whatever the slots
// are, nothing outside the slab is written.
template <typename T, typename Encoder>
[[kernel, max_total_threads_per_threadgroup(128)]] void append_kv(
    const device T* x [[buffer(0)]],               // [tokens, Hkv, D]
    const device int* slot_mapping [[buffer(1)]],  // [tokens], page * page_size + offset
    constant AppendKVParams& params [[buffer(2)]],
    device uchar* pages [[buffer(3)]],  // [num_pages, Hkv, page_size, row bytes]
    uint3 tg [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int row = (params.first_group + int(tg.x)) * 4 + int(sg);
  if (row >= params.rows) return;
  const int heads = params.num_kv_heads;
  const int token = row / heads;
  const int head = row - token * heads;
  const int slot = slot_mapping[token];
  if (slot < 0) return;
  const uint page = uint(slot / params.page_size) - uint(params.first_page);
  if (page >= uint(params.num_pages)) return;  // also below first_page: the difference wraps

  const size_t to = (size_t(page) * heads + head) * params.page_size + slot % params.page_size;
  Encoder::encode(
      x + size_t(row) * params.head_dim, pages + to * Encoder::row_bytes(params.head_dim),
      params.head_dim, int(lane));
}

#define APPEND_KV(NAME, ...) \
  template [[host_name(NAME)]] [[kernel]] decltype(append_kv<__VA_ARGS__>) append_kv<__VA_ARGS__>;

#define APPEND_KV_FROM(NAME, T)                                              \
  APPEND_KV("append_kv_" NAME "_to_float32_v4", T, PlainEncoder<float, 4>)   \
  APPEND_KV("append_kv_" NAME "_to_float16_v4", T, PlainEncoder<half, 4>)    \
  APPEND_KV("append_kv_" NAME "_to_bfloat16_v4", T, PlainEncoder<bfloat, 4>) \
  APPEND_KV("append_kv_" NAME "_to_float32_v1", T, PlainEncoder<float, 1>)   \
  APPEND_KV("append_kv_" NAME "_to_float16_v1", T, PlainEncoder<half, 1>)    \
  APPEND_KV("append_kv_" NAME "_to_bfloat16_v1", T, PlainEncoder<bfloat, 1>) \
  APPEND_KV("append_kv_" NAME "_to_q8_0", T, Q80Encoder)                     \
  APPEND_KV("append_kv_" NAME "_to_q4_0", T, Q40Encoder)                     \
  APPEND_KV("append_kv_" NAME "_to_turbo4", T, Turbo4Encoder)

APPEND_KV_FROM("float32", float)
APPEND_KV_FROM("float16", half)
APPEND_KV_FROM("bfloat16", bfloat)
