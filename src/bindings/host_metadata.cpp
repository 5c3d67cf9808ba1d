#include "bindings/host_metadata.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "mlx/array.h"
#include "mlx/transforms.h"

namespace nb = nanobind;

namespace chunkdelta {
namespace {

std::string text(const nb::object& value) {
  return nb::str(value).c_str();
}

nb::object as_numpy(std::string_view op, std::string_view name, nb::handle value) {
  const nb::module_ np = nb::module_::import_("numpy");
  if (nb::isinstance<mx::array>(value)) {
    mx::array array = nb::cast<mx::array>(value);
    if (array.is_tracer()) {
      refuse(op,
             std::string(name) +
                 " as host data (list or NumPy array): it decides shapes and is "
                 "read when the graph is built",
             "an mx.array that is being traced");
    }
    if (!mx::issubdtype(array.dtype(), mx::integer)) {
      refuse(op, std::string(name) + " of an integer dtype", describe(array));
    }
    array.eval();
  }
  return np.attr("asarray")(value);
}

}  // namespace

HostInt32 host_int32(std::string_view op, std::string_view name, nb::handle value) {
  nb::object array = as_numpy(op, name, value);
  const auto kind = nb::cast<std::string>(array.attr("dtype").attr("kind"));
  const auto size = nb::cast<int64_t>(array.attr("size"));
  // An empty list becomes a float64 array of no values.
  if (kind != "i" && kind != "u" && size > 0) {
    refuse(op, std::string(name) + " of an integer dtype",
           text(array.attr("dtype")) + " " + text(array.attr("shape")));
  }
  if (size > 0 && nb::cast<int64_t>(array.attr("dtype").attr("itemsize")) >= 4) {
    const nb::int_ low = nb::int_(array.attr("min")());
    const nb::int_ high = nb::int_(array.attr("max")());
    if (low < nb::int_(INT32_MIN) || nb::int_(INT32_MAX) < high) {
      refuse(op, std::string(name) + " within int32",
             "values from " + text(low) + " to " + text(high));
    }
  }
  array = nb::module_::import_("numpy").attr("ascontiguousarray")(array, "int32");
  const auto view = nb::cast<nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>>(array);
  HostInt32 result;
  result.values.assign(view.data(), view.data() + view.size());
  for (size_t i = 0; i < view.ndim(); i++) result.shape.push_back(view.shape(i));
  return result;
}

std::optional<HostInt32> optional_host_int32(std::string_view op, std::string_view name,
                                             nb::handle value) {
  if (value.is_none()) return std::nullopt;
  return host_int32(op, name, value);
}

}  // namespace chunkdelta
