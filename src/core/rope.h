// Rotary position embedding with one position per token (and per axis, for M-RoPE).
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/isa.h"

namespace chunkdelta {

struct RopeOptions {
  int heads, head_dim;
  bool traditional;             // pairs (2i, 2i+1) instead of (i, i + dims/2)
  std::vector<float> inv_freq;  // [dims / 2], radians a position
  std::vector<int32_t> axis;    // [dims / 2], which row of positions turns pair i
};

// x, out [tokens, heads, head_dim]; positions [axes, tokens]. Columns past dims are copied.
void rope(const RopeOptions& options, Dtype dtype, int64_t tokens, const void* x,
          const int32_t* positions, void* out);

// cos and sin of one token's angles -> rotates its heads.
CHUNKDELTA_DECLARE_KERNEL(void rope_token(const RopeOptions& options, Dtype dtype, const void* x,
                                          const float* cosines, const float* sines, void* out))

}  // namespace chunkdelta
