// Launch plan of paged attention: which kernels of metal/attention run, on what keys, and why.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/launch_plan.h"
#include "core/page_format.h"

namespace chunkdelta {

// What one launch may cost. The model is that of docs/performance/attention_tiles.md for an M1 with
// 8 cores, the slowest Apple GPU that MLX supports: 2.6 TFLOP/s of which 80 % are reached, 68 GB/s
// of which 80 % are reached. A GPU watchdog kills dispatches of a second or so, and the display
// stalls long before.
struct PagedAttentionBudget {
  double milliseconds = 10.0;
  double flops_per_millisecond = 2.08e9;
  double bytes_per_millisecond = 54e6;
  int64_t gathered_bytes = 32 << 20;  // scratch for dequantised K and V of a segment
};

struct PagedAttentionCall {
  Dtype dtype = Dtype::bf16;  // of q and o
  int32_t num_q_heads = 1;    // q, o [tokens, num_q_heads, head_dim]
  int32_t num_kv_heads = 1;
  int32_t head_dim = 128;
  int32_t page_size = 64;
  PageFormat k_format = PageFormat::bf16;
  PageFormat v_format = PageFormat::bf16;
  std::vector<int32_t> slab_pages;    // pages of each slab; page ids run on from slab to slab
  std::vector<int32_t> block_table;   // [sequences, max_pages], -1 where unused
  std::vector<int32_t> seq_lens;      // [sequences]
  std::vector<int32_t> cu_seqlens_q;  // [sequences + 1]
  float scale = 1.0f;
  bool causal = true;
  int32_t window = 0;    // 0: none; otherwise a query sees the last `window` keys, its own included
  float softcap = 0.0f;  // 0: none
  bool sinks = false;
  bool return_lse = false;
  PagedAttentionBudget budget;
  int32_t gpu_cores = 8;  // decides only how far decode splits its keys
};

// Roles of the plan's buffers: q, k_pages, v_pages (slab i > 0: k_pages.i, v_pages.i), sinks, o,
// lse. Page numbers outside the pool are clamped by the kernels; a pool of 2^32 rows or more, or
// shapes that do not fit the index types, throw std::invalid_argument.
Plan plan_paged_attention(const PagedAttentionCall& call);

// Queries per sequence up to which the decode kernel runs.
constexpr int32_t kDecodeQueries = 8;

}  // namespace chunkdelta
