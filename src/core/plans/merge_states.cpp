#include "core/plans/merge_states.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace chunkdelta {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kRows = kThreads / 32;  // a simdgroup per row

}  // namespace

Launch merge_states_launch(Dtype partial_dtype, Dtype dtype, const MergeStatesParams& params,
                           bool mapped, bool sinks, bool writes_lse) {
  Launch launch;
  launch.source = "attention/merge_states";
  launch.kernel = "merge_states_" + std::string(dtype_name(partial_dtype)) + "_to_" +
                  std::string(dtype_name(dtype));
  launch.constants = {{ATTENTION_HAS_SINKS, sinks},
                      {ATTENTION_WRITES_LSE, writes_lse},
                      {ATTENTION_MERGE_MAPPED, mapped}};
  launch.params = {{3, to_bytes(params)}};
  launch.grid = {uint32_t((params.rows + kRows - 1) / kRows), 1, 1};
  launch.threadgroup = {uint32_t(kThreads), 1, 1};
  return launch;
}

Plan plan_merge_states(const MergeStatesCall& call) {
  const int64_t rows = int64_t(call.tokens) * call.heads;
  if (call.head_dim % 2 != 0) {
    throw std::invalid_argument("[merge_states] expected an even head_dim; got " +
                                std::to_string(call.head_dim));
  }
  if (rows > std::numeric_limits<int32_t>::max() - kRows ||
      int64_t(call.splits) * call.tokens > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument(
        "[merge_states] expected tokens * heads and splits * tokens < 2^31; got " +
        std::to_string(call.splits) + " splits, " + std::to_string(call.tokens) + " tokens and " +
        std::to_string(call.heads) + " heads");
  }
  Plan plan;
  plan.op = "merge_states";
  plan.why = "one pass over the partial results, a simdgroup per row";
  if (rows == 0) return plan;
  MergeStatesParams params{};
  params.head_dim = call.head_dim;
  params.count = call.splits;
  params.stride = call.tokens;
  params.heads = call.heads;
  params.rows = int32_t(rows);
  Launch launch = merge_states_launch(call.dtype, call.dtype, params, false, false, true);
  launch.buffers = {{0, "outs", Access::Read},
                    {1, "lses", Access::Read},
                    {5, "o", Access::Write},
                    {6, "lse", Access::Write}};
  plan.launches.push_back(std::move(launch));
  return plan;
}

}  // namespace chunkdelta
