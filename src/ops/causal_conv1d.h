// Depthwise causal convolution over time with carried state
// (python/chunkdelta/ops/causal_conv1d.py).
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "mlx/primitives.h"
#include "ops/host_metadata.h"

namespace chunkdelta {

// x [B, T, C], weight [C, K] -> y [B, T, C], state [N, K-1, C].
std::pair<mx::array, mx::array> causal_conv1d(const mx::array& x, const mx::array& weight,
                                              const std::optional<mx::array>& bias,
                                              const std::optional<mx::array>& initial_state,
                                              const std::optional<HostInt32>& cu_seqlens,
                                              const std::optional<mx::array>& mask, bool silu,
                                              mx::StreamOrDevice stream);

// Inputs: x, weight, then those of bias, initial_state and mask that are present.
class CausalConv1dOp : public mx::Primitive {
 public:
  struct Options {
    bool bias;
    bool initial_state;
    bool mask;
    bool silu;
    std::vector<int32_t> cu_seqlens;  // offsets of the B padded sequences where none were given
    bool operator==(const Options&) const = default;
  };

  CausalConv1dOp(mx::Stream stream, Options options)
      : mx::Primitive(stream), options_(std::move(options)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "CausalConv1d"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const CausalConv1dOp&>(other).options_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 private:
  Options options_;
};

}  // namespace chunkdelta
