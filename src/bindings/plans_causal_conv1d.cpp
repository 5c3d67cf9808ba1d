#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/host_metadata.h"
#include "bindings/plans.h"
#include "core/plans/causal_conv1d.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_plan_causal_conv1d(nb::module_& plans) {
  plans.def(
      "causal_conv1d",
      [](const std::string& dtype, int channels, int width, nb::handle cu_seqlens, bool bias,
         bool initial_state, bool mask, bool silu, bool aligned) {
        CausalConv1dCall call;
        call.dtype = parse_dtype("causal_conv1d", dtype);
        call.channels = channels;
        call.width = width;
        call.cu_seqlens = host_int32("causal_conv1d", "cu_seqlens", cu_seqlens).values;
        call.bias = bias;
        call.initial_state = initial_state;
        call.mask = mask;
        call.silu = silu;
        call.aligned = aligned;
        return plan_causal_conv1d(call);
      },
      "dtype"_a, "channels"_a, "width"_a, "cu_seqlens"_a, nb::kw_only(), "bias"_a = false,
      "initial_state"_a = false, "mask"_a = false, "silu"_a = false, "aligned"_a = true);
}

}  // namespace chunkdelta
