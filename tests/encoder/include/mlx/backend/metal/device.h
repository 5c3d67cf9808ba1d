// Stand-in for MLX's Metal device: writes down what the encoder asks for. The declarations are
// those of mlx 0.32.4 that src/metal/encoder.cpp uses; that they are MLX's is what the cross-link
// checks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "mlx/array.h"
#include "mlx/device.h"
#include "mlx/stream.h"

namespace NS {
using UInteger = unsigned long;
}

namespace MTL {

enum DataType { DataTypeFloat = 3, DataTypeInt = 29, DataTypeUInt = 33, DataTypeBool = 53 };

struct Size {
  Size(unsigned long w, unsigned long h, unsigned long d) : width(w), height(h), depth(d) {}
  unsigned long width, height, depth;
};

struct Library {
  std::string name;
};

struct ComputePipelineState {
  std::string name;
  unsigned long max_threads = 1024;
  unsigned long maxTotalThreadsPerThreadgroup() const { return max_threads; }
};

}  // namespace MTL

namespace recording {

// What happened, a call a line; and the state that decides it.
struct Log {
  std::ostringstream calls;
  std::map<const void*, std::string> names;  // of buffers
  int temporaries = 0;
  unsigned long max_threads = 1024;

  std::string name(const mlx::core::array& a) const {
    const auto found = names.find(a.buffer().ptr());
    return found == names.end() ? "unknown" : found->second;
  }
  void hex(const void* data, size_t bytes) {
    constexpr char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < bytes; i++) {
      const uint8_t byte = static_cast<const uint8_t*>(data)[i];
      calls << digits[byte >> 4] << digits[byte & 15];
    }
  }
};
Log& log();

}  // namespace recording

namespace mlx::core::metal {

using MTLFCList = std::vector<std::tuple<const void*, MTL::DataType, NS::UInteger>>;

class CommandEncoder {
 public:
  void set_compute_pipeline_state(MTL::ComputePipelineState* kernel) {
    recording::log().calls << "pipeline " << kernel->name << "\n";
  }
  // Barriers as in MLX: before a dispatch that reads or writes what an earlier one wrote, or writes
  // what an earlier one read.
  void set_input_array(const array& a, int idx, int64_t offset = 0) {
    record("input", a, idx, offset);
    touch(a);
  }
  void set_output_array(array& a, int idx, int64_t offset = 0) {
    record("output", a, idx, offset);
    touch(a);
    write(a);
  }
  void register_output_array(const array& a) {
    recording::log().calls << "signal " << recording::log().name(a) << "\n";
    write(a);
  }
  void set_vector_bytes(const std::vector<uint8_t>& bytes, int idx) {
    recording::log().calls << "bytes " << idx << " ";
    recording::log().hex(bytes.data(), bytes.size());
    recording::log().calls << "\n";
  }
  void set_threadgroup_memory_length(size_t length, int idx) {
    recording::log().calls << "threadgroup " << idx << " " << length << "\n";
  }
  void dispatch_threadgroups(MTL::Size grid, MTL::Size group) {
    auto& calls = recording::log().calls;
    if (needs_barrier_) {
      calls << "barrier\n";
      previous_inputs_.clear();
      previous_outputs_.clear();
      needs_barrier_ = false;
    }
    previous_inputs_.merge(next_inputs_);
    previous_outputs_.merge(next_outputs_);
    next_inputs_.clear();
    next_outputs_.clear();
    calls << "dispatch " << grid.width << " " << grid.height << " " << grid.depth << " "
          << group.width << " " << group.height << " " << group.depth << "\n";
  }
  // Kept until the end, as MLX keeps them until the command buffer has run.
  void add_temporary(array a) {
    auto& log = recording::log();
    const std::string name = "temporary" + std::to_string(log.temporaries++);
    log.names[a.buffer().ptr()] = name;
    log.calls << "temporary " << name << " " << a.nbytes() << "\n";
    temporaries.push_back(std::move(a));
  }
  std::vector<array> temporaries;

 private:
  static void record(const char* call, const array& a, int idx, int64_t offset) {
    recording::log().calls << call << " " << idx << " " << recording::log().name(a) << " " << offset
                           << "\n";
  }
  void touch(const array& a) {
    needs_barrier_ |= previous_outputs_.contains(a.buffer().ptr());
    next_inputs_.insert(a.buffer().ptr());
  }
  void write(const array& a) {
    needs_barrier_ |= previous_inputs_.contains(a.buffer().ptr());
    next_outputs_.insert(a.buffer().ptr());
  }
  bool needs_barrier_ = false;
  std::unordered_set<const void*> previous_inputs_, previous_outputs_, next_inputs_, next_outputs_;
};

class Device {
 public:
  MTL::Library* get_library(const std::string& name, const std::function<std::string()>& builder) {
    auto [library, missing] = libraries_.try_emplace(name, MTL::Library{name});
    recording::log().calls << "library " << name;
    if (missing) recording::log().calls << " " << std::hash<std::string>()(builder());
    recording::log().calls << "\n";
    return &library->second;
  }
  // Values are read when MLX builds the pipeline, during the call.
  MTL::ComputePipelineState* get_kernel(const std::string& base_name, MTL::Library* library,
                                        const std::string& hash_name, const MTLFCList& constants) {
    auto& calls = recording::log().calls;
    calls << "kernel " << base_name << " " << library->name << " " << hash_name;
    for (const auto& [value, type, index] : constants) {
      calls << " " << index << ":" << type << ":";
      recording::log().hex(value, type == MTL::DataTypeBool ? 1 : 4);
    }
    calls << "\n";
    auto& kernel = kernels_[hash_name];
    kernel.name = hash_name;
    kernel.max_threads = recording::log().max_threads;
    return &kernel;
  }
  const std::string& get_architecture() const { return architecture; }
  std::string architecture = "applegpu_g13g";

 private:
  std::map<std::string, MTL::Library> libraries_;
  std::map<std::string, MTL::ComputePipelineState> kernels_;
};

Device& device(mlx::core::Device);
CommandEncoder& get_command_encoder(Stream s);

}  // namespace mlx::core::metal
