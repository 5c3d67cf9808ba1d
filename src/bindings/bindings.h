// One bind function per op, defined in bindings/<op>.cpp and called by module.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace chunkdelta {

void bind_attention(nanobind::module_& m);
void bind_causal_conv1d(nanobind::module_& m);
void bind_compute(nanobind::module_& m);
void bind_gated_delta(nanobind::module_& m);
void bind_rope(nanobind::module_& m);
void bind_state_pool(nanobind::module_& m);

// Into the submodule `plans`: the plan types, then one function per op (bindings/plans_<op>.cpp).
void bind_plans(nanobind::module_& plans);
void bind_plan_append_kv(nanobind::module_& plans);
void bind_plan_causal_conv1d(nanobind::module_& plans);
void bind_plan_paged_attention(nanobind::module_& plans);
void bind_plan_gated_delta(nanobind::module_& plans);
void bind_plan_gated_delta_gates(nanobind::module_& plans);
void bind_plan_rope(nanobind::module_& plans);

}  // namespace chunkdelta
