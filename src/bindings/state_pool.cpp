#include "ops/state_pool.h"

#include <nanobind/stl/pair.h>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_state_pool(nb::module_& m) {
  m.def("read_state", &read_state, "pool"_a, "slot"_a);
  m.def("write_state", &write_state, "pool"_a, "slot"_a, "value"_a);
}

}  // namespace chunkdelta
