// The gated delta rule on the CPU, chunk-parallel and step by step.
//
//   S_t = exp(g_t) S_{t-1};  S_t += beta_t k_t (v_t - S_t^T k_t)^T;  o_t = scale S_t^T q_t
//
// (Yang et al., "Gated Delta Networks", arXiv 2412.06464.) States are float32 [Hv, Dv, Dk], value
// first; value head hv reads key head hv / (Hv / Hk).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace chunkdelta {

constexpr int GATED_DELTA_MAX_HEAD_DIM = 256;
constexpr float GATED_DELTA_MIN_LOG_GATE = -128.0f;  // exp of it is 0 in fp32; -inf would give NaN
constexpr float GATED_DELTA_L2NORM_EPS = 1e-6f;      // added to the sum of squares

// Rows of a chunk. Tokens/s of one core (Zen 4, Hk 16, Hv 32, D 128, T 2048, fp32 | bf16):
//            16              32              64
//   avx512   21400 | 22100   21700 | 22000   20100 | 20200
//   avx2     17700 | 24700   16000 | 22000   14700 | 19800   (T 512)
// and 16 is the most exact: at beta 1.99 with near-repeated keys 1.2e-5, against 1.7e-5 and 2.5e-5.
constexpr int GATED_DELTA_DEFAULT_CHUNK = 16;

// What a call computes, apart from where its arrays lie. Shared by the CPU and the Metal path.
struct GatedDeltaOptions {
  int64_t key_heads, value_heads;
  int64_t key_dim, value_dim;  // multiples of 4, at most GATED_DELTA_MAX_HEAD_DIM
  Dtype dtype;                 // of q, k, v and o
  Dtype beta_dtype;
  float scale;               // of q, after its normalisation
  bool qk_l2norm;            // divide each row of q and k by sqrt(sum of squares + 1e-6)
  int chunk_size;            // rows of a chunk: 16, 32 or 64
  int64_t checkpoint_every;  // a state copy after every so many rows of a sequence; 0: none

  bool operator==(const GatedDeltaOptions&) const = default;
};

// One sequence of a call. Its rows are [row, row + length) of the arrays' flat row axis B * T, its
// checkpoints [checkpoint, checkpoint + length / checkpoint_every) of that output.
struct StateSequence {
  int64_t row, length;
  int64_t state_in;   // index into the states read, -1: starts from zero
  int64_t state_out;  // index into the states written
  int64_t checkpoint;

  bool operator==(const StateSequence&) const = default;
};

// A strided [B, T, H, D] array: element (b, t, h, i) at b * batch + t * token + h * head + i *
// element.
struct Rows {
  const void* data;
  int64_t batch, token, head, element;  // strides in elements
};

struct GatedDeltaArrays {
  int64_t rows_per_batch;  // T
  Rows q, k, v;            // [B, T, H, D]
  Rows g, beta;            // [B, T, Hv]; g float32 log gates
  Rows mask;               // [B, T] bool, data null: all rows count
  void* o;                 // [B, T, Hv, Dv], dense
  const float* states_in;  // [*, Hv, Dv, Dk], dense; may be states_out (a pool)
  float* states_out;
  float* checkpoints;  // [*, Hv, Dv, Dk]
};

// Runs all sequences. Bit-identical for any number of threads.
void gated_delta(const GatedDeltaOptions& options, const GatedDeltaArrays& arrays,
                 const std::vector<StateSequence>& sequences);

// Bytes of core's persistent workspace (core/compute.h) that such a call takes with the pool's
// number of threads: one shared block, and one block for each worker.
struct GatedDeltaWorkspace {
  int64_t shared, per_worker;
};
GatedDeltaWorkspace gated_delta_workspace(const GatedDeltaOptions& options,
                                          const std::vector<StateSequence>& sequences);

// Which kernels such a call takes, and a sentence that says why.
struct GatedDeltaChoice {
  std::string kernels, why;
};
GatedDeltaChoice gated_delta_choice(const GatedDeltaOptions& options,
                                    const std::vector<StateSequence>& sequences);

// g = -exp(A_log) softplus(a + dt_bias), or lower_bound sigmoid(exp(A_log) (a + dt_bias)) when
// lower_bound is finite; beta = beta_scale sigmoid(b). a, b [rows, heads] dense, the rest [heads].
struct GatedDeltaGates {
  int64_t rows, heads;
  Dtype dtype;        // of a and b
  float lower_bound;  // NaN: none
  float beta_scale;   // 1, or 2 with negative eigenvalues
};
void gated_delta_gates(const GatedDeltaGates& options, const void* a, const void* b,
                       const float* a_log, const float* dt_bias, float* g, float* beta);

}  // namespace chunkdelta
