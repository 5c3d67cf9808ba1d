#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/host_metadata.h"
#include "bindings/plans.h"
#include "core/page_codec.h"
#include "core/plans/append_kv.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_plan_append_kv(nb::module_& plans) {
  plans.def(
      "append_kv",
      [](const std::string& dtype, const std::string& format, nb::handle slots, int num_kv_heads,
         int head_dim, int page_size, int64_t first_page, int64_t num_pages, bool aligned) {
        const auto parsed = parse_page_format(format);
        if (!parsed) refuse("append_kv", "a page format", "'" + format + "'");
        const AppendOptions options{parse_dtype("append_kv", dtype),
                                    *parsed,
                                    num_kv_heads,
                                    head_dim,
                                    page_size,
                                    first_page,
                                    num_pages};
        return plan_append_kv(options, host_int32("append_kv", "slot_mapping", slots).values,
                              aligned);
      },
      "dtype"_a, "format"_a, "slot_mapping"_a, nb::kw_only(), "num_kv_heads"_a, "head_dim"_a,
      "page_size"_a = 64, "first_page"_a = 0, "num_pages"_a, "aligned"_a = true);
  plans.def(
      "copy_pages",
      [](int64_t page_bytes, std::vector<int64_t> first_page, int32_t slab, nb::handle source,
         nb::handle target) {
        return plan_copy_pages({page_bytes, std::move(first_page), slab,
                                host_int32("copy_pages", "source", source).values,
                                host_int32("copy_pages", "target", target).values});
      },
      "page_bytes"_a, "first_page"_a, "slab"_a, "source"_a, "target"_a);
}

}  // namespace chunkdelta
