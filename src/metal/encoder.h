// Executes launch plans on the GPU through MLX's command encoder. All decisions are the plan's.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/launch_plan.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace chunkdelta {

// The arrays of an op by role; outputs have their memory already.
using PlanArrays = std::vector<std::pair<std::string, mlx::core::array>>;

// While one exists, encode_plan on its thread hands plans over to it and encodes nothing: what an
// op would do on a GPU, for tests and on any machine.
class PlanCapture {
 public:
  PlanCapture();
  ~PlanCapture();
  PlanCapture(const PlanCapture&) = delete;
  PlanCapture& operator=(const PlanCapture&) = delete;

  std::vector<std::pair<Plan, PlanArrays>> plans;

 private:
  PlanCapture* outer_;
};

// Orders a reader of a pool and the next writer. MLX orders dispatches of one encoder whichever way
// they share a buffer, but encoders only where one reads what another wrote: not where it
// overwrites what another reads. So a reader signals a token, an output without a role, for which
// the writer waits.
struct PlanOrder {
  std::vector<mlx::core::array> waits = {};
  std::vector<mlx::core::array> signals = {};
};

// Encodes all launches of `plan` on `stream`'s command buffer, from eval_gpu. Scratch and host data
// are temporaries of that buffer. Throws std::runtime_error in a build without Metal.
void encode_plan(const Plan& plan, const PlanArrays& arrays, mlx::core::Stream stream,
                 const PlanOrder& order = {});

// Whether kernels may read `a` four elements at a time: a view into an array may begin anywhere.
inline bool starts_at_vector(const mlx::core::array& a) {
  return a.offset() % (4 * static_cast<int64_t>(a.itemsize())) == 0;
}

// GPU cores that plans may count on. Metal does not tell: this is the smallest count that Apple
// sells with the device's architecture suffix (g: base, s: Pro, c: Max, d: Ultra, p: phone).
int gpu_cores(mlx::core::Stream stream);

}  // namespace chunkdelta
