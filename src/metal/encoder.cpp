#include "metal/encoder.h"

#include <stdexcept>

namespace chunkdelta {
namespace {

constexpr int BASE_CHIP_CORES = 7;

thread_local PlanCapture* capture = nullptr;

}  // namespace

PlanCapture::PlanCapture() : outer_(capture) {
  capture = this;
}

PlanCapture::~PlanCapture() {
  capture = outer_;
}

}  // namespace chunkdelta

#ifdef _METAL_

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>

#include "core/metal_sources.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"
#include "mlx/backend/metal/utils.h"

namespace chunkdelta {

namespace mx = mlx::core;

namespace {

constexpr size_t MAX_PARAMS_BYTES = 4096;  // of setBytes
constexpr int TOKEN_INDEX = 30;            // the last buffer index; no kernel has it

[[noreturn]] void fail(const Plan& plan, const std::string& what) {
  throw std::logic_error("[" + plan.op + "] launch plan " + what);
}

MTL::DataType metal_type(const FunctionConstant& constant) {
  constexpr MTL::DataType types[] = {MTL::DataTypeBool, MTL::DataTypeInt, MTL::DataTypeUInt,
                                     MTL::DataTypeFloat};
  return types[constant.value.index()];
}

// MLX caches pipelines by this name, so it names every specialisation.
std::string pipeline_name(const Launch& launch) {
  std::ostringstream name;
  name << std::hexfloat << launch.kernel;
  for (const FunctionConstant& constant : launch.constants) {
    name << "_" << constant.index << "=";
    std::visit([&](auto value) { name << value; }, constant.value);
  }
  return name.str();
}

MTL::ComputePipelineState* pipeline(const Plan& plan, const Launch& launch,
                                    mx::metal::Device& device) {
  const auto source = metal_sources().find(launch.source);
  if (source == metal_sources().end()) fail(plan, "names the unknown source " + launch.source);
  MTL::Library* library =
      device.get_library("chunkdelta/" + launch.source, [&source] { return source->second; });
  mx::metal::MTLFCList constants;
  for (const FunctionConstant& constant : launch.constants) {
    const void* value = std::visit([](const auto& v) -> const void* { return &v; }, constant.value);
    constants.emplace_back(value, metal_type(constant), constant.index);
  }
  return device.get_kernel(launch.kernel, library, pipeline_name(launch), constants);
}

// Bytes that live until the command buffer has run; at least one, as no bytes cannot be bound.
mx::array temporary(const Plan& plan, const std::string& role, int64_t bytes,
                    mx::metal::CommandEncoder& encoder) {
  if (bytes < 0 || bytes > std::numeric_limits<mx::ShapeElem>::max()) {
    fail(plan, "asks for " + std::to_string(bytes) + " bytes for " + role);
  }
  const auto length = static_cast<mx::ShapeElem>(std::max<int64_t>(bytes, 1));
  mx::array array({length}, mx::uint8, nullptr, {});
  array.set_data(mx::allocator::malloc(length));
  encoder.add_temporary(array);
  return array;
}

MTL::Size size(const std::array<uint32_t, 3>& n) {
  return MTL::Size(n[0], n[1], n[2]);
}

}  // namespace

void encode_plan(const Plan& plan, const PlanArrays& arrays, mx::Stream stream,
                 const PlanOrder& order) {
  if (capture) {
    capture->plans.emplace_back(plan, arrays);
    return;
  }
  mx::metal::Device& device = mx::metal::device(stream.device);
  mx::metal::CommandEncoder& encoder = mx::metal::get_command_encoder(stream);

  std::map<std::string, mx::array> memory(arrays.begin(), arrays.end());
  for (const ScratchBuffer& scratch : plan.scratch) {
    memory.emplace(scratch.role, temporary(plan, scratch.role, scratch.bytes, encoder));
  }
  for (const HostData& data : plan.host_data) {
    mx::array array = temporary(plan, data.role, static_cast<int64_t>(data.bytes.size()), encoder);
    if (!data.bytes.empty()) {
      std::memcpy(array.data<uint8_t>(), data.bytes.data(), data.bytes.size());
    }
    memory.emplace(data.role, array);
  }

  if (plan.launches.empty()) return;
  for (const mx::array& token : order.waits) encoder.set_input_array(token, TOKEN_INDEX);
  for (const mx::array& token : order.signals) encoder.register_output_array(token);
  for (const Launch& launch : plan.launches) {
    MTL::ComputePipelineState* kernel = pipeline(plan, launch, device);
    encoder.set_compute_pipeline_state(kernel);
    for (const BufferBinding& buffer : launch.buffers) {
      const auto bound = memory.find(buffer.role);
      if (buffer.index >= TOKEN_INDEX) fail(plan, "binds the index of tokens");
      if (bound == memory.end()) fail(plan, "binds the unknown role " + buffer.role);
      // MLX puts barriers between dispatches where these calls name the same buffer.
      if (buffer.access == Access::Read) {
        encoder.set_input_array(bound->second, buffer.index, buffer.offset_bytes);
      } else {
        encoder.set_output_array(bound->second, buffer.index, buffer.offset_bytes);
      }
    }
    for (const ParamsBinding& params : launch.params) {
      if (params.bytes.empty() || params.bytes.size() > MAX_PARAMS_BYTES) {
        fail(plan, "passes params of " + std::to_string(params.bytes.size()) + " bytes");
      }
      encoder.set_vector_bytes(params.bytes, params.index);
    }
    for (const ThreadgroupBinding& group_memory : launch.threadgroup_memory) {
      encoder.set_threadgroup_memory_length(group_memory.bytes, group_memory.index);
    }
    // The compiler may allow fewer threads than 1,024 where a kernel needs many registers.
    mx::check_kernel_threadgroup_size(kernel, size(launch.threadgroup), launch.kernel);
    encoder.dispatch_threadgroups(size(launch.grid), size(launch.threadgroup));
  }
}

int gpu_cores(mx::Stream stream) {
  if (capture) return BASE_CHIP_CORES;
  const std::string& architecture = mx::metal::device(stream.device).get_architecture();
  switch (architecture.empty() ? 'g' : architecture.back()) {
    case 'd':
      return 48;
    case 'c':
      return 24;
    case 's':
      return 14;
    case 'p':
      return 4;
    default:
      return BASE_CHIP_CORES;
  }
}

}  // namespace chunkdelta

#else

namespace chunkdelta {

void encode_plan(const Plan& plan, const PlanArrays& arrays, mlx::core::Stream, const PlanOrder&) {
  if (capture) {
    capture->plans.emplace_back(plan, arrays);
    return;
  }
  throw std::runtime_error("[" + plan.op + "] expected a build with Metal; got one without");
}

int gpu_cores(mlx::core::Stream) {
  return BASE_CHIP_CORES;
}

}  // namespace chunkdelta

#endif
