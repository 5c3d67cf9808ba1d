#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/host_metadata.h"
#include "core/compute.h"
#include "core/page_codec.h"
#include "core/paged_attention_schedule.h"
#include "ops/append_kv.h"
#include "ops/merge_states.h"
#include "ops/paged_attention.h"
#include "ops/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {
namespace {

PageFormat page_format(const std::string& name) {
  const auto format = parse_page_format(name);
  if (format) return *format;
  std::string known;
  for (const auto& f : page_formats()) known += (known.empty() ? "" : ", ") + std::string(f.name);
  refuse("KVPages", "a page format in {" + known + "}", "'" + name + "'");
}

// What Python holds: constness has no meaning there.
struct Metadata {
  std::shared_ptr<const AttentionMetadata> value;
};
struct Slots {
  std::shared_ptr<const SlotMapping> value;
};

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("tracing", &tracing);
  m.def("is_available", [](const mx::array& a) { return a.is_available(); });
  m.def("page_formats", [] {
    nb::list names;
    for (const auto& f : page_formats()) names.append(f.name);
    return names;
  });
  m.def("page_row_bytes", [](const std::string& format, int head_dim) {
    return page_row_bytes(page_format(format), head_dim);
  });
  m.def("slab_shape", [](const std::string& format, int pages, int heads, int page_size, int D) {
    nb::list shape;
    for (int n : slab_shape(page_format(format), pages, heads, page_size, D)) shape.append(n);
    return shape;
  });

  nb::class_<Slots>(m, "SlotMapping")
      .def("__init__",
           [](Slots* self, nb::handle slots) {
             new (self) Slots{make_slot_mapping(host_int32("append_kv", "slot_mapping", slots))};
           })
      .def("__len__", [](const Slots& s) { return s.value->slots.size(); })
      .def_prop_ro("max_slot", [](const Slots& s) { return s.value->max_slot; })
      .def("touches", [](const Slots& s, int64_t begin, int64_t end) {
        if (s.value->max_slot < begin || s.value->min_slot >= end) return false;
        for (int32_t slot : s.value->slots) {
          if (slot >= begin && slot < end) return true;
        }
        return false;
      });
  m.def(
      "append_kv",
      [](const mx::array& slab, const mx::array& x, const Slots& slots, int64_t first_page,
         const std::string& format, int head_dim, const std::vector<mx::array>& reads,
         mx::StreamOrDevice s) {
        return append_kv(slab, x, slots.value, first_page, page_format(format), head_dim, reads, s);
      },
      "slab"_a, "x"_a, "slots"_a, "first_page"_a, "format"_a, "head_dim"_a, "reads"_a,
      "stream"_a.none());
  m.def(
      "copy_pages",
      [](const std::vector<mx::array>& slabs, size_t slab, const std::vector<int64_t>& first_page,
         const std::vector<int32_t>& source, const std::vector<int32_t>& target,
         const std::vector<mx::array>& reads, mx::StreamOrDevice s) {
        return copy_pages(slabs, slab, first_page, source, target, reads, s);
      },
      "slabs"_a, "slab"_a, "first_page"_a, "source"_a, "target"_a, "reads"_a, "stream"_a.none());

  nb::class_<Metadata>(m, "AttentionMetadata")
      .def(
          "__init__",
          [](Metadata* self, nb::handle block_table, nb::handle seq_lens, nb::handle cu_seqlens_q,
             int page_size) {
            constexpr auto op = "paged_attention";
            new (self) Metadata{make_attention_metadata(
                host_int32(op, "block_table", block_table), host_int32(op, "seq_lens", seq_lens),
                host_int32(op, "cu_seqlens_q", cu_seqlens_q), page_size)};
          },
          nb::kw_only(), "block_table"_a, "seq_lens"_a, "cu_seqlens_q"_a, "page_size"_a)
      .def_prop_ro("page_size", [](const Metadata& a) { return a.value->page_size; })
      .def_prop_ro("num_tokens", [](const Metadata& a) { return a.value->cu_seqlens_q.back(); })
      .def_prop_ro("max_page", [](const Metadata& a) { return a.value->max_page; });
  m.def(
      "paged_attention",
      [](const mx::array& q, const std::vector<mx::array>& k, const std::vector<mx::array>& v,
         const std::vector<int64_t>& first_page, const Metadata& metadata,
         const std::string& k_format, const std::string& v_format, std::optional<float> scale,
         bool causal, std::optional<int> window, std::optional<float> softcap,
         const std::optional<mx::array>& sinks, bool return_lse, mx::StreamOrDevice s) {
        const PagedAttentionSettings settings{page_format(k_format),
                                              page_format(v_format),
                                              scale,
                                              causal,
                                              window,
                                              softcap,
                                              return_lse};
        return paged_attention(q, k, v, first_page, metadata.value, settings, sinks, s);
      },
      "q"_a, "k"_a, "v"_a, "first_page"_a, "metadata"_a, "k_format"_a, "v_format"_a,
      "scale"_a.none(), "causal"_a, "window"_a.none(), "softcap"_a.none(), "sinks"_a.none(),
      "return_lse"_a, "stream"_a.none());
  m.def("merge_states",
        static_cast<std::pair<mx::array, mx::array> (*)(const mx::array&, const mx::array&,
                                                        mx::StreamOrDevice)>(&merge_states),
        "outs"_a, "lses"_a, "stream"_a.none());
  m.def(
      "paged_attention_workspace",
      [](const std::vector<int32_t>& seq_lens, const std::vector<int32_t>& cu_seqlens_q,
         int num_q_heads, int num_kv_heads, int head_dim, bool causal, int window, int threads) {
        PagedAttentionOptions options{};
        options.num_q_heads = num_q_heads;
        options.num_kv_heads = num_kv_heads;
        options.head_dim = head_dim;
        options.causal = causal;
        options.window = window;
        return paged_attention_workspace(options, seq_lens, cu_seqlens_q, threads);
      },
      "seq_lens"_a, "cu_seqlens_q"_a, "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a, "causal"_a,
      "window"_a, "threads"_a);
  m.def(
      "explain_paged_attention",
      [](const std::vector<int32_t>& seq_lens, const std::vector<int32_t>& cu_seqlens_q,
         int num_q_heads, int num_kv_heads, int head_dim, bool causal, int window) {
        PagedAttentionOptions options{};
        options.num_q_heads = num_q_heads;
        options.num_kv_heads = num_kv_heads;
        options.head_dim = head_dim;
        options.causal = causal;
        options.window = window;
        return explain_paged_attention(options, seq_lens, cu_seqlens_q);
      },
      "seq_lens"_a, "cu_seqlens_q"_a, "num_q_heads"_a, "num_kv_heads"_a, "head_dim"_a, "causal"_a,
      "window"_a);
}

}  // namespace chunkdelta
