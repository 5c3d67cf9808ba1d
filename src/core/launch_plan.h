// Launch plans: what a GPU op does, as plain data.
//
// A pure function per op (plan_<op> in core/plans/) turns shapes and host metadata into a Plan: the
// launches in order, every grid, binding, constant and byte of scratch decided here. Three readers
// execute or check the same value: the encoder in src/metal (macOS), the host runner in
// tests/metal_host (the real .metal sources on any machine) and `chunkdelta.explain`.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

namespace chunkdelta {

enum class Access : uint8_t { Read, Write, ReadWrite };

// A [[buffer(index)]] argument. `role` names an array of the op ("q", "k_pages", "o"), one of the
// plan's scratch buffers or one of its host data; the executor owns the mapping from role to
// memory.
struct BufferBinding {
  int index;
  std::string role;
  Access access;
  int64_t offset_bytes = 0;
};

// A params struct of metal/*/params.h, passed by value (set_bytes, at most 4 KiB).
struct ParamsBinding {
  int index;
  std::vector<uint8_t> bytes;
};

// A threadgroup-memory argument [[threadgroup(index)]], where a kernel takes its size at launch.
struct ThreadgroupBinding {
  int index;
  int64_t bytes;
};

struct FunctionConstant {
  int index;
  std::variant<bool, int32_t, uint32_t, float> value;
};

struct Launch {
  std::string source;  // path below metal/ without suffix: "gated_delta/chunk"
  std::string kernel;  // host_name of the instantiation: "gated_delta_prep_bf16_c16"
  std::vector<FunctionConstant> constants;
  std::vector<BufferBinding> buffers;
  std::vector<ParamsBinding> params;
  std::vector<ThreadgroupBinding> threadgroup_memory;
  std::array<uint32_t, 3> grid;         // in threadgroups
  std::array<uint32_t, 3> threadgroup;  // in threads
};

struct ScratchBuffer {
  std::string role;
  int64_t bytes;
};

// Small host metadata (cu_seqlens, block_table ...) uploaded with the plan.
struct HostData {
  std::string role;
  std::vector<uint8_t> bytes;
};

struct Plan {
  std::string op;
  std::vector<Launch> launches;
  std::vector<ScratchBuffer> scratch;
  std::vector<HostData> host_data;
  std::string why;  // one sentence: which kernel and tile, and for what reason (shown by explain)
};

template <typename T>
std::vector<uint8_t> to_bytes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<uint8_t> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

template <typename T>
std::vector<uint8_t> to_bytes(const std::vector<T>& values) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace chunkdelta
