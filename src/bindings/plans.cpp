#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "core/launch_plan.h"
#include "core/metal_sources.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {
namespace {

template <typename T>
nb::bytes bytes_of(const T& data) {
  return nb::bytes(data.bytes.data(), data.bytes.size());
}

const char* type_of(const FunctionConstant& constant) {
  constexpr const char* names[] = {"bool", "int", "uint", "float"};
  return names[constant.value.index()];
}

}  // namespace

void bind_plans(nb::module_& plans) {
  nb::enum_<Access>(plans, "Access")
      .value("Read", Access::Read)
      .value("Write", Access::Write)
      .value("ReadWrite", Access::ReadWrite);
  nb::class_<BufferBinding>(plans, "BufferBinding")
      .def_ro("index", &BufferBinding::index)
      .def_ro("role", &BufferBinding::role)
      .def_ro("access", &BufferBinding::access)
      .def_ro("offset_bytes", &BufferBinding::offset_bytes);
  nb::class_<ParamsBinding>(plans, "ParamsBinding")
      .def_ro("index", &ParamsBinding::index)
      .def_prop_ro("bytes", &bytes_of<ParamsBinding>);
  nb::class_<ThreadgroupBinding>(plans, "ThreadgroupBinding")
      .def_ro("index", &ThreadgroupBinding::index)
      .def_ro("bytes", &ThreadgroupBinding::bytes);
  nb::class_<FunctionConstant>(plans, "FunctionConstant")
      .def_ro("index", &FunctionConstant::index)
      .def_ro("value", &FunctionConstant::value)
      .def_prop_ro("type", &type_of);
  nb::class_<Launch>(plans, "Launch")
      .def_ro("source", &Launch::source)
      .def_ro("kernel", &Launch::kernel)
      .def_ro("constants", &Launch::constants)
      .def_ro("buffers", &Launch::buffers)
      .def_ro("params", &Launch::params)
      .def_ro("threadgroup_memory", &Launch::threadgroup_memory)
      .def_prop_ro("grid",
                   [](const Launch& l) { return nb::make_tuple(l.grid[0], l.grid[1], l.grid[2]); })
      .def_prop_ro("threadgroup", [](const Launch& l) {
        return nb::make_tuple(l.threadgroup[0], l.threadgroup[1], l.threadgroup[2]);
      });
  nb::class_<ScratchBuffer>(plans, "ScratchBuffer")
      .def_ro("role", &ScratchBuffer::role)
      .def_ro("bytes", &ScratchBuffer::bytes);
  nb::class_<HostData>(plans, "HostData")
      .def_ro("role", &HostData::role)
      .def_prop_ro("bytes", &bytes_of<HostData>);
  nb::class_<Plan>(plans, "Plan")
      .def_ro("op", &Plan::op)
      .def_ro("launches", &Plan::launches)
      .def_ro("scratch", &Plan::scratch)
      .def_ro("host_data", &Plan::host_data)
      .def_ro("why", &Plan::why)
      .def("__repr__", [](const Plan& plan) {
        std::string text = "Plan(" + plan.op;
        for (const Launch& launch : plan.launches) text += ", " + launch.kernel;
        return text + ")";
      });
  // The embedded text of every source, by the name that launches use.
  plans.def("metal_sources", &metal_sources);
}

}  // namespace chunkdelta
