// Softmax attention of packed queries over keys and values in pages, on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/page_format.h"

namespace chunkdelta {

struct PagedAttentionOptions {
  Dtype dtype;  // of q and o
  int num_q_heads, num_kv_heads, head_dim, page_size;
  PageFormat k_format, v_format;
  float scale;
  bool causal;
  int window;     // 0: none; otherwise a query sees the last `window` keys, its own included
  float softcap;  // 0: none
  bool sinks, return_lse;
};

// The host metadata of one batch, checked by value once (ops/paged_attention.h) and shared by the
// layers. Every page of a key is a valid id; the greatest is max_page.
struct AttentionMetadata {
  int page_size, max_pages;
  std::vector<int32_t> block_table;  // [sequences, max_pages]
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> cu_seqlens_q;
  int32_t max_page;
};

// The slabs of a pool: slab i holds pages [first_page[i], first_page[i + 1]).
struct PageSlabs {
  std::vector<const void*> k, v;
  std::vector<int64_t> first_page;
};

// q, o [cu_seqlens_q.back(), num_q_heads, head_dim]; sinks [num_q_heads] or null; lse [tokens,
// num_q_heads] or null. The result has the same bits for any number of threads.
void paged_attention(const PagedAttentionOptions& options, const AttentionMetadata& metadata,
                     const PageSlabs& pages, const void* q, const float* sinks, void* o,
                     float* lse);

// Bytes that this call takes of core's persistent workspace (core/compute.h) with `threads`
// workers.
int64_t paged_attention_workspace(const PagedAttentionOptions& options,
                                  const std::vector<int32_t>& seq_lens,
                                  const std::vector<int32_t>& cu_seqlens_q, int threads);

}  // namespace chunkdelta
