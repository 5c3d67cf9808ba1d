// Launch plan of the gated delta rule: which kernels of metal/gated_delta run, on what, and why.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/launch_plan.h"

namespace chunkdelta {

// Elements from token to token, from head to head, from element to element of q, k or v.
struct GatedDeltaView {
  int64_t token, head, element;
};

struct GatedDeltaCall {
  Dtype dtype = Dtype::f32;  // of q, k, v and o; g, beta and states are float32
  int32_t batch = 1;         // q, k [batch, tokens, num_k_heads, head_k_dim]
  int32_t tokens = 0;        // v, o [batch, tokens, num_v_heads, head_v_dim]
  int32_t num_k_heads = 1;
  int32_t num_v_heads = 1;
  int32_t head_k_dim = 128;  // 1..256: a kernel for the next of 64, 96, 128, 192, 256 runs it
  int32_t head_v_dim = 128;

  // Where q, k or v is no dense array. In all, token t of batch b is row b * tokens + t.
  std::optional<GatedDeltaView> q, k, v;
  bool aligned = true;  // q, k and v begin at a multiple of 4 elements

  float scale = 1.0f;
  bool qk_l2norm = false;  // x / sqrt(sum x^2 + l2norm_eps) on q and k, in fp32
  float l2norm_eps = 1e-6f;
  bool mask = false;                   // bool [batch, tokens]; false: an identity step, output 0
  std::vector<int32_t> cu_seqlens;     // [N+1] over the tokens of batch 1; empty: N = batch
  bool initial_state = false;          // float32 [N, num_v_heads, head_v_dim, head_k_dim]
  bool pooled = false;                 // states live in a pool, read and written in place
  std::vector<int32_t> state_indices;  // [N] slots, pooled only
  int32_t num_slots = 0;
  int32_t checkpoint_every = 0;  // 0: none

  // Prep and scan take the prompt in segments whose scratch fits this (one chunk always runs).
  int64_t scratch_bytes = int64_t(16) << 20;

  int32_t gpu_cores = 8;  // the smallest Apple GPU; more only changes the tile
};

// Roles of the plan's buffers: q, k, v, g, beta, mask, initial_state, state (the final states, or
// the pool), o, checkpoints.
// Throws std::invalid_argument on metadata that would address anything outside of them.
Plan plan_gated_delta(const GatedDeltaCall& call);

// How scan divides the value columns among simdgroups.
struct GatedDeltaTile {
  int32_t columns;     // of a simdgroup: 8 or 16
  int32_t simdgroups;  // of a threadgroup
  const char* reason;
};
GatedDeltaTile gated_delta_tile(int32_t head_k_dim, int32_t head_v_dim, int64_t heads,
                                int32_t gpu_cores);

// Sequences up to this long take the sequential kernel.
extern const int32_t kGatedDeltaSequentialTokens;

// The checkpoints of the call: sum over the sequences of floor(length / checkpoint_every).
int64_t gated_delta_num_checkpoints(const GatedDeltaCall& call);

}  // namespace chunkdelta
