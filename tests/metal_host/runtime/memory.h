// Device buffers and threadgroup memory, and the shadow state that checks every access to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"

namespace metal_host {

// One access: 12 bytes. interval 0 means none.
struct Access {
  uint32_t interval;
  uint16_t thread;  // bit 15: atomic
  uint16_t simd_barriers;
  uint32_t pc;  // offset in the module
};

// What is remembered of one granule (an element of a buffer, a byte of threadgroup memory): enough
// to find a conflict with a later access if any earlier one conflicts.
struct Cell {
  Access write;
  Access other_atomic;  // last atomic write by another thread than `write`
  Access read;
  Access other_read;    // a read of the same interval by another simdgroup, or another lane
  Access foreign_read;  // a read by an earlier threadgroup (device memory)
};

enum BufferAccess : int { kRead = 1, kWrite = 2 };

struct Buffer {
  char *begin = nullptr, *end = nullptr;
  int access = 0;  // BufferAccess bits of this launch's bindings, 0 if it has none
  int shift = 0;   // log2 of the granule
  std::string name;
  Cell* cells = nullptr;       // of the running launch; none in fast builds
  uint8_t* defined = nullptr;  // granules with defined content, kept across launches
  size_t granules = 0;
};

struct Binding {
  int buffer = -1;
  uint64_t offset = 0;
};

// Forgets all buffers and bindings.
void reset_memory();
// A buffer of `bytes` bytes, its end flush (to 32 bytes) against an inaccessible page.
int create_buffer(uint64_t bytes, const char* name, int shift, bool checked, bool defined);
Buffer& buffer_at(int id);
void unbind_all();
void bind(int index, int buffer, uint64_t offset, int access);
void set_threadgroup_argument(int index, uint64_t bytes);
const Binding* binding_at(int index);
size_t num_bindings();

// Function constants without a value, of the next launches.
void clear_unset_constants();

// Between launches and between threadgroups.
void begin_launch();
void begin_threadgroup();

// Every checked load and store goes through here.
void check_access(const volatile void* address, size_t size, bool write, bool atomic, uint64_t pc);
// Names an address for a report.
const char* describe(const void* address, char* text, size_t size);

}  // namespace metal_host
