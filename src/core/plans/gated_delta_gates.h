// Launch plan of the gates of the gated delta rule.
#pragma once

#include "core/gated_delta.h"
#include "core/launch_plan.h"

namespace chunkdelta {

// Roles of the plan's buffers: a, b, A_log, dt_bias, g, beta.
// Throws std::invalid_argument above 2^32 - 1 elements.
Plan plan_gated_delta_gates(const GatedDeltaGates& options);

}  // namespace chunkdelta
