#include "ops/causal_conv1d.h"

#include <memory>

#include "core/causal_conv1d.h"
#include "core/plans/causal_conv1d.h"
#include "metal/encoder.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace chunkdelta {
namespace {

constexpr const char* OP = "causal_conv1d";

void expect_dtype_of_x(std::string_view name, const mx::array& a, const mx::array& x) {
  if (a.dtype() == x.dtype()) return;
  std::ostringstream dtype;
  dtype << x.dtype();
  refuse(OP, std::string(name) + " of x's dtype " + dtype.str(), describe(a));
}

mx::Shape state_shape(const mx::array& x, const mx::array& weight, size_t sequences) {
  return {static_cast<mx::ShapeElem>(sequences), weight.shape(1) - 1, x.shape(2)};
}

}  // namespace

std::pair<mx::array, mx::array> causal_conv1d(const mx::array& x, const mx::array& weight,
                                              const std::optional<mx::array>& bias,
                                              const std::optional<mx::array>& initial_state,
                                              const std::optional<HostInt32>& cu_seqlens,
                                              const std::optional<mx::array>& mask, bool silu,
                                              mx::StreamOrDevice stream) {
  expect(x.ndim() == 3 && x.shape(0) >= 1 && x.shape(2) >= 1, OP,
         "x [B, T, C] with B >= 1 and C >= 1", describe(x));
  core_dtype(OP, "x", x);
  const int B = x.shape(0), T = x.shape(1), C = x.shape(2);
  expect(weight.ndim() == 2 && weight.shape(0) == C && weight.shape(1) >= CONV_MIN_WIDTH &&
             weight.shape(1) <= CONV_MAX_WIDTH,
         OP, "weight [C, K] with C = " + std::to_string(C) + " and K in 2..8", describe(weight));
  expect_dtype_of_x("weight", weight, x);
  if (bias) {
    expect_shape(OP, "bias", *bias, {C}, "[C]");
    expect_dtype_of_x("bias", *bias, x);
  }
  expect(int64_t(B) * T <= INT32_MAX, OP, "at most 2147483647 rows B * T", describe(x));
  expect(!mask || !cu_seqlens, OP, "mask (padded batch) or cu_seqlens (packed batch)", "both");

  std::vector<int32_t> offsets;
  if (cu_seqlens) {
    expect(B == 1, OP, "x [1, T, C] beside cu_seqlens", describe(x));
    check_cu_seqlens(OP, "cu_seqlens", *cu_seqlens, T);
    offsets = cu_seqlens->values;
  } else {
    for (int b = 0; b <= B; b++) offsets.push_back(b * T);
  }
  const mx::Shape carried = state_shape(x, weight, offsets.size() - 1);
  if (initial_state) {
    expect_shape(OP, "initial_state", *initial_state, carried, "[N, K-1, C]");
    expect_dtype_of_x("initial_state", *initial_state, x);
  }
  if (mask) {
    expect_shape(OP, "mask", *mask, {B, T}, "[B, T]");
    expect(mask->dtype() == mx::bool_, OP, "mask of dtype bool", describe(*mask));
  }

  const mx::Stream s = mx::to_stream(stream);
  std::vector<mx::array> inputs{dense(x, s), dense(weight, s)};
  for (const auto& optional : {bias, initial_state, mask}) {
    if (optional) inputs.push_back(dense(*optional, s));
  }
  auto primitive = std::make_shared<CausalConv1dOp>(
      s, CausalConv1dOp::Options{bias.has_value(), initial_state.has_value(), mask.has_value(),
                                 silu, std::move(offsets)});
  std::vector<mx::array> out =
      mx::array::make_arrays({x.shape(), carried}, {x.dtype(), x.dtype()}, primitive, inputs);
  return {out[0], out[1]};
}

std::vector<mx::Shape> CausalConv1dOp::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[0].shape(), state_shape(inputs[0], inputs[1], options_.cu_seqlens.size() - 1)};
}

void CausalConv1dOp::eval_cpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& input : inputs) encoder.set_input_array(input);
  for (mx::array& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
    encoder.set_output_array(output);
  }
  size_t next = 2;
  const auto optional = [&](bool present) -> const void* {
    return present ? inputs[next++].data<void>() : nullptr;
  };
  CausalConv1d op{};
  op.dtype = core_dtype(OP, "x", inputs[0]);
  op.channels = inputs[0].shape(2);
  op.width = inputs[1].shape(1);
  op.x = inputs[0].data<void>();
  op.weight = inputs[1].data<void>();
  op.bias = optional(options_.bias);
  op.initial_state = optional(options_.initial_state);
  op.mask = static_cast<const bool*>(optional(options_.mask));
  op.cu_seqlens = options_.cu_seqlens;
  op.silu = options_.silu;
  op.y = outputs[0].data<void>();
  op.state = outputs[1].data<void>();
  encoder.dispatch([op = std::move(op)] { causal_conv1d(op); });
}

void CausalConv1dOp::eval_gpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
  CausalConv1dCall call;
  call.dtype = core_dtype(OP, "x", inputs[0]);
  call.channels = inputs[0].shape(2);
  call.width = inputs[1].shape(1);
  call.cu_seqlens = options_.cu_seqlens;
  call.bias = options_.bias;
  call.initial_state = options_.initial_state;
  call.mask = options_.mask;
  call.silu = options_.silu;
  PlanArrays arrays{{"x", inputs[0]}, {"weight", inputs[1]}};
  size_t next = 2;
  if (options_.bias) arrays.emplace_back("bias", inputs[next++]);
  if (options_.initial_state) arrays.emplace_back("initial_state", inputs[next++]);
  for (const auto& [role, array] : arrays) call.aligned &= starts_at_vector(array);
  if (options_.mask) arrays.emplace_back("mask", inputs[next++]);
  arrays.emplace_back("y", outputs[0]);
  arrays.emplace_back("state", outputs[1]);
  encode_plan(plan_causal_conv1d(call), arrays, stream());
}

}  // namespace chunkdelta
