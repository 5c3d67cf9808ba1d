#include "ops/gated_delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "core/plans/gated_delta.h"
#include "core/plans/gated_delta_gates.h"
#include "metal/encoder.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "ops/pool.h"

namespace chunkdelta {
namespace {

std::string text(int64_t x) {
  return std::to_string(x);
}

// Rows and heads of the arguments: [B, T, H, D], or [B, H, D] for one token.
struct Dims {
  int B, T, Hk, Hv, Dk, Dv;
};

void check_head_dim(std::string_view op, std::string_view name, int dim, const mx::array& a) {
  expect(dim >= 4 && dim <= GATED_DELTA_MAX_HEAD_DIM && dim % 4 == 0, op,
         std::string(name) + " a multiple of 4 in 4..256", describe(a));
}

Dims check_arrays(std::string_view op, bool step, const mx::array& q, const mx::array& k,
                  const mx::array& v, const mx::array& g, const mx::array& beta,
                  const std::optional<mx::array>& mask) {
  const size_t ndim = step ? 3 : 4;
  const std::string rows = step ? "[B" : "[B, T";
  expect(q.ndim() == ndim, op, "q " + rows + ", Hk, Dk]", describe(q));
  expect(v.ndim() == ndim, op, "v " + rows + ", Hv, Dv]", describe(v));
  expect_shape(op, "k", k, q.shape(), "of q's shape " + rows + ", Hk, Dk]");
  const Dims d{q.shape(0),  step ? 1 : q.shape(1), q.shape(-2),
               v.shape(-2), q.shape(-1),           v.shape(-1)};
  mx::Shape leading{d.B};
  if (!step) leading.push_back(d.T);
  const auto with = [&](std::initializer_list<int> last) {
    mx::Shape shape = leading;
    shape.insert(shape.end(), last.begin(), last.end());
    return shape;
  };
  core_dtype(op, "q", q);
  for (const auto& [name, a] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    expect(a->dtype() == q.dtype(), op,
           std::string(name) + " of q's dtype (q is " + describe(q) + ")", describe(*a));
  }
  expect_shape(op, "v", v, with({d.Hv, d.Dv}), "with q's leading shape");
  check_head_dim(op, "Dk", d.Dk, q);
  check_head_dim(op, "Dv", d.Dv, v);
  expect(d.Hk >= 1 && d.Hv >= 1 && d.Hv % d.Hk == 0, op,
         "Hv value heads in equal groups per key head, Hk = " + text(d.Hk), describe(v));
  expect(g.ndim() != ndim, op,
         "g " + rows + ", Hv], one gate per head (per-channel gates, as KDA " +
             "has them, are not supported yet)",
         describe(g));
  expect_shape(op, "g", g, with({d.Hv}), rows + ", Hv]");
  expect(g.dtype() == mx::float32, op, "g float32, the log of the decay", describe(g));
  expect_shape(op, "beta", beta, with({d.Hv}), rows + ", Hv]");
  expect(beta.dtype() == mx::float32 || beta.dtype() == q.dtype(), op,
         "beta float32 or of q's dtype", describe(beta));
  expect(int64_t(d.B) * d.T <= std::numeric_limits<int32_t>::max(), op,
         "at most 2147483647 rows B * T", describe(q));
  if (mask) {
    expect_shape(op, "mask", *mask, leading, rows + "]");
    expect(mask->dtype() == mx::bool_, op, "mask of dtype bool", describe(*mask));
  }
  return d;
}

std::vector<StateSequence> sequences_of(std::string_view op, const Dims& d,
                                        const GatedDeltaStates& states,
                                        const std::optional<HostInt32>& cu_seqlens,
                                        int64_t checkpoint_every) {
  std::vector<int64_t> offsets;
  if (cu_seqlens) {
    expect(d.B == 1, op, "batch 1 beside cu_seqlens", "batch " + text(d.B));
    check_cu_seqlens(op, "cu_seqlens", *cu_seqlens, d.T);
    offsets.assign(cu_seqlens->values.begin(), cu_seqlens->values.end());
  } else {
    for (int64_t b = 0; b <= d.B; b++) offsets.push_back(b * d.T);
  }
  const int64_t n = static_cast<int64_t>(offsets.size()) - 1;
  expect(!states.pool || !states.initial, op, "initial_state or state_pool", "both");
  expect(states.pool.has_value() == states.slots.has_value(), op,
         "state_pool and state_indices together",
         states.pool ? "no state_indices" : "no state_pool");
  if (states.initial) {
    expect_shape(op, "initial_state", *states.initial, {static_cast<int>(n), d.Hv, d.Dv, d.Dk},
                 "[N, Hv, Dv, Dk]");
    expect(states.initial->dtype() == mx::float32, op, "initial_state float32",
           describe(*states.initial));
  }
  if (states.pool) {
    refuse_tracing(op);
    const mx::array& pool = *states.pool;
    expect(pool.ndim() == 4 && pool.shape(1) == d.Hv && pool.shape(2) == d.Dv &&
               pool.shape(3) == d.Dk && pool.dtype() == mx::float32,
           op,
           "a state pool of [Hv, Dv, Dk] = (" + text(d.Hv) + ", " + text(d.Dv) + ", " + text(d.Dk) +
               ")",
           describe(pool));
    const HostInt32& slots = *states.slots;
    const std::string expected = "state_indices [N] = (" + text(n) +
                                 ",), each a slot of its own in 0.." + text(pool.shape(0) - 1);
    expect(slots.shape.size() == 1 && slots.shape[0] == n, op, expected, describe(slots));
    std::vector<int32_t> sorted = slots.values;
    std::sort(sorted.begin(), sorted.end());
    expect((n == 0 || (sorted.front() >= 0 && sorted.back() < pool.shape(0))) &&
               std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
           op, expected, describe(slots));
  }
  std::vector<StateSequence> sequences(n);
  int64_t checkpoint = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t length = offsets[i + 1] - offsets[i];
    const int64_t slot = states.pool ? states.slots->values[i] : i;
    sequences[i] = {offsets[i], length, states.pool || states.initial ? slot : -1, slot,
                    checkpoint};
    if (checkpoint_every) checkpoint += length / checkpoint_every;
  }
  return sequences;
}

std::vector<mx::array> build(std::string_view op, bool step, const mx::array& q, const mx::array& k,
                             const mx::array& v, const mx::array& g, const mx::array& beta,
                             std::optional<float> scale, const GatedDeltaStates& states,
                             const std::optional<HostInt32>& cu_seqlens,
                             const std::optional<mx::array>& mask,
                             std::optional<int> checkpoint_every, bool qk_l2norm, int chunk_size,
                             mx::StreamOrDevice stream) {
  const Dims d = check_arrays(op, step, q, k, v, g, beta, mask);
  expect(!checkpoint_every || *checkpoint_every >= 1, op, "checkpoint_every >= 1",
         text(checkpoint_every.value_or(0)));
  expect(chunk_size == 16 || chunk_size == 32 || chunk_size == 64, op, "chunk_size in {16, 32, 64}",
         text(chunk_size));
  const int64_t every = checkpoint_every.value_or(0);
  auto sequences = sequences_of(op, d, states, cu_seqlens, every);
  int64_t checkpoints = 0;
  for (const auto& s : sequences) checkpoints += every ? s.length / every : 0;

  GatedDeltaRule::Options options{
      {d.Hk, d.Hv, d.Dk, d.Dv, core_dtype(op, "q", q), core_dtype(op, "beta", beta),
       scale.value_or(1.0f / std::sqrt(static_cast<float>(d.Dk))), qk_l2norm, chunk_size, every},
      std::move(sequences),
      mask.has_value(),
      states.initial.has_value(),
      states.pool.has_value()};
  const int n = static_cast<int>(options.sequences.size());
  const mx::Stream s = mx::to_stream(stream);
  const bool gpu = s.device == mx::Device::gpu;
  // The CPU kernels read any strides; the Metal kernels any of q, k and v in one batch.
  std::vector<mx::array> inputs;
  const bool copies = gpu && !step && d.B > 1;
  for (const mx::array* a : {&q, &k, &v}) inputs.push_back(copies ? dense(*a, s) : *a);
  inputs.push_back(gpu ? dense(g, s) : g);
  inputs.push_back(gpu ? dense(mx::astype(beta, mx::float32, s), s) : beta);
  if (mask) inputs.push_back(gpu ? dense(*mask, s) : *mask);
  if (states.initial) inputs.push_back(dense(*states.initial, s));
  if (states.pool) inputs.push_back(*states.pool);

  std::vector<mx::Shape> shapes{v.shape()};
  std::vector<mx::Dtype> dtypes{q.dtype(), mx::float32};
  shapes.push_back(states.pool ? states.pool->shape() : mx::Shape{n, d.Hv, d.Dv, d.Dk});
  if (every) {
    shapes.push_back({static_cast<int>(checkpoints), d.Hv, d.Dv, d.Dk});
    dtypes.push_back(mx::float32);
  }
  return mx::array::make_arrays(std::move(shapes), dtypes,
                                std::make_shared<GatedDeltaRule>(s, std::move(options)), inputs);
}

// [B, T, ...] or, for one token, [B, ...] with `trailing` axes behind the rows.
Rows rows_of(const mx::array& a, int trailing) {
  const int ndim = static_cast<int>(a.ndim()), leading = ndim - trailing;
  return {a.data<void>(), a.strides(0), leading == 2 ? a.strides(1) : 0,
          trailing >= 1 ? a.strides(leading) : 0, trailing >= 2 ? a.strides(leading + 1) : 1};
}

}  // namespace

std::vector<mx::array> chunk_gated_delta_rule(
    const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& g,
    const mx::array& beta, std::optional<float> scale, const GatedDeltaStates& states,
    const std::optional<HostInt32>& cu_seqlens, const std::optional<mx::array>& mask,
    std::optional<int> checkpoint_every, bool qk_l2norm, std::optional<int> chunk_size,
    mx::StreamOrDevice stream) {
  return build("chunk_gated_delta_rule", false, q, k, v, g, beta, scale, states, cu_seqlens, mask,
               checkpoint_every, qk_l2norm, chunk_size.value_or(GATED_DELTA_DEFAULT_CHUNK), stream);
}

std::vector<mx::array> gated_delta_step(const mx::array& q, const mx::array& k, const mx::array& v,
                                        const mx::array& g, const mx::array& beta,
                                        std::optional<float> scale, const GatedDeltaStates& states,
                                        const std::optional<mx::array>& mask, bool qk_l2norm,
                                        mx::StreamOrDevice stream) {
  return build("gated_delta_step", true, q, k, v, g, beta, scale, states, std::nullopt, mask,
               std::nullopt, qk_l2norm, GATED_DELTA_DEFAULT_CHUNK, stream);
}

void GatedDeltaRule::eval_cpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  size_t next = 5;
  const mx::array* mask = options_.mask ? &inputs[next++] : nullptr;
  const mx::array* states = options_.initial_state || options_.pooled ? &inputs[next++] : nullptr;
  if (options_.pooled && !states->flags().row_contiguous) {
    throw std::runtime_error("[chunk_gated_delta_rule] expected a dense state pool");
  }
  for (const mx::array& input : inputs) encoder.set_input_array(input);
  for (size_t i = 0; i < outputs.size(); i++) {
    if (i == 1 && options_.pooled) {
      outputs[i].copy_shared_buffer(*states);  // in place: MLX never donates to two outputs
    } else {
      outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
    }
    encoder.set_output_array(outputs[i]);
  }
  GatedDeltaArrays arrays{};
  arrays.rows_per_batch = inputs[0].ndim() == 4 ? inputs[0].shape(1) : 1;
  arrays.q = rows_of(inputs[0], 2);
  arrays.k = rows_of(inputs[1], 2);
  arrays.v = rows_of(inputs[2], 2);
  arrays.g = rows_of(inputs[3], 1);
  arrays.beta = rows_of(inputs[4], 1);
  if (mask) arrays.mask = rows_of(*mask, 0);
  arrays.o = outputs[0].data<void>();
  arrays.states_in = states ? states->data<float>() : nullptr;
  arrays.states_out = outputs[1].data<float>();
  arrays.checkpoints = options_.core.checkpoint_every ? outputs[2].data<float>() : nullptr;
  encoder.dispatch([core = options_.core, sequences = options_.sequences, arrays] {
    gated_delta(core, arrays, sequences);
  });
}

void GatedDeltaRule::eval_gpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  const mx::array &q = inputs[0], &k = inputs[1], &v = inputs[2];
  const bool step = q.ndim() == 3;
  const GatedDeltaOptions& core = options_.core;
  GatedDeltaCall call;
  call.dtype = core.dtype;
  call.batch = q.shape(0);
  call.tokens = step ? 1 : q.shape(1);
  call.num_k_heads = static_cast<int32_t>(core.key_heads);
  call.num_v_heads = static_cast<int32_t>(core.value_heads);
  call.head_k_dim = static_cast<int32_t>(core.key_dim);
  call.head_v_dim = static_cast<int32_t>(core.value_dim);
  // A step's rows are its batch; an axis of one element may have any stride.
  const auto view = [&](const mx::array& a) {
    const auto stride = [&](int axis) { return a.shape(axis) > 1 ? a.strides(axis) : 0; };
    call.aligned &= starts_at_vector(a);
    return GatedDeltaView{stride(-3), stride(-2), a.shape(-1) > 1 ? a.strides(-1) : 1};
  };
  if (step || call.batch == 1) {
    call.q = view(q);
    call.k = view(k);
    call.v = view(v);
  } else {
    for (const mx::array* a : {&q, &k, &v}) call.aligned &= starts_at_vector(*a);
  }
  call.scale = core.scale;
  call.qk_l2norm = core.qk_l2norm;
  call.l2norm_eps = GATED_DELTA_L2NORM_EPS;
  call.mask = options_.mask;
  call.initial_state = options_.initial_state;
  call.pooled = options_.pooled;
  call.checkpoint_every = static_cast<int32_t>(core.checkpoint_every);
  call.gpu_cores = gpu_cores(stream());
  if (!step && call.batch == 1) {
    call.cu_seqlens.push_back(0);
    for (const StateSequence& s : options_.sequences)
      call.cu_seqlens.push_back(static_cast<int32_t>(s.row + s.length));
  }

  size_t next = 5;
  if (call.batch == 0 || call.tokens == 0) {
    // No rows: the states are handed on as they are.
    for (size_t i : {0, 2}) {
      if (i < outputs.size()) outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
    }
    if (options_.pooled || options_.initial_state) {
      outputs[1].copy_shared_buffer(inputs[5 + options_.mask]);
    } else {
      outputs[1].set_data(mx::allocator::malloc(outputs[1].nbytes()));
      if (outputs[1].size() > 0) std::memset(outputs[1].data<float>(), 0, outputs[1].nbytes());
    }
    return;
  }
  PlanArrays arrays{{"q", q}, {"k", k}, {"v", v}, {"g", inputs[3]}, {"beta", inputs[4]}};
  if (options_.mask) arrays.emplace_back("mask", inputs[next++]);
  for (size_t i : {0, 2}) {
    if (i < outputs.size()) outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
  }
  if (options_.pooled) {
    for (const StateSequence& s : options_.sequences)
      call.state_indices.push_back(static_cast<int32_t>(s.state_out));
    call.num_slots = inputs[next].shape(0);
    outputs[1].copy_shared_buffer(inputs[next]);  // in place: MLX never donates to two outputs
  } else {
    if (options_.initial_state) arrays.emplace_back("initial_state", inputs[next]);
    outputs[1].set_data(mx::allocator::malloc(outputs[1].nbytes()));
  }
  arrays.emplace_back("o", outputs[0]);
  arrays.emplace_back("state", outputs[1]);
  if (outputs.size() > 2) arrays.emplace_back("checkpoints", outputs[2]);
  encode_plan(plan_gated_delta(call), arrays, stream());
}

std::pair<mx::array, mx::array> gated_delta_gates(const mx::array& a, const mx::array& b,
                                                  const mx::array& a_log, const mx::array& dt_bias,
                                                  std::optional<float> lower_bound,
                                                  bool allow_neg_eigval,
                                                  mx::StreamOrDevice stream) {
  constexpr auto op = "gated_delta_gates";
  expect(a.ndim() >= 1 && a.shape(-1) >= 1, op, "a [..., Hv]", describe(a));
  core_dtype(op, "a", a);
  expect_shape(op, "b", b, a.shape(), "of a's shape");
  expect(b.dtype() == a.dtype(), op, "b of a's dtype (a is " + describe(a) + ")", describe(b));
  for (const auto& [name, x] : {std::pair{"A_log", &a_log}, std::pair{"dt_bias", &dt_bias}}) {
    expect_shape(op, name, *x, {a.shape(-1)}, "[Hv]");
    core_dtype(op, name, *x);
  }
  expect(!lower_bound || std::isfinite(*lower_bound), op, "a finite lower_bound", "inf or NaN");
  const mx::Stream s = mx::to_stream(stream);
  const auto out =
      mx::array::make_arrays({a.shape(), a.shape()}, {mx::float32, mx::float32},
                             std::make_shared<GatedDeltaGatesOp>(
                                 s, lower_bound.value_or(std::numeric_limits<float>::quiet_NaN()),
                                 allow_neg_eigval ? 2.0f : 1.0f),
                             {dense(a, s), dense(b, s), dense(mx::astype(a_log, mx::float32, s), s),
                              dense(mx::astype(dt_bias, mx::float32, s), s)});
  return {out[0], out[1]};
}

bool GatedDeltaGatesOp::is_equivalent(const mx::Primitive& other) const {
  const auto& o = static_cast<const GatedDeltaGatesOp&>(other);
  const bool same_bound =
      lower_bound_ == o.lower_bound_ || (std::isnan(lower_bound_) && std::isnan(o.lower_bound_));
  return same_bound && beta_scale_ == o.beta_scale_;
}

GatedDeltaGates GatedDeltaGatesOp::options(const mx::array& a) const {
  const int64_t heads = a.shape(-1);
  return {static_cast<int64_t>(a.size()) / heads, heads, core_dtype("gated_delta_gates", "a", a),
          lower_bound_, beta_scale_};
}

void GatedDeltaGatesOp::eval_cpu(const std::vector<mx::array>& inputs,
                                 std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& input : inputs) encoder.set_input_array(input);
  for (mx::array& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
    encoder.set_output_array(output);
  }
  encoder.dispatch([options = options(inputs[0]), a = inputs[0].data<void>(),
                    b = inputs[1].data<void>(), a_log = inputs[2].data<float>(),
                    dt_bias = inputs[3].data<float>(), g = outputs[0].data<float>(),
                    beta = outputs[1].data<float>()] {
    gated_delta_gates(options, a, b, a_log, dt_bias, g, beta);
  });
}

void GatedDeltaGatesOp::eval_gpu(const std::vector<mx::array>& inputs,
                                 std::vector<mx::array>& outputs) {
  for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
  encode_plan(plan_gated_delta_gates(options(inputs[0])),
              {{"a", inputs[0]},
               {"b", inputs[1]},
               {"A_log", inputs[2]},
               {"dt_bias", inputs[3]},
               {"g", outputs[0]},
               {"beta", outputs[1]}},
              stream());
}

}  // namespace chunkdelta
