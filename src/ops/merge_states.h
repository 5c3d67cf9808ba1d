// merge_states: partial attention results over disjoint key sets into one.
#pragma once

#include <utility>
#include <vector>

#include "core/merge_states.h"
#include "mlx/primitives.h"
#include "ops/checks.h"

namespace chunkdelta {

// outs [S, T, Hq, D], lses [S, T, Hq] float32 -> o [T, Hq, D], lse [T, Hq].
std::pair<mx::array, mx::array> merge_states(const mx::array& outs, const mx::array& lses,
                                             mx::StreamOrDevice s = {});

class MergeStates : public mx::Primitive {
 public:
  explicit MergeStates(mx::Stream stream) : Primitive(stream) {}
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  const char* name() const override { return "MergeStates"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

}  // namespace chunkdelta
