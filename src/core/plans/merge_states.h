// Launch plan of merge_states: partial attention results over disjoint keys into one.
#pragma once

#include <cstdint>

#include "attention/params.h"
#include "core/dtype.h"
#include "core/launch_plan.h"

namespace chunkdelta {

struct MergeStatesCall {
  Dtype dtype = Dtype::bf16;  // of outs and o
  int32_t splits = 1;  // outs [splits, tokens, heads, head_dim], lses [splits, tokens, heads]
  int32_t tokens = 0;  // o [tokens, heads, head_dim], lse [tokens, heads]
  int32_t heads = 1;
  int32_t head_dim = 128;
};

// Roles of the plan's buffers: outs, lses, o, lse.
// Throws std::invalid_argument on an odd head_dim and on shapes past the index types.
Plan plan_merge_states(const MergeStatesCall& call);

// The launch, without buffers: partials in `partial_dtype` (dtype, or float32) of rows (token,
// head).
Launch merge_states_launch(Dtype partial_dtype, Dtype dtype, const MergeStatesParams& params,
                           bool mapped, bool sinks, bool writes_lse);

}  // namespace chunkdelta
