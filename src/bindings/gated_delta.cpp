#include "ops/gated_delta.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/host_metadata.h"
#include "core/compute.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_gated_delta(nb::module_& m) {
  m.def(
      "chunk_gated_delta_rule",
      [](const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& g,
         const mx::array& beta, std::optional<float> scale,
         const std::optional<mx::array>& initial_state, nb::handle cu_seqlens,
         const std::optional<mx::array>& mask, const std::optional<mx::array>& pool,
         nb::handle state_indices, std::optional<int> checkpoint_every, bool qk_l2norm,
         std::optional<int> chunk_size, mx::StreamOrDevice stream) {
        constexpr auto op = "chunk_gated_delta_rule";
        const GatedDeltaStates states{initial_state, pool,
                                      optional_host_int32(op, "state_indices", state_indices)};
        return chunk_gated_delta_rule(q, k, v, g, beta, scale, states,
                                      optional_host_int32(op, "cu_seqlens", cu_seqlens), mask,
                                      checkpoint_every, qk_l2norm, chunk_size, stream);
      },
      "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "scale"_a.none(), "initial_state"_a.none(),
      "cu_seqlens"_a.none(), "mask"_a.none(), "pool"_a.none(), "state_indices"_a.none(),
      "checkpoint_every"_a.none(), "qk_l2norm"_a, "chunk_size"_a.none(), "stream"_a.none());
  m.def(
      "gated_delta_step",
      [](const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& g,
         const mx::array& beta, std::optional<float> scale,
         const std::optional<mx::array>& initial_state, const std::optional<mx::array>& mask,
         const std::optional<mx::array>& pool, nb::handle state_indices, bool qk_l2norm,
         mx::StreamOrDevice stream) {
        const GatedDeltaStates states{
            initial_state, pool,
            optional_host_int32("gated_delta_step", "state_indices", state_indices)};
        return gated_delta_step(q, k, v, g, beta, scale, states, mask, qk_l2norm, stream);
      },
      "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "scale"_a.none(), "initial_state"_a.none(),
      "mask"_a.none(), "pool"_a.none(), "state_indices"_a.none(), "qk_l2norm"_a, "stream"_a.none());
  m.def(
      "gated_delta_gates",
      [](const mx::array& a, const mx::array& b, const mx::array& a_log, const mx::array& dt_bias,
         std::optional<float> lower_bound, bool allow_neg_eigval, mx::StreamOrDevice stream) {
        return gated_delta_gates(a, b, a_log, dt_bias, lower_bound, allow_neg_eigval, stream);
      },
      "a"_a, "b"_a, "A_log"_a, "dt_bias"_a, "lower_bound"_a.none(), "allow_neg_eigval"_a,
      "stream"_a.none());
  m.def(
      "explain_gated_delta",
      [](int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
         const std::vector<int64_t>& lengths, int chunk_size, int64_t checkpoint_every) {
        GatedDeltaOptions options{};
        options.key_heads = key_heads;
        options.value_heads = value_heads;
        options.key_dim = key_dim;
        options.value_dim = value_dim;
        options.chunk_size = chunk_size;
        options.checkpoint_every = checkpoint_every;
        std::vector<StateSequence> sequences;
        for (int64_t length : lengths) sequences.push_back({0, length, -1, 0, 0});
        const GatedDeltaChoice choice = gated_delta_choice(options, sequences);
        const GatedDeltaWorkspace bytes = gated_delta_workspace(options, sequences);
        return std::tuple(choice.kernels, choice.why,
                          bytes.shared + num_threads() * bytes.per_worker);
      },
      "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a, "lengths"_a, "chunk_size"_a,
      "checkpoint_every"_a);
  m.def(
      "gated_delta_workspace",
      [](int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
         const std::vector<int64_t>& lengths, int chunk_size) {
        GatedDeltaOptions options{};
        options.key_heads = key_heads;
        options.value_heads = value_heads;
        options.key_dim = key_dim;
        options.value_dim = value_dim;
        options.chunk_size = chunk_size;
        std::vector<StateSequence> sequences;
        for (int64_t length : lengths) sequences.push_back({0, length, -1, 0, 0});
        const GatedDeltaWorkspace bytes = gated_delta_workspace(options, sequences);
        return std::pair(bytes.shared, bytes.per_worker);
      },
      "key_heads"_a, "value_heads"_a, "key_dim"_a, "value_dim"_a, "lengths"_a,
      "chunk_size"_a = GATED_DELTA_DEFAULT_CHUNK);
  m.attr("GATED_DELTA_DEFAULT_CHUNK") = GATED_DELTA_DEFAULT_CHUNK;
}

}  // namespace chunkdelta
