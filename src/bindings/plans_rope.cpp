#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/plans.h"
#include "core/plans/rope.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_plan_rope(nb::module_& plans) {
  plans.def(
      "rope",
      [](const std::string& dtype, int64_t tokens, int heads, int head_dim,
         std::vector<float> inv_freq, std::vector<int32_t> axis, bool traditional) {
        const RopeOptions options{heads, head_dim, traditional, std::move(inv_freq),
                                  std::move(axis)};
        return plan_rope(options, parse_dtype("rope", dtype), tokens);
      },
      "dtype"_a, "tokens"_a, "heads"_a, "head_dim"_a, "inv_freq"_a, "axis"_a,
      "traditional"_a = false);
}

}  // namespace chunkdelta
