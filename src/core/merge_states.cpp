#include "core/merge_states.h"

#include <algorithm>

#include "core/compute.h"

namespace chunkdelta {

void merge_states(const MergeStatesOptions& options, const void* outs, const float* lses, void* o,
                  float* lse) {
  constexpr int64_t ROWS_PER_TASK = 256;
  Compute compute;
  compute.parallel_for((options.rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, [&](int64_t task, int) {
    const int64_t begin = task * ROWS_PER_TASK;
    const int64_t end = std::min(options.rows, begin + ROWS_PER_TASK);
    CHUNKDELTA_DISPATCH(merge_rows, options, outs, lses, o, lse, begin, end);
  });
}

}  // namespace chunkdelta
