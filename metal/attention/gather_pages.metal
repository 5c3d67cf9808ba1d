// Gathers and decodes pages of one pool into contiguous scratch [Hkv, gathered_rows, D], once per
// segment: a flash kernel that decoded in place would do it again for each row tile, 16 to 64
// times.
#include "attention/page_codec.h"
#include "attention/params.h"

using namespace chunkdelta;

// Threadgroup: (128, 1, 1). Grid: (spans of this launch, KV heads, 1) threadgroups. Each simdgroup
// takes 16 keys of the span's 64, which lie in one page. Keys in other slabs are left to those.
template <typename T, typename Codec>
[[kernel, max_total_threads_per_threadgroup(128)]] void gather_pages(
    const device uchar* pages [[buffer(0)]],       // [slab_pages, Hkv, page_size, row bytes]
    const device int* block_table [[buffer(1)]],   // [sequences, max_pages]
    const device GatherSpan* spans [[buffer(2)]],  // those of all launches
    constant GatherPagesParams& params [[buffer(3)]],
    device T* out [[buffer(4)]],  // [Hkv, gathered_rows, D]
    uint3 tg [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const device GatherSpan* span = spans + params.first_span + int(tg.x);
  const int head_dim = params.head_dim;
  const int hkv = params.num_kv_heads;
  const int kv_head = int(tg.y);
  const int offset = int(sg) * 16;
  const int keys = min(16, span->keys - offset);
  if (keys <= 0) return;

  const int key = span->key + offset;
  const int entry = min(span->table + key / params.page_size, params.table_length - 1);
  const uint id = min(uint(block_table[entry]), uint(params.num_pages - 1));
  const uint page = id - uint(params.first_page);
  if (page >= uint(params.slab_pages)) return;  // also below first_page: the difference wraps

  const size_t pool_row =
      (size_t(page) * hkv + kv_head) * params.page_size + key % params.page_size;
  const int row_bytes = Codec::row_bytes(head_dim);
  const device uchar* from = pages + pool_row * row_bytes;
  device T* to = out + (size_t(kv_head) * params.gathered_rows + span->row + offset) * head_dim;
  const int runs = head_dim / 8;
  for (int i = int(lane); i < keys * runs; i += 32) {
    const int r = i / runs;
    const int run = i - r * runs;
    const Run8 x = Codec::decode(from + size_t(r) * row_bytes, run);
    *(device vec<T, 4>*)(to + r * head_dim + run * 8) = vec<T, 4>(x.lo);
    *(device vec<T, 4>*)(to + r * head_dim + run * 8 + 4) = vec<T, 4>(x.hi);
  }
}

#define GATHER_PAGES(NAME, ...) \
  template [[host_name(         \
      NAME)]] [[kernel]] decltype(gather_pages<__VA_ARGS__>) gather_pages<__VA_ARGS__>;

GATHER_PAGES("gather_pages_float32_to_float32", float, PlainCodec<float>)
GATHER_PAGES("gather_pages_float16_to_float32", float, PlainCodec<half>)
GATHER_PAGES("gather_pages_bfloat16_to_float32", float, PlainCodec<bfloat>)
GATHER_PAGES("gather_pages_q8_0_to_float32", float, Q80Codec)
GATHER_PAGES("gather_pages_q4_0_to_float32", float, Q40Codec)
GATHER_PAGES("gather_pages_turbo4_to_float32", float, Turbo4Codec)
GATHER_PAGES("gather_pages_float32_to_float16", half, PlainCodec<float>)
GATHER_PAGES("gather_pages_float16_to_float16", half, PlainCodec<half>)
GATHER_PAGES("gather_pages_bfloat16_to_float16", half, PlainCodec<bfloat>)
GATHER_PAGES("gather_pages_q8_0_to_float16", half, Q80Codec)
GATHER_PAGES("gather_pages_q4_0_to_float16", half, Q40Codec)
GATHER_PAGES("gather_pages_turbo4_to_float16", half, Turbo4Codec)
GATHER_PAGES("gather_pages_float32_to_bfloat16", bfloat, PlainCodec<float>)
GATHER_PAGES("gather_pages_float16_to_bfloat16", bfloat, PlainCodec<half>)
GATHER_PAGES("gather_pages_bfloat16_to_bfloat16", bfloat, PlainCodec<bfloat>)
GATHER_PAGES("gather_pages_q8_0_to_bfloat16", bfloat, Q80Codec)
GATHER_PAGES("gather_pages_q4_0_to_bfloat16", bfloat, Q40Codec)
GATHER_PAGES("gather_pages_turbo4_to_bfloat16", bfloat, Turbo4Codec)
