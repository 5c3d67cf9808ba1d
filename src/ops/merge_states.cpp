#include "ops/merge_states.h"

#include "core/plans/merge_states.h"
#include "metal/encoder.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace chunkdelta {
namespace {

MergeStatesCall plan_call(const mx::array& outs) {
  return {core_dtype("merge_states", "outs", outs), outs.shape(0), outs.shape(1), outs.shape(2),
          outs.shape(3)};
}

}  // namespace

std::pair<mx::array, mx::array> merge_states(const mx::array& outs, const mx::array& lses,
                                             mx::StreamOrDevice s_) {
  constexpr auto op = "merge_states";
  if (outs.ndim() != 4 || outs.shape(0) == 0) refuse(op, "outs [S, T, Hq, D]", describe(outs));
  core_dtype(op, "outs", outs);
  const mx::Shape rows(outs.shape().begin() + 1, outs.shape().end() - 1);
  expect_shape(op, "lses", lses, {outs.shape(0), rows[0], rows[1]}, "[S, T, Hq]");
  if (lses.dtype() != mx::float32) refuse(op, "lses float32", describe(lses));
  const auto s = mx::to_stream(s_);
  if (s.device == mx::Device::gpu)
    plan_merge_states(plan_call(outs));  // refuses what it cannot run
  auto results =
      mx::array::make_arrays({{rows[0], rows[1], outs.shape(3)}, rows}, {outs.dtype(), mx::float32},
                             std::make_shared<MergeStates>(s), {dense(outs, s), dense(lses, s)});
  return {results[0], results[1]};
}

std::vector<mx::Shape> MergeStates::output_shapes(const std::vector<mx::array>& inputs) {
  const auto& outs = inputs[0].shape();
  return {{outs[1], outs[2], outs[3]}, {outs[1], outs[2]}};
}

void MergeStates::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const auto& input : inputs) encoder.set_input_array(input);
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
    encoder.set_output_array(output);
  }
  const auto& shape = inputs[0].shape();
  const MergeStatesOptions options{core_dtype("merge_states", "outs", inputs[0]), shape[0],
                                   int64_t(shape[1]) * shape[2], shape[3]};
  encoder.dispatch([options, outs = inputs[0].data<void>(), lses = inputs[1].data<float>(),
                    o = outputs[0].data<void>(),
                    lse = outputs[1].data<float>()] { merge_states(options, outs, lses, o, lse); });
}

void MergeStates::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  for (auto& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
  encode_plan(plan_merge_states(plan_call(inputs[0])),
              {{"outs", inputs[0]}, {"lses", inputs[1]}, {"o", outputs[0]}, {"lse", outputs[1]}},
              stream());
}

}  // namespace chunkdelta
