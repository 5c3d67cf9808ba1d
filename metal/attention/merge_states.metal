// Merges partial attention results over disjoint keys: with lse the natural-log sums of
// exponentials,
//
//   lse = log(sum_s exp(lse_s)),   o = sum_s exp(lse_s - lse) o_s.
#include "attention/params.h"
#include "common/fragment.h"

using namespace chunkdelta;

constant bool has_sinks [[function_constant(ATTENTION_HAS_SINKS)]];
constant bool writes_lse [[function_constant(ATTENTION_WRITES_LSE)]];
constant bool mapped [[function_constant(ATTENTION_MERGE_MAPPED)]];

// Threadgroup: (128, 1, 1), a simdgroup per (token, head). Grid: (ceil(rows / 4), 1, 1)
// threadgroups.
template <typename P, typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void merge_states(
    const device P* partial_o [[buffer(0)]],        // [partials, heads, D]
    const device float* partial_lse [[buffer(1)]],  // [partials, heads]
    const device MergeRow* merge_rows [[buffer(2), function_constant(mapped)]],  // [tokens]
    constant MergeStatesParams& params [[buffer(3)]],
    const device float* sinks [[buffer(4), function_constant(has_sinks)]],  // [heads]
    device T* out [[buffer(5)]],                                            // [tokens, heads, D]
    device float* lse [[buffer(6), function_constant(writes_lse)]],         // [tokens, heads]
    uint3 tg [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int row = int(tg.x) * 4 + int(sg);
  if (row >= params.rows) return;
  const int heads = params.heads;
  const int head_dim = params.head_dim;
  int token = row / heads;
  const int head = row - token * heads;
  int first = token;
  int count = params.count;
  int stride = params.stride;
  if (mapped) {
    const device MergeRow* map = merge_rows + token;
    token = map->token;
    first = map->first;
    count = map->count;
    stride = map->stride;
  }

  float top = -INFINITY;
  for (int s = int(lane); s < count; s += 32) {
    top = max(top, partial_lse[size_t(first + s * stride) * heads + head]);
  }
  top = simd_max(top);
  const bool empty = top == -INFINITY;  // no visible key: output 0, LSE -inf
  if (has_sinks) top = max(top, sinks[head]);
  float sum = 0;
  if (!empty) {
    for (int s = int(lane); s < count; s += 32) {
      sum += exp(partial_lse[size_t(first + s * stride) * heads + head] - top);
    }
  }
  sum = simd_sum(sum);
  if (has_sinks && !empty) sum += exp(sinks[head] - top);

  const size_t to = size_t(token) * heads + head;
  for (int d = int(lane) * 2; d < head_dim; d += 64) {
    float2 o = float2(0);
    for (int s = 0; s < count && !empty; s++) {
      const size_t at = size_t(first + s * stride) * heads + head;
      const float x = partial_lse[at];
      if (x != -INFINITY) o += load_pair(partial_o + at * head_dim + d) * exp(x - top);
    }
    store_pair(out + to * head_dim + d, empty ? o : o / sum);
  }
  if (writes_lse && lane == 0) lse[to] = empty ? -INFINITY : top + log(sum);
}

#define MERGE_STATES(NAME, ...) \
  template [[host_name(         \
      NAME)]] [[kernel]] decltype(merge_states<__VA_ARGS__>) merge_states<__VA_ARGS__>;

MERGE_STATES("merge_states_float32_to_float32", float, float)
MERGE_STATES("merge_states_float32_to_float16", float, half)
MERGE_STATES("merge_states_float32_to_bfloat16", float, bfloat)
MERGE_STATES("merge_states_float16_to_float16", half, half)
MERGE_STATES("merge_states_bfloat16_to_bfloat16", bfloat, bfloat)
