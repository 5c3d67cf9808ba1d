// Runs the encoder of src/metal on a plan given as text, against the recording device.
#include <cstring>
#include <exception>
#include <optional>
#include <sstream>
#include <string>

#include "core/launch_plan.h"
#include "metal/encoder.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"

namespace mx = mlx::core;

namespace {

std::optional<recording::Log> current_log;
std::optional<mx::metal::Device> current_device;
std::optional<mx::metal::CommandEncoder> current_encoder;

std::vector<uint8_t> unhex(const std::string& text) {
  std::vector<uint8_t> bytes;
  for (size_t i = 1; i + 1 < text.size(); i += 2) {  // after a leading x
    bytes.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

template <typename T>
T value_of(const std::string& hex) {
  T value{};
  std::memcpy(&value, unhex(hex).data(), sizeof(T));
  return value;
}

struct Input {
  chunkdelta::Plan plan;
  chunkdelta::PlanArrays arrays;
  chunkdelta::PlanOrder order;
};

// Lines of a word that says what, and its fields: see plan_text in test_encoder.py.
Input parse(std::istream& in) {
  Input out;
  std::string what, text;
  while (in >> what) {
    if (what == "op") {
      in >> out.plan.op;
    } else if (what == "max_threads") {
      in >> current_log->max_threads;
    } else if (what == "architecture") {
      in >> current_device->architecture;
    } else if (what == "array" || what == "waits" || what == "signals") {
      in >> text;
      mx::array a({16}, mx::uint8, nullptr, {});
      a.set_data(mx::allocator::malloc(16));
      current_log->names[a.buffer().ptr()] = text;
      if (what == "array") out.arrays.emplace_back(text, a);
      if (what == "waits") out.order.waits.push_back(a);
      if (what == "signals") out.order.signals.push_back(a);
    } else if (what == "scratch") {
      auto& scratch = out.plan.scratch.emplace_back();
      in >> scratch.role >> scratch.bytes;
    } else if (what == "host_data") {
      auto& data = out.plan.host_data.emplace_back();
      in >> data.role >> text;
      data.bytes = unhex(text);
    } else if (what == "launch") {
      auto& l = out.plan.launches.emplace_back();
      in >> l.source >> l.kernel >> l.grid[0] >> l.grid[1] >> l.grid[2];
      in >> l.threadgroup[0] >> l.threadgroup[1] >> l.threadgroup[2];
    } else if (what == "constant") {
      auto& constant = out.plan.launches.back().constants.emplace_back();
      std::string type;
      in >> constant.index >> type >> text;
      if (type == "bool") constant.value = value_of<bool>(text);
      if (type == "int") constant.value = value_of<int32_t>(text);
      if (type == "uint") constant.value = value_of<uint32_t>(text);
      if (type == "float") constant.value = value_of<float>(text);
    } else if (what == "buffer") {
      auto& buffer = out.plan.launches.back().buffers.emplace_back();
      int access;
      in >> buffer.index >> buffer.role >> access >> buffer.offset_bytes;
      buffer.access = static_cast<chunkdelta::Access>(access);
    } else if (what == "params") {
      auto& params = out.plan.launches.back().params.emplace_back();
      in >> params.index >> text;
      params.bytes = unhex(text);
    } else if (what == "threadgroup") {
      auto& memory = out.plan.launches.back().threadgroup_memory.emplace_back();
      in >> memory.index >> memory.bytes;
    } else {
      throw std::runtime_error("unknown line " + what);
    }
  }
  return out;
}

std::string run(const char* text) {
  current_log.emplace();
  current_device.emplace();
  current_encoder.emplace();
  std::istringstream in(text);
  const Input input = parse(in);
  const mx::Stream stream(0, mx::Device::gpu);
  auto& calls = current_log->calls;
  try {
    calls << "cores " << chunkdelta::gpu_cores(stream) << "\n";
    chunkdelta::encode_plan(input.plan, input.arrays, stream, input.order);
  } catch (const std::exception& error) {
    calls << "error " << error.what() << "\n";
  }
  for (const mx::array& a : current_encoder->temporaries) {
    calls << "content " << current_log->name(a) << " ";
    current_log->hex(a.data<uint8_t>(), std::min<size_t>(a.nbytes(), 1 << 20));
    calls << "\n";
  }
  return calls.str();
}

}  // namespace

recording::Log& recording::log() {
  return *current_log;
}

namespace mlx::core::metal {

Device& device(mlx::core::Device) {
  return *current_device;
}
CommandEncoder& get_command_encoder(Stream) {
  return *current_encoder;
}

}  // namespace mlx::core::metal

// The calls that the encoder made for the plan; valid until the next call.
extern "C" const char* record(const char* plan) {
  static std::string result;
  result = run(plan);
  return result.c_str();
}

// Identifies a source as get_library's builder returned it.
extern "C" uint64_t text_hash(const char* text) {
  return std::hash<std::string>()(text);
}
