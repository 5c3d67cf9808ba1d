#include "ops/rope.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_rope(nb::module_& m) {
  m.def(
      "rope",
      static_cast<mx::array (*)(const mx::array&, const mx::array&, const std::vector<float>&, bool,
                                const std::optional<std::vector<int>>&, bool, mx::StreamOrDevice)>(
          &rope),
      "x"_a, "positions"_a, "inv_freq"_a, "traditional"_a, "mrope_sections"_a.none(),
      "mrope_interleaved"_a, "stream"_a = nb::none());
}

}  // namespace chunkdelta
