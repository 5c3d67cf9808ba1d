// Conversion of a Python argument to host metadata.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string_view>

#include "ops/host_metadata.h"

namespace chunkdelta {

// A list, a NumPy array of integers, or an mx.array of integers (which costs one eval, and is
// refused while tracing). Throws where a value is no int32.
HostInt32 host_int32(std::string_view op, std::string_view name, nanobind::handle value);

// The same for an argument that may be None.
std::optional<HostInt32> optional_host_int32(std::string_view op, std::string_view name,
                                             nanobind::handle value);

}  // namespace chunkdelta
