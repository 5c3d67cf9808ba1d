#include "core/plans/gated_delta_gates.h"

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "gated_delta/gates_params.h"

namespace chunkdelta {

Plan plan_gated_delta_gates(const GatedDeltaGates& options) {
  constexpr int64_t THREADS = 256, MOST = std::numeric_limits<uint32_t>::max() - THREADS;
  if (options.heads < 1 || options.rows < 0 || options.rows > MOST / options.heads) {
    throw std::invalid_argument(
        "[gated_delta_gates] expected heads >= 1 and fewer than 2^32 elements; got " +
        std::to_string(options.rows) + " rows of " + std::to_string(options.heads));
  }
  Plan plan;
  plan.op = "gated_delta_gates";
  plan.why = "a thread per row and head, in fp32";
  const int64_t count = options.rows * options.heads;
  if (count == 0) return plan;
  const bool bounded = !std::isnan(options.lower_bound);
  Launch launch;
  launch.source = "gated_delta/gates";
  launch.kernel = "gated_delta_gates_" + std::string(dtype_name(options.dtype));
  launch.constants = {{GATED_DELTA_GATES_BOUNDED, bounded}};
  launch.buffers = {{0, "a", Access::Read},     {1, "b", Access::Read},
                    {2, "A_log", Access::Read}, {3, "dt_bias", Access::Read},
                    {4, "g", Access::Write},    {5, "beta", Access::Write}};
  launch.params = {{6, to_bytes(GatedDeltaGatesParams{
                           static_cast<uint32_t>(count), static_cast<uint32_t>(options.heads),
                           bounded ? options.lower_bound : 0.0f, options.beta_scale})}};
  launch.grid = {static_cast<uint32_t>((count + THREADS - 1) / THREADS), 1, 1};
  launch.threadgroup = {THREADS, 1, 1};
  plan.launches.push_back(std::move(launch));
  return plan;
}

}  // namespace chunkdelta
