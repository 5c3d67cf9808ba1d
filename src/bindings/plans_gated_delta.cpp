#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/plans.h"
#include "core/plans/gated_delta.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

using View = std::optional<std::array<int64_t, 3>>;  // strides of token, head, element

void bind_plan_gated_delta(nb::module_& plans) {
  const GatedDeltaCall defaults;
  plans.def(
      "gated_delta",
      [](const std::string& dtype, int32_t batch, int32_t tokens, int32_t num_k_heads,
         int32_t num_v_heads, int32_t head_k_dim, int32_t head_v_dim, const View& q, const View& k,
         const View& v, bool aligned, float scale, bool qk_l2norm, float l2norm_eps, bool mask,
         std::vector<int32_t> cu_seqlens, bool initial_state, bool pooled,
         std::vector<int32_t> state_indices, int32_t num_slots, int32_t checkpoint_every,
         int64_t scratch_bytes, int32_t gpu_cores) {
        GatedDeltaCall call;
        call.dtype = parse_dtype("chunk_gated_delta_rule", dtype);
        call.batch = batch;
        call.tokens = tokens;
        call.num_k_heads = num_k_heads;
        call.num_v_heads = num_v_heads;
        call.head_k_dim = head_k_dim;
        call.head_v_dim = head_v_dim;
        if (q) call.q = {(*q)[0], (*q)[1], (*q)[2]};
        if (k) call.k = {(*k)[0], (*k)[1], (*k)[2]};
        if (v) call.v = {(*v)[0], (*v)[1], (*v)[2]};
        call.aligned = aligned;
        call.scale = scale;
        call.qk_l2norm = qk_l2norm;
        call.l2norm_eps = l2norm_eps;
        call.mask = mask;
        call.cu_seqlens = std::move(cu_seqlens);
        call.initial_state = initial_state;
        call.pooled = pooled;
        call.state_indices = std::move(state_indices);
        call.num_slots = num_slots;
        call.checkpoint_every = checkpoint_every;
        call.scratch_bytes = scratch_bytes;
        call.gpu_cores = gpu_cores;
        return plan_gated_delta(call);
      },
      nb::kw_only(), "dtype"_a, "batch"_a = defaults.batch, "tokens"_a, "num_k_heads"_a,
      "num_v_heads"_a, "head_k_dim"_a, "head_v_dim"_a, "q"_a = nb::none(), "k"_a = nb::none(),
      "v"_a = nb::none(), "aligned"_a = defaults.aligned, "scale"_a,
      "qk_l2norm"_a = defaults.qk_l2norm, "l2norm_eps"_a = defaults.l2norm_eps,
      "mask"_a = defaults.mask, "cu_seqlens"_a = defaults.cu_seqlens,
      "initial_state"_a = defaults.initial_state, "pooled"_a = defaults.pooled,
      "state_indices"_a = defaults.state_indices, "num_slots"_a = defaults.num_slots,
      "checkpoint_every"_a = defaults.checkpoint_every, "scratch_bytes"_a = defaults.scratch_bytes,
      "gpu_cores"_a = defaults.gpu_cores);
}

}  // namespace chunkdelta
