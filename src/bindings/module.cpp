#include "bindings/bindings.h"
#include "mlx/version.h"

namespace nb = nanobind;

NB_MODULE(_ext, m) {
  // mx.array, mx.Stream ... must be registered before an argument is converted.
  nb::module_::import_("mlx.core");
  m.attr("MLX_VERSION_NUMERIC") = MLX_VERSION_NUMERIC;
  chunkdelta::bind_attention(m);
  chunkdelta::bind_causal_conv1d(m);
  chunkdelta::bind_compute(m);
  chunkdelta::bind_gated_delta(m);
  chunkdelta::bind_rope(m);
  chunkdelta::bind_state_pool(m);

  // After the ops: launch plans, for tests/metal_host and explain.
  nb::module_ plans = m.def_submodule("plans", "Launch plans of the GPU ops, as plain data.");
  chunkdelta::bind_plans(plans);
  chunkdelta::bind_plan_append_kv(plans);
  chunkdelta::bind_plan_causal_conv1d(plans);
  chunkdelta::bind_plan_paged_attention(plans);
  chunkdelta::bind_plan_gated_delta(plans);
  chunkdelta::bind_plan_gated_delta_gates(plans);
  chunkdelta::bind_plan_rope(plans);
}
