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

// Accesses of one sort, which may come from many threads unordered: as many as it takes to tell
// whether any of them conflicts with a later access.
struct Recent {
  Access last;
  Access other;    // of the same interval, by another simdgroup than `last`, or else another thread
  Access foreign;  // by an earlier threadgroup (device memory)
};

// What is remembered of one granule: the largest power of two, up to 16 bytes, that divides the
// offset and size of every access to its buffer or variable so far. The first narrower one splits
// them all.
struct Cell {
  Access write;  // any other plain write unordered with it has been reported
  Recent reads;
  Recent atomic_writes, atomic_reads;  // looked at where there are atomics at all
};

enum BufferAccess : int { kRead = 1, kWrite = 2 };

// The cells of a buffer or variable, in order of address.
struct Granules {
  Cell* cells = nullptr;
  int shift = kLargest;  // log2 of the bytes of a granule
  size_t touched = 0;    // granules from here on hold nothing of this launch
  bool atomics = false;  // some access was atomic

  static constexpr int kLargest = 4;

  // The cells of an access; splits granules that it covers in part.
  Cell* at(size_t offset, size_t size) {
    const int fits = __builtin_ctzll(offset | size | (size_t{1} << kLargest));
    if (__builtin_expect(fits < shift, 0)) split(fits);
    const size_t end = (offset + size) >> shift;
    if (end > touched) touched = end;
    return cells + (offset >> shift);
  }
  void split(int to);
};

struct Buffer {
  char *begin = nullptr, *end = nullptr;
  int access = 0;  // BufferAccess bits of this launch's bindings, 0 if it has none
  std::string name;
  Granules granules;  // of the running launch; without cells in fast builds
  uint8_t* defined =
      nullptr;  // bytes with defined content, kept across launches; null in fast builds
};

struct Binding {
  int buffer = -1;
  uint64_t offset = 0;
};

// Forgets all buffers and bindings.
void reset_memory();
// A buffer of `bytes` bytes, its end flush (to 32 bytes) against an inaccessible page.
int create_buffer(uint64_t bytes, const char* name, bool checked, bool defined);
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
