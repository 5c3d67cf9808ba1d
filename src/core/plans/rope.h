// Launch plan of the rotary position embedding.
#pragma once

#include "core/launch_plan.h"
#include "core/rope.h"

namespace chunkdelta {

// Roles of the plan's buffers: x, positions (int32 [axes, tokens]), out, which may be x's memory.
// Throws std::invalid_argument on options that would address anything outside of them.
Plan plan_rope(const RopeOptions& options, Dtype dtype, int64_t tokens);

}  // namespace chunkdelta
