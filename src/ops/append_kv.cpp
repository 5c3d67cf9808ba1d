#include "ops/append_kv.h"

#include <algorithm>
#include <cstring>

#include "core/plans/append_kv.h"
#include "metal/encoder.h"
#include "mlx/backend/cpu/encoder.h"
#include "ops/pool.h"

namespace chunkdelta {

mx::Shape slab_shape(PageFormat format, int num_pages, int num_kv_heads, int page_size,
                     int head_dim) {
  const bool bytes = slab_dtype(format) == mx::uint8;
  const int row = bytes ? static_cast<int>(page_row_bytes(format, head_dim)) : head_dim;
  return {num_pages, num_kv_heads, page_size, row};
}

mx::Dtype slab_dtype(PageFormat format) {
  switch (format) {
    case PageFormat::f32:
      return mx::float32;
    case PageFormat::f16:
      return mx::float16;
    case PageFormat::bf16:
      return mx::bfloat16;
    default:
      return mx::uint8;
  }
}

std::shared_ptr<const SlotMapping> make_slot_mapping(const HostInt32& slots) {
  constexpr auto op = "append_kv";
  if (slots.shape.size() != 1) refuse(op, "slot_mapping [T]", describe(slots));
  SlotMapping mapping{slots.values, INT32_MAX, -1};
  std::vector<int32_t> written;
  for (int32_t slot : slots.values) {
    if (slot < -1) refuse(op, "slots >= 0, or -1 to skip", std::to_string(slot));
    if (slot >= 0) written.push_back(slot);
  }
  if (!written.empty()) {
    std::sort(written.begin(), written.end());
    const auto twice = std::adjacent_find(written.begin(), written.end());
    if (twice != written.end()) {
      refuse(op, "each slot at most once", "slot " + std::to_string(*twice) + " twice");
    }
    mapping.min_slot = written.front();
    mapping.max_slot = written.back();
  }
  return std::make_shared<const SlotMapping>(std::move(mapping));
}

mx::array append_kv(const mx::array& slab, const mx::array& x,
                    std::shared_ptr<const SlotMapping> slots, int64_t first_page, PageFormat format,
                    int head_dim, const std::vector<mx::array>& reads, mx::StreamOrDevice s_) {
  constexpr auto op = "append_kv";
  refuse_tracing(op);
  const int tokens = static_cast<int>(slots->slots.size()), heads = slab.shape(1);
  expect_shape(op, "k and v", x, {tokens, heads, head_dim}, "[T, Hkv, D]");
  const auto dtype = core_dtype(op, "k and v", x);
  const auto s = mx::to_stream(s_);
  std::vector<mx::array> inputs{slab, dense(x, s)};
  inputs.insert(inputs.end(), reads.begin(), reads.end());
  AppendOptions options{dtype, format, heads, head_dim, slab.shape(2), first_page, slab.shape(0)};
  return mx::array(slab.shape(), slab.dtype(),
                   std::make_shared<AppendKV>(s, options, std::move(slots)), std::move(inputs));
}

void AppendKV::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  outputs[0].copy_shared_buffer(inputs[0]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const auto& input : inputs) encoder.set_input_array(input);
  encoder.set_output_array(outputs[0]);
  encoder.dispatch([options = options_, slots = slots_, x = inputs[1].data<void>(),
                    slab = outputs[0].data<void>()] { append_kv(options, slots->slots, x, slab); });
}

void AppendKV::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  outputs[0].copy_shared_buffer(inputs[0]);
  encode_plan(plan_append_kv(options_, slots_->slots, starts_at_vector(inputs[1])),
              {{"x", inputs[1]}, {"pages", outputs[0]}}, stream(),
              {.waits = {inputs.begin() + 2, inputs.end()}});
}

mx::array copy_pages(const std::vector<mx::array>& slabs, size_t slab,
                     const std::vector<int64_t>& first_page, const std::vector<int32_t>& source,
                     const std::vector<int32_t>& target, const std::vector<mx::array>& reads,
                     mx::StreamOrDevice s_) {
  constexpr auto op = "copy_pages";
  refuse_tracing(op);
  const auto s = mx::to_stream(s_);
  std::vector<mx::array> inputs = slabs;
  inputs.insert(inputs.end(), reads.begin(), reads.end());
  return mx::array(slabs[slab].shape(), slabs[slab].dtype(),
                   std::make_shared<CopyPages>(s, slab, first_page, source, target),
                   std::move(inputs));
}

void CopyPages::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  outputs[0].copy_shared_buffer(inputs[slab_]);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const auto& input : inputs) encoder.set_input_array(input);
  encoder.set_output_array(outputs[0]);
  const size_t page_bytes = inputs[slab_].nbytes() / std::max(1, inputs[slab_].shape(0));
  std::vector<const char*> slabs;
  for (size_t i = 0; i + 1 < first_page_.size(); i++) slabs.push_back(inputs[i].data<char>());
  encoder.dispatch([slab = slab_, first = first_page_, source = source_, target = target_, slabs,
                    page_bytes, out = outputs[0].data<char>()] {
    for (size_t i = 0; i < source.size(); i++) {
      const int64_t to = target[i] - first[slab];
      if (to < 0 || target[i] >= first[slab + 1]) continue;
      size_t from = 0;
      while (from + 1 < slabs.size() && source[i] >= first[from + 1]) from++;
      std::memcpy(out + to * page_bytes, slabs[from] + (source[i] - first[from]) * page_bytes,
                  page_bytes);
    }
  });
}

void CopyPages::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  outputs[0].copy_shared_buffer(inputs[slab_]);
  CopyPagesCall call;
  call.page_bytes = static_cast<int64_t>(inputs[slab_].nbytes() / inputs[slab_].shape(0));
  call.first_page = first_page_;
  call.slab = static_cast<int32_t>(slab_);
  call.source = source_;
  call.target = target_;
  PlanArrays arrays;
  for (size_t i = 0; i + 1 < first_page_.size(); i++) {
    arrays.emplace_back("pages." + std::to_string(i), i == slab_ ? outputs[0] : inputs[i]);
  }
  const auto slabs = static_cast<ptrdiff_t>(first_page_.size()) - 1;
  encode_plan(plan_copy_pages(call), arrays, stream(),
              {.waits = {inputs.begin() + slabs, inputs.end()}});
}

}  // namespace chunkdelta
