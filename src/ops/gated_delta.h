// The gated delta rule and its gates as MLX ops.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "core/gated_delta.h"
#include "mlx/primitives.h"
#include "ops/host_metadata.h"

namespace chunkdelta {

// States of a call: given and returned as arrays, or slots of a pool written in place.
struct GatedDeltaStates {
  std::optional<mx::array> initial;  // [N, Hv, Dv, Dk]
  std::optional<mx::array> pool;     // [slots, Hv, Dv, Dk], evaluated, dense
  std::optional<HostInt32> slots;    // [N], with a pool
};

// q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g, beta [B, T, Hv] -> o [B, T, Hv, Dv], the states
// [N, Hv, Dv, Dk] or the pool, and the checkpoints when asked for.
std::vector<mx::array> chunk_gated_delta_rule(
    const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& g,
    const mx::array& beta, std::optional<float> scale, const GatedDeltaStates& states,
    const std::optional<HostInt32>& cu_seqlens, const std::optional<mx::array>& mask,
    std::optional<int> checkpoint_every, bool qk_l2norm, std::optional<int> chunk_size,
    mx::StreamOrDevice stream = {});

// One token: q, k [B, Hk, Dk], v [B, Hv, Dv], g, beta [B, Hv], mask [B].
std::vector<mx::array> gated_delta_step(const mx::array& q, const mx::array& k, const mx::array& v,
                                        const mx::array& g, const mx::array& beta,
                                        std::optional<float> scale, const GatedDeltaStates& states,
                                        const std::optional<mx::array>& mask, bool qk_l2norm,
                                        mx::StreamOrDevice stream = {});

// a, b [..., Hv], A_log, dt_bias [Hv] -> float32 log gates and betas [..., Hv].
std::pair<mx::array, mx::array> gated_delta_gates(const mx::array& a, const mx::array& b,
                                                  const mx::array& a_log, const mx::array& dt_bias,
                                                  std::optional<float> lower_bound,
                                                  bool allow_neg_eigval,
                                                  mx::StreamOrDevice stream = {});

// Inputs: q, k, v, g, beta, then the mask and the states or the pool where there are. Outputs: o,
// the states or the pool (the same memory), the checkpoints where there are.
class GatedDeltaRule : public mx::Primitive {
 public:
  struct Options {
    GatedDeltaOptions core;
    std::vector<StateSequence> sequences;
    bool mask, initial_state, pooled;
    bool operator==(const Options&) const = default;
  };

  GatedDeltaRule(mx::Stream stream, Options options)
      : mx::Primitive(stream), options_(std::move(options)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "chunkdelta::GatedDeltaRule"; }
  // Two equal writes to a pool are two writes: they must never be merged.
  bool is_equivalent(const mx::Primitive& other) const override {
    return !options_.pooled && options_ == static_cast<const GatedDeltaRule&>(other).options_;
  }

 private:
  Options options_;
};

class GatedDeltaGatesOp : public mx::Primitive {
 public:
  GatedDeltaGatesOp(mx::Stream stream, float lower_bound, float beta_scale)
      : mx::Primitive(stream), lower_bound_(lower_bound), beta_scale_(beta_scale) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "chunkdelta::GatedDeltaGates"; }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape(), inputs[0].shape()};
  }

 private:
  GatedDeltaGates options(const mx::array& a) const;

  float lower_bound_, beta_scale_;
};

}  // namespace chunkdelta
