#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "core/launch_plan.h"
#include "core/metal_sources.h"
#include "metal/encoder.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "ops/checks.h"

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

// The memory that a role names: the bytes from an array's first element to its last, however it is
// strided. Roles with one address share it.
struct RoleMemory {
  uintptr_t address;
  std::vector<uint8_t> bytes;
  int output;    // index of the output that it is, or -1
  bool defined;  // an input, or an output that aliases one
};

struct CapturedPlan {
  Plan plan;
  std::map<std::string, RoleMemory> memory;
};

int64_t extent_bytes(const mx::array& a) {
  if (a.size() == 0) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < a.ndim(); i++) last += (a.shape(i) - 1) * a.strides(i);
  return (last + 1) * static_cast<int64_t>(a.itemsize());
}

// What eval_gpu of the primitive behind `out` would encode, on any machine. The inputs are
// evaluated; the outputs are not.
std::vector<CapturedPlan> capture_plans(const mx::array& out) {
  if (!out.has_primitive()) refuse("capture", "an array that is not evaluated", describe(out));
  std::vector<mx::array> inputs = out.inputs(), outputs;
  mx::eval(inputs);
  for (const mx::array& a : out.outputs())
    outputs.emplace_back(a.shape(), a.dtype(), nullptr, std::vector<mx::array>{});
  PlanCapture capture;
  out.primitive().eval_gpu(inputs, outputs);

  std::vector<CapturedPlan> result;
  for (const auto& [plan, arrays] : capture.plans) {
    CapturedPlan& captured = result.emplace_back(CapturedPlan{plan, {}});
    for (const auto& [role, array] : arrays) {
      const auto* data = array.size() ? array.data<uint8_t>() : nullptr;
      RoleMemory memory{reinterpret_cast<uintptr_t>(data), {}, -1, false};
      memory.bytes.resize(extent_bytes(array));
      for (size_t i = 0; i < outputs.size(); i++) {
        if (outputs[i].id() == array.id()) memory.output = static_cast<int>(i);
      }
      for (const mx::array& input : inputs) {
        memory.defined |= input.size() && input.data<uint8_t>() == data;
      }
      memory.defined |= memory.output < 0;
      if (memory.defined) std::memcpy(memory.bytes.data(), data, memory.bytes.size());
      captured.memory.emplace(role, std::move(memory));
    }
  }
  return result;
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
  nb::class_<RoleMemory>(plans, "RoleMemory")
      .def_ro("address", &RoleMemory::address)
      .def_prop_ro("bytes", &bytes_of<RoleMemory>)
      .def_ro("output", &RoleMemory::output)
      .def_ro("defined", &RoleMemory::defined);
  nb::class_<CapturedPlan>(plans, "CapturedPlan")
      .def_ro("plan", &CapturedPlan::plan)
      .def_ro("memory", &CapturedPlan::memory);
  plans.def("capture", &capture_plans, "out"_a);
  // The embedded text of every source, by the name that launches use.
  plans.def("metal_sources", &metal_sources);
}

}  // namespace chunkdelta
