// What the attention kernels have in common: options, scores, the page table, finished rows.
#pragma once

#include "attention/params.h"
#include "common/fragment.h"
#include "common/pack.h"

using namespace chunkdelta;

constant int group_size [[function_constant(ATTENTION_GROUP_SIZE)]];
constant int page_size [[function_constant(ATTENTION_PAGE_SIZE)]];
constant bool causal [[function_constant(ATTENTION_CAUSAL)]];
constant bool has_window [[function_constant(ATTENTION_HAS_WINDOW)]];
constant bool has_softcap [[function_constant(ATTENTION_HAS_SOFTCAP)]];
constant bool has_sinks [[function_constant(ATTENTION_HAS_SINKS)]];
constant bool carries [[function_constant(ATTENTION_CARRIES)]];
constant bool k_gathered [[function_constant(ATTENTION_K_GATHERED)]];
constant bool v_gathered [[function_constant(ATTENTION_V_GATHERED)]];
constant bool writes_lse [[function_constant(ATTENTION_WRITES_LSE)]];

// Scores are in log2 units. A row's maximum before its first visible key and the score of a masked
// key are finite, so that the fast exp2 never meets an infinity; masked - none still gives 0.
constant constexpr float kNone = -1e30f;
constant constexpr float kMasked = -3e38f;
// The maximum may lag behind by 2^8 before O is rescaled: P <= 256 fits every type.
constant constexpr float kLazy = 8.0f;
constant constexpr float kLog2E = 1.44269504089f;
constant constexpr float kLn2 = 0.69314718056f;

// d += a b on fragments held as pairs.
template <typename T>
METAL_FUNC void fragment_mma(thread float2& d, vec<T, 2> a, vec<T, 2> b) {
  simdgroup_matrix<float, 8, 8> dm;
  simdgroup_matrix<T, 8, 8> am;
  simdgroup_matrix<T, 8, 8> bm;
  reinterpret_cast<thread float2&>(dm.thread_elements()) = d;
  reinterpret_cast<thread vec<T, 2>&>(am.thread_elements()) = a;
  reinterpret_cast<thread vec<T, 2>&>(bm.thread_elements()) = b;
  simdgroup_multiply_accumulate(dm, am, bm, dm);
  d = reinterpret_cast<thread float2&>(dm.thread_elements());
}

// Log2-scaled score of a raw product q k.
METAL_FUNC float2 score(float2 s, float scale, float softcap) {
  s *= scale;
  if (has_softcap) s = softcap * float2(precise::tanh(s.x), precise::tanh(s.y));
  return s;
}

// Finds the pool rows of 16-key blocks. Page numbers are read 32 at a time, one a lane, and handed
// out by shuffle; a page is a multiple of 16 keys, so a block never straddles two.
struct PageCursor {
  const device int* table;
  int first;       // the sequence's first entry
  int last;        // last entry of the table
  uint last_page;  // of the pool
  uint num_kv_heads;
  uint kv_head;
  int lane;
  int window_begin;  // pages [window_begin, window_begin + 32) of the sequence are at hand
  int window;

  // Pool row of key `key`, a multiple of 16: the row of key i in the block is i further. Rows,
  // unlike bytes, fit 32 bits in every pool.
  METAL_FUNC uint row(int key) thread {
    const int page = key / page_size;
    if (page < window_begin || page >= window_begin + 32) {
      window_begin = page;
      window = table[min(first + page + lane, last)];
    }
    const uint id = min(uint(simd_shuffle(window, ushort(page - window_begin))), last_page);
    return (id * num_kv_heads + kv_head) * uint(page_size) + uint(key - page * page_size);
  }
};

METAL_FUNC PageCursor page_cursor(
    const device int* block_table,
    int first,
    int table_length,
    int num_pages,
    int num_kv_heads,
    int kv_head,
    int lane) {
  PageCursor c;
  c.table = block_table;
  c.first = first;
  c.last = table_length - 1;
  c.last_page = uint(num_pages - 1);
  c.num_kv_heads = uint(num_kv_heads);
  c.kv_head = uint(kv_head);
  c.lane = lane;
  c.window_begin = -32;
  c.window = 0;
  return c;
}

// A row whose keys are all in: what O is multiplied by, and the natural-log LSE.
struct FinishedRow {
  float factor;
  float lse;
};

// m in log2 units; sink is the head's raw logit, with_sink whether to count it. Without a visible
// key: output 0, LSE -inf.
METAL_FUNC FinishedRow finish_row(float m, float l, float sink, bool with_sink) {
  FinishedRow r;
  r.factor = 0.0f;
  r.lse = -INFINITY;
  if (l > 0) {
    float top = m;
    float sum = l;
    float rescale = 1.0f;
    if (with_sink) {
      const float s = sink * kLog2E;
      top = max(m, s);
      rescale = exp2(m - top);
      sum = l * rescale + exp2(s - top);
    }
    r.factor = rescale / sum;
    r.lse = (top + log2(sum)) * kLn2;
  }
  return r;
}
