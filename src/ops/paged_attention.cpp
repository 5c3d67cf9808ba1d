#include "ops/paged_attention.h"

#include <algorithm>
#include <cmath>

#include "core/plans/attention_tiles.h"
#include "core/plans/paged_attention.h"
#include "metal/encoder.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "ops/pool.h"

namespace chunkdelta {

std::shared_ptr<const AttentionMetadata> make_attention_metadata(const HostInt32& block_table,
                                                                 const HostInt32& seq_lens,
                                                                 const HostInt32& cu_seqlens_q,
                                                                 int page_size) {
  constexpr auto op = "paged_attention";
  if (page_size < 16 || page_size % 16 != 0) {
    refuse(op, "page_size a multiple of 16", std::to_string(page_size));
  }
  if (seq_lens.shape.size() != 1) refuse(op, "seq_lens [N]", describe(seq_lens));
  const int64_t N = seq_lens.shape[0];
  if (block_table.shape.size() != 2 || block_table.shape[0] != N) {
    refuse(op, "block_table [N, max_pages] with N = " + std::to_string(N) + " as in seq_lens",
           describe(block_table));
  }
  if (cu_seqlens_q.shape.size() != 1 || cu_seqlens_q.shape[0] != N + 1) {
    refuse(op, "cu_seqlens_q [N + 1] with N = " + std::to_string(N) + " as in seq_lens",
           describe(cu_seqlens_q));
  }
  check_cu_seqlens(op, "cu_seqlens_q", cu_seqlens_q, cu_seqlens_q.values.back());
  const int64_t max_pages = block_table.shape[1];
  int32_t max_page = -1;
  for (int64_t n = 0; n < N; n++) {
    const int64_t length = seq_lens.values[n];
    if (length < 0 || length > max_pages * page_size) {
      refuse(op,
             "seq_lens in 0.." + std::to_string(max_pages * page_size) + " (" +
                 std::to_string(max_pages) + " pages of " + std::to_string(page_size) + ")",
             "seq_lens[" + std::to_string(n) + "] = " + std::to_string(length));
    }
    for (int64_t i = 0; i * page_size < length; i++) {
      const int32_t page = block_table.values[n * max_pages + i];
      if (page < 0) {
        refuse(op,
               "a page id for each of the " + std::to_string(length) + " keys of sequence " +
                   std::to_string(n),
               "block_table[" + std::to_string(n) + ", " + std::to_string(i) +
                   "] = " + std::to_string(page));
      }
      max_page = std::max(max_page, page);
    }
  }
  return std::make_shared<const AttentionMetadata>(
      AttentionMetadata{page_size, static_cast<int>(max_pages), block_table.values, seq_lens.values,
                        cu_seqlens_q.values, max_page});
}

std::vector<mx::array> paged_attention(const mx::array& q, const std::vector<mx::array>& k,
                                       const std::vector<mx::array>& v,
                                       const std::vector<int64_t>& first_page,
                                       std::shared_ptr<const AttentionMetadata> metadata,
                                       const PagedAttentionSettings& settings,
                                       const std::optional<mx::array>& sinks,
                                       mx::StreamOrDevice s_) {
  constexpr auto op = "paged_attention";
  refuse_tracing(op);
  if (q.ndim() != 3) refuse(op, "q [T, Hq, D]", describe(q));
  const auto dtype = core_dtype(op, "q", q);
  const int T = q.shape(0), Hq = q.shape(1), D = q.shape(2);
  const int Hkv = k[0].shape(1), page_size = k[0].shape(2);
  if (Hq < Hkv || Hq % Hkv != 0) {
    refuse(op, "q [T, Hq, D] with Hq a multiple of Hkv = " + std::to_string(Hkv), describe(q));
  }
  if (metadata->cu_seqlens_q.back() != T) {
    refuse(op,
           "q [T, Hq, D] with T = " + std::to_string(metadata->cu_seqlens_q.back()) +
               ", the last of cu_seqlens_q",
           describe(q));
  }
  if (metadata->page_size != page_size) {
    refuse(op, "metadata for pages of " + std::to_string(page_size) + " keys",
           "metadata for pages of " + std::to_string(metadata->page_size));
  }
  if (metadata->max_page >= first_page.back()) {
    refuse(op, "page ids below num_pages = " + std::to_string(first_page.back()),
           "page " + std::to_string(metadata->max_page));
  }
  const float scale = settings.scale.value_or(static_cast<float>(1 / std::sqrt(double(D))));
  if (!std::isfinite(scale)) refuse(op, "a finite scale", std::to_string(scale));
  if (settings.window) {
    if (*settings.window < 1) refuse(op, "window >= 1", std::to_string(*settings.window));
    if (!settings.causal) refuse(op, "causal=True with a window", "causal=False");
  }
  if (settings.softcap && !(*settings.softcap > 0 && std::isfinite(*settings.softcap))) {
    refuse(op, "softcap > 0", std::to_string(*settings.softcap));
  }
  const auto s = mx::to_stream(s_);
  if (s.device == mx::Device::gpu) attention_tile(dtype, D);  // refuses other head dims
  std::vector<mx::array> inputs{dense(q, s)};
  if (sinks) {
    expect_shape(op, "sinks", *sinks, {Hq}, "[Hq]");
    core_dtype(op, "sinks", *sinks);
    inputs.push_back(dense(mx::astype(*sinks, mx::float32, s), s));
  }
  inputs.insert(inputs.end(), k.begin(), k.end());
  inputs.insert(inputs.end(), v.begin(), v.end());
  PagedAttentionOptions options{dtype,
                                Hq,
                                Hkv,
                                D,
                                page_size,
                                settings.k_format,
                                settings.v_format,
                                scale,
                                settings.causal,
                                settings.window.value_or(0),
                                settings.softcap.value_or(0.0f),
                                sinks.has_value(),
                                settings.return_lse};
  std::vector<mx::Shape> shapes{q.shape()};
  std::vector<mx::Dtype> dtypes{q.dtype()};
  if (settings.return_lse) {
    shapes.push_back({T, Hq});
    dtypes.push_back(mx::float32);
  }
  shapes.push_back({1});
  dtypes.push_back(mx::uint8);
  return mx::array::make_arrays(
      std::move(shapes), dtypes,
      std::make_shared<PagedAttention>(s, options, std::move(metadata), first_page),
      std::move(inputs));
}

void PagedAttention::eval_cpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const auto& input : inputs) encoder.set_input_array(input);
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
    encoder.set_output_array(output);
  }
  const size_t first = options_.sinks ? 2 : 1, slabs = first_page_.size() - 1;
  PageSlabs pages;
  for (size_t i = 0; i < slabs; i++) {
    pages.k.push_back(inputs[first + i].data<void>());
    pages.v.push_back(inputs[first + slabs + i].data<void>());
  }
  pages.first_page = first_page_;
  encoder.dispatch(
      [options = options_, metadata = metadata_, pages = std::move(pages),
       q = inputs[0].data<void>(), sinks = options_.sinks ? inputs[1].data<float>() : nullptr,
       o = outputs[0].data<void>(), lse = options_.return_lse ? outputs[1].data<float>() : nullptr,
       token = outputs.back().data<uint8_t>()] {
        paged_attention(options, *metadata, pages, q, sinks, o, lse);
        *token = 0;
      });
}

void PagedAttention::eval_gpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  for (auto& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
  PagedAttentionCall call;
  call.dtype = options_.dtype;
  call.num_q_heads = options_.num_q_heads;
  call.num_kv_heads = options_.num_kv_heads;
  call.head_dim = options_.head_dim;
  call.page_size = options_.page_size;
  call.k_format = options_.k_format;
  call.v_format = options_.v_format;
  call.block_table = metadata_->block_table;
  call.seq_lens = metadata_->seq_lens;
  call.cu_seqlens_q = metadata_->cu_seqlens_q;
  call.scale = options_.scale;
  call.causal = options_.causal;
  call.window = options_.window;
  call.softcap = options_.softcap;
  call.sinks = options_.sinks;
  call.return_lse = options_.return_lse;
  call.gpu_cores = gpu_cores(stream());

  PlanArrays arrays{{"q", inputs[0]}, {"o", outputs[0]}};
  if (options_.sinks) arrays.emplace_back("sinks", inputs[1]);
  if (options_.return_lse) arrays.emplace_back("lse", outputs[1]);
  const size_t first = options_.sinks ? 2 : 1, slabs = first_page_.size() - 1;
  for (size_t i = 0; i < slabs; i++) {
    call.slab_pages.push_back(static_cast<int32_t>(first_page_[i + 1] - first_page_[i]));
    const std::string suffix = i ? "." + std::to_string(i) : "";
    arrays.emplace_back("k_pages" + suffix, inputs[first + i]);
    arrays.emplace_back("v_pages" + suffix, inputs[first + slabs + i]);
  }
  // The token's byte is never read: it stands for this node, after which its readers run.
  encode_plan(plan_paged_attention(call), arrays, stream(), {.signals = {outputs.back()}});
}

}  // namespace chunkdelta
