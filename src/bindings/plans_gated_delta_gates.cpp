#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <limits>

#include "bindings/bindings.h"
#include "bindings/plans.h"
#include "core/plans/gated_delta_gates.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_plan_gated_delta_gates(nb::module_& plans) {
  plans.def(
      "gated_delta_gates",
      [](const std::string& dtype, int64_t rows, int64_t heads, std::optional<float> lower_bound,
         bool allow_neg_eigval) {
        return plan_gated_delta_gates(
            {rows, heads, parse_dtype("gated_delta_gates", dtype),
             lower_bound.value_or(std::numeric_limits<float>::quiet_NaN()),
             allow_neg_eigval ? 2.0f : 1.0f});
      },
      "dtype"_a, "rows"_a, "heads"_a, nb::kw_only(), "lower_bound"_a = nb::none(),
      "allow_neg_eigval"_a = false);
}

}  // namespace chunkdelta
