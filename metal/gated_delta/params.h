// Arguments of the gated delta kernels, shared by src/core/plans/gated_delta.cpp and the shaders.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Function constants.
#define GATED_DELTA_SIMDGROUPS 200   // int: simdgroups per threadgroup of scan and sequential
#define GATED_DELTA_HEAD_K_DIM 201   // int: Dk, at most the kernel's own
#define GATED_DELTA_HEAD_V_DIM 202   // int: Dv
#define GATED_DELTA_HAS_MASK 203     // bool
#define GATED_DELTA_HAS_INITIAL 204  // bool: an initial state apart from the states written
#define GATED_DELTA_CHECKPOINTS 205  // bool
#define GATED_DELTA_VECTORS 207      // bool: rows of q, k and v can be read as vectors of 4
#define GATED_DELTA_QK_L2NORM 206    // bool

namespace chunkdelta {

// A chunk of at most 16 consecutive rows of one sequence, for prep.
struct GatedDeltaChunk {
  int32_t row;   // first row in q, k, v, g, beta, o
  int32_t rows;  // how many; the rest of the chunk is identity steps
};

// Where a sequence's state comes from.
enum GatedDeltaSource { kGatedDeltaZeros = 0, kGatedDeltaInitial = 1, kGatedDeltaState = 2 };

// A sequence, or that part of it which one launch covers.
struct GatedDeltaSequence {
  int32_t row;         // first row in q, k, v, g, beta, o
  int32_t rows;        // rows of this launch; 0 only hands the state on
  int32_t chunk;       // its first chunk in prep's output
  int32_t source;      // GatedDeltaSource
  int32_t initial;     // index into initial_state, for kGatedDeltaInitial
  int32_t state;       // index into state: written, and read for kGatedDeltaState
  int32_t checkpoint;  // index of the next checkpoint
  int32_t until;       // rows to it
};

// Where row r of head h begins, in elements: r row + h head. Its elements are `element` apart,
// which only kernels without GATED_DELTA_VECTORS look at.
struct GatedDeltaStrides {
  int32_t row;
  int32_t head;
  int32_t element;
};

struct GatedDeltaParams {
  int32_t num_v_heads;
  int32_t group_size;  // value heads per key head
  GatedDeltaStrides q;
  GatedDeltaStrides k;
  GatedDeltaStrides v;
  float scale;
  float l2norm_eps;
  int32_t checkpoint_every;
};

}  // namespace chunkdelta
