#include "ops/rope.h"

#include <numeric>

#include "core/plans/rope.h"
#include "metal/encoder.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "ops/checks.h"

namespace chunkdelta {

// The row of positions that turns each rotary pair. Interleaved (Qwen3-VL, Qwen3.5): t h w t h w
// ... while a section lasts, then t; otherwise (Qwen2-VL): section after section.
static std::vector<int32_t> position_axes(int pairs,
                                          const std::optional<std::vector<int>>& sections,
                                          bool interleaved) {
  std::vector<int32_t> axis(pairs, 0);
  if (!sections) return axis;
  int begin = 0;
  for (int a = 0; a < 3; a++) {
    const int n = (*sections)[a];
    if (interleaved) {
      for (int i = a; a > 0 && i < 3 * n && i < pairs; i += 3) axis[i] = a;
    } else {
      std::fill_n(axis.begin() + begin, n, a);
      begin += n;
    }
  }
  return axis;
}

mx::array rope(const mx::array& x, const mx::array& positions, const std::vector<float>& inv_freq,
               bool traditional, const std::optional<std::vector<int>>& mrope_sections,
               bool mrope_interleaved, mx::StreamOrDevice s_) {
  constexpr auto op = "rope";
  if (x.ndim() != 3 && x.ndim() != 4) refuse(op, "x [T,H,D] or [B,T,H,D]", describe(x));
  core_dtype(op, "x", x);
  const int D = x.shape(-1), pairs = static_cast<int>(inv_freq.size());
  if (2 * pairs > D || pairs == 0) {
    refuse(op, "1 to D/2 = " + std::to_string(D / 2) + " rotary pairs", std::to_string(pairs));
  }
  mx::Shape leading(x.shape().begin(), x.shape().end() - 2);
  if (mrope_sections) {
    const auto& n = *mrope_sections;
    if (n.size() != 3 || n[0] < 0 || n[1] < 0 || n[2] < 0 || n[0] + n[1] + n[2] != pairs) {
      std::ostringstream got;
      for (int section : n) got << section << " ";
      refuse(op, "three mrope_sections that add up to dims/2 = " + std::to_string(pairs),
             got.str());
    }
    leading.insert(leading.begin(), 3);
  }
  if (positions.dtype() != mx::int32) refuse(op, "positions int32", describe(positions));
  expect_shape(op, "positions", positions, leading, mrope_sections ? "[3, (B,) T]" : "[(B,) T]");
  const auto s = mx::to_stream(s_);
  RopeOptions options{x.shape(-2), D, traditional, inv_freq,
                      position_axes(pairs, mrope_sections, mrope_interleaved)};
  return mx::array(x.shape(), x.dtype(), std::make_shared<Rope>(s, std::move(options)),
                   {dense(x, s), dense(positions, s)});
}

bool Rope::is_equivalent(const mx::Primitive& other) const {
  const auto& o = static_cast<const Rope&>(other).options_;
  return options_.traditional == o.traditional && options_.inv_freq == o.inv_freq &&
         options_.axis == o.axis;
}

void Rope::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto &x = inputs[0], &positions = inputs[1];
  auto& out = outputs[0];
  if (x.is_donatable()) {
    out.copy_shared_buffer(x);  // a token is read before it is written: see rotate()
  } else {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.set_input_array(x);
  encoder.set_input_array(positions);
  encoder.set_output_array(out);
  const int64_t row = int64_t(options_.heads) * options_.head_dim;
  encoder.dispatch([options = options_, dtype = core_dtype("rope", "x", x),
                    tokens = row ? static_cast<int64_t>(x.size()) / row : 0, x = x.data<void>(),
                    positions = positions.data<int32_t>(), out = out.data<void>()]() {
    chunkdelta::rope(options, dtype, tokens, x, positions, out);
  });
}

void Rope::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  const auto &x = inputs[0], &positions = inputs[1];
  auto& out = outputs[0];
  if (x.is_donatable()) {
    out.copy_shared_buffer(x);
  } else {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  const int64_t row = int64_t(options_.heads) * options_.head_dim;
  encode_plan(plan_rope(options_, core_dtype("rope", "x", x),
                        row ? static_cast<int64_t>(x.size()) / row : 0),
              {{"x", x}, {"positions", positions}, {"out", out}}, stream());
}

}  // namespace chunkdelta
