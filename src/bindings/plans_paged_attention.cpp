#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/host_metadata.h"
#include "bindings/plans.h"
#include "core/page_codec.h"
#include "core/plans/attention_tiles.h"
#include "core/plans/merge_states.h"
#include "core/plans/paged_attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {
namespace {

constexpr auto op = "paged_attention";

PageFormat parse_format(const std::string& name) {
  if (const auto format = parse_page_format(name)) return *format;
  refuse(op, "a page format", "'" + name + "'");
}

}  // namespace

void bind_plan_paged_attention(nb::module_& plans) {
  plans.def(
      "paged_attention",
      [](const std::string& dtype, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
         int32_t page_size, const std::string& k_format, const std::string& v_format,
         std::vector<int32_t> slab_pages, nb::handle block_table, nb::handle seq_lens,
         nb::handle cu_seqlens_q, float scale, bool causal, int32_t window, float softcap,
         bool sinks, bool return_lse, double milliseconds, int64_t gathered_bytes,
         int32_t gpu_cores) {
        PagedAttentionCall call;
        call.dtype = parse_dtype(op, dtype);
        call.num_q_heads = num_q_heads;
        call.num_kv_heads = num_kv_heads;
        call.head_dim = head_dim;
        call.page_size = page_size;
        call.k_format = parse_format(k_format);
        call.v_format = parse_format(v_format);
        call.slab_pages = std::move(slab_pages);
        call.block_table = host_int32(op, "block_table", block_table).values;
        call.seq_lens = host_int32(op, "seq_lens", seq_lens).values;
        call.cu_seqlens_q = host_int32(op, "cu_seqlens_q", cu_seqlens_q).values;
        call.scale = scale;
        call.causal = causal;
        call.window = window;
        call.softcap = softcap;
        call.sinks = sinks;
        call.return_lse = return_lse;
        call.budget.milliseconds = milliseconds;
        call.budget.gathered_bytes = gathered_bytes;
        call.gpu_cores = gpu_cores;
        return plan_paged_attention(call);
      },
      "dtype"_a, "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a, "page_size"_a, "k_format"_a,
      "v_format"_a, "slab_pages"_a, "block_table"_a, "seq_lens"_a, "cu_seqlens_q"_a, nb::kw_only(),
      "scale"_a, "causal"_a = true, "window"_a = 0, "softcap"_a = 0.0f, "sinks"_a = false,
      "return_lse"_a = false, "milliseconds"_a = PagedAttentionBudget{}.milliseconds,
      "gathered_bytes"_a = PagedAttentionBudget{}.gathered_bytes, "gpu_cores"_a = 8);

  plans.def(
      "merge_states",
      [](const std::string& dtype, int32_t splits, int32_t tokens, int32_t heads,
         int32_t head_dim) {
        return plan_merge_states(
            {parse_dtype("merge_states", dtype), splits, tokens, heads, head_dim});
      },
      "dtype"_a, "splits"_a, "tokens"_a, "heads"_a, "head_dim"_a);

  // The row tiles that flash attention has, by dtype and head dim.
  nb::class_<AttentionTileShape>(plans, "AttentionTileShape")
      .def_prop_ro("dtype", [](const AttentionTileShape& t) { return dtype_name(t.dtype); })
      .def_ro("head_dim", &AttentionTileShape::head_dim)
      .def_ro("rows", &AttentionTileShape::rows)
      .def_ro("keys", &AttentionTileShape::keys)
      .def_prop_ro("reason", [](const AttentionTileShape& t) { return t.reason; })
      .def_prop_ro("threads", &AttentionTileShape::threads)
      .def_prop_ro("registers", &AttentionTileShape::registers)
      .def_prop_ro("threadgroup_bytes", &AttentionTileShape::threadgroup_bytes)
      .def_prop_ro("source", &AttentionTileShape::source)
      .def_prop_ro("kernel", &AttentionTileShape::kernel);
  plans.def("attention_tile_table", &attention_tile_table);
}

}  // namespace chunkdelta
