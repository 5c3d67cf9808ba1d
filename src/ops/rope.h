#pragma once

#include <optional>
#include <vector>

#include "core/rope.h"
#include "mlx/array.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace chunkdelta {

namespace mx = mlx::core;

// x [T,H,D] or [B,T,H,D]; positions int32 of x's leading shape, or [3, ...] with mrope_sections.
mx::array rope(const mx::array& x, const mx::array& positions, const std::vector<float>& inv_freq,
               bool traditional, const std::optional<std::vector<int>>& mrope_sections,
               bool mrope_interleaved, mx::StreamOrDevice s = {});

class Rope : public mx::Primitive {
 public:
  Rope(mx::Stream stream, RopeOptions options)
      : mx::Primitive(stream), options_(std::move(options)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "chunkdelta::Rope"; }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }

 private:
  RopeOptions options_;
};

}  // namespace chunkdelta
