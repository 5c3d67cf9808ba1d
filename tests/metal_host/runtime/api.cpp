// The runtime's interface to Python (native.py), plain C for ctypes.
#include <cstring>
#include <map>
#include <string>

#include "launch.h"
#include "memory.h"

using namespace metal_host;

namespace metal_host {
bool launch(const mh_entry* entry, const uint32_t* grid, const uint32_t* threadgroup);
}

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
struct Value {
  char bytes[8];
  int size;
};
std::map<int, Value> constants;
std::string mutated_file;
}  // namespace

EXPORT void mh_reset() {
  reset_memory();
  reports().clear();
}
EXPORT void mh_options(int poison, uint32_t order, uint32_t max_threads, uint64_t threadgroup_limit,
                       int strict_simd, int lockstep, int flush_denormals, double cpu_seconds) {
  state.options = {poison,           order,         max_threads,          threadgroup_limit,
                   strict_simd != 0, lockstep != 0, flush_denormals != 0, cpu_seconds};
}
EXPORT int mh_create_buffer(uint64_t bytes, const char* name, int checked, int defined) {
  return create_buffer(bytes, name, checked != 0, defined != 0);
}
EXPORT void* mh_buffer_data(int id) {
  return buffer_at(id).begin;
}
EXPORT void mh_unbind_all() {
  unbind_all();
}
EXPORT void mh_bind(int index, int buffer, uint64_t offset, int access) {
  bind(index, buffer, offset, access);
}
EXPORT void mh_set_threadgroup_argument(int index, uint64_t bytes) {
  set_threadgroup_argument(index, bytes);
}

// Bytes of a buffer that never got defined content, and where the first lies.
EXPORT uint64_t mh_undefined_bytes(int id, uint64_t* first) {
  const Buffer& b = buffer_at(id);
  const auto bytes = static_cast<uint64_t>(b.end - b.begin);
  uint64_t count = 0;
  *first = 0;
  for (uint64_t i = 0; b.defined && i < bytes; i++) {
    if (b.defined[i]) continue;
    if (!count++) *first = i;
  }
  return count;
}

// Function constants are read while a kernel's shared object is loaded.
EXPORT void mh_clear_constants() {
  constants.clear();
}
EXPORT void mh_set_constant(int index, const void* bytes, int size) {
  Value v{};
  memcpy(v.bytes, bytes, static_cast<size_t>(size));
  v.size = size;
  constants[index] = v;
}
EXPORT int mh_rt_constant(int index, void* value, int size) {
  memset(value, 0, static_cast<size_t>(size));
  const auto it = constants.find(index);
  if (it == constants.end()) return 0;
  memcpy(value, it->second.bytes, static_cast<size_t>(size));
  return 1;
}

EXPORT void mh_clear_unset_constants() {
  clear_unset_constants();
}

EXPORT void mh_set_mutation(const char* file, int line, int column, int skip, int dropped_flags) {
  mutated_file = file ? file : "";
  state.mutation.site = {file ? mutated_file.c_str() : nullptr, line, column};
  state.mutation.skip = skip != 0;
  state.mutation.dropped_flags = dropped_flags;
}

EXPORT int mh_launch(const mh_entry* entry, const uint32_t* grid, const uint32_t* threadgroup) {
  reports().clear();
  return launch(entry, grid, threadgroup);
}
EXPORT size_t mh_num_reports() {
  return reports().size();
}
EXPORT const Report* mh_reports() {
  return reports().data();
}
EXPORT const Counters* mh_counters() {
  return &state.counters;
}
EXPORT size_t mh_num_barrier_sites() {
  return state.barrier_sites.size();
}
EXPORT const BarrierSite* mh_barrier_sites() {
  return state.barrier_sites.data();
}
