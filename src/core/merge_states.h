// Attention over the union of disjoint key sets, from the results over each.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/isa.h"

namespace chunkdelta {

struct MergeStatesOptions {
  Dtype dtype;     // of outs and o
  int64_t states;  // S
  int64_t rows;    // T * Hq
  int64_t head_dim;
};

// outs [states, rows, head_dim], lses [states, rows] (natural log) -> o [rows, head_dim], lse
// [rows]. A state with LSE -inf saw no key: its output is not read.
void merge_states(const MergeStatesOptions& options, const void* outs, const float* lses, void* o,
                  float* lse);

// Rows [begin, end).
CHUNKDELTA_DECLARE_KERNEL(void merge_rows(const MergeStatesOptions& options, const void* outs,
                                          const float* lses, void* o, float* lse, int64_t begin,
                                          int64_t end))

}  // namespace chunkdelta
