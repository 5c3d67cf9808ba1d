#include "core/rope.h"

#include <algorithm>
#include <cmath>

#include "core/compute.h"

namespace chunkdelta {

void rope(const RopeOptions& options, Dtype dtype, int64_t tokens, const void* x,
          const int32_t* positions, void* out) {
  constexpr int64_t TOKENS_PER_TASK = 16;
  const int pairs = static_cast<int>(options.inv_freq.size());
  const int64_t token_bytes = int64_t(options.heads) * options.head_dim * size_of(dtype);
  Compute compute;
  compute.parallel_for((tokens + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK, [&](int64_t task,
                                                                             int worker) {
    float* cosines =
        static_cast<float*>(compute.worker_workspace(worker, 2 * pairs * sizeof(float)));
    float* sines = cosines + pairs;
    const int64_t end = std::min(tokens, (task + 1) * TOKENS_PER_TASK);
    for (int64_t t = task * TOKENS_PER_TASK; t < end; t++) {
      for (int i = 0; i < pairs; i++) {
        // In double: at position 131,072 a fp32 product is off by 4e-3 radians. Shared by all
        // heads.
        const double angle = double(positions[options.axis[i] * tokens + t]) * options.inv_freq[i];
        cosines[i] = static_cast<float>(std::cos(angle));
        sines[i] = static_cast<float>(std::sin(angle));
      }
      CHUNKDELTA_DISPATCH(rope_token, options, dtype, static_cast<const char*>(x) + t * token_bytes,
                          cosines, sines, static_cast<char*>(out) + t * token_bytes);
    }
  });
}

}  // namespace chunkdelta
