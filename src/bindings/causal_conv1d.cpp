#include "ops/causal_conv1d.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/variant.h>

#include "bindings/bindings.h"
#include "bindings/host_metadata.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_causal_conv1d(nb::module_& m) {
  m.def(
      "causal_conv1d",
      [](const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias,
         const std::optional<mx::array>& initial_state, nb::handle cu_seqlens,
         const std::optional<mx::array>& mask, bool silu, mx::StreamOrDevice stream) {
        return causal_conv1d(x, weight, bias, initial_state,
                             optional_host_int32("causal_conv1d", "cu_seqlens", cu_seqlens), mask,
                             silu, stream);
      },
      "x"_a, "weight"_a, "bias"_a.none(), "initial_state"_a.none(), "cu_seqlens"_a.none(),
      "mask"_a.none(), "silu"_a, "stream"_a.none());
}

}  // namespace chunkdelta
