// Stand-in: the one function that the encoder uses.
#pragma once

#include <stdexcept>

#include "mlx/backend/metal/device.h"

namespace mlx::core {

inline void check_kernel_threadgroup_size(const MTL::ComputePipelineState* kernel, MTL::Size group,
                                          const std::string& name) {
  recording::log().calls << "check " << name << "\n";
  if (group.width * group.height * group.depth > kernel->maxTotalThreadsPerThreadgroup()) {
    throw std::runtime_error("Maximum threads per threadgroup is exceeded for kernel " + name);
  }
}

}  // namespace mlx::core
