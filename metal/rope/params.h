// Arguments of the rope kernel, shared by src/core/plans/rope.cpp and the shader.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Function constants.
#define ROPE_TRADITIONAL 500  // bool: pairs (2 i, 2 i + 1) instead of (i, i + pairs)

#define ROPE_GROUP_HEADS 4  // heads of one simdgroup

namespace chunkdelta {

// How a pair of columns turns.
struct RopePair {
  uint32_t turn_low;  // turns a position, in units of 2^-64; whole turns wrap away
  uint32_t turn_high;
  int32_t axis;  // the row of positions that it follows
};

struct RopeParams {
  int32_t tokens;
  int32_t heads;
  int32_t head_dim;
  int32_t pairs;  // columns 2 * pairs and on are copied
};

}  // namespace chunkdelta
