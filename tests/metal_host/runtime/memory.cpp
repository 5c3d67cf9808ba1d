#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "fiber.h"
#include "launch.h"

namespace metal_host {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSlot = 64 << 10;          // address granularity of the buffer look-up
constexpr size_t kArena = size_t{1} << 37;  // reserved, not committed
constexpr size_t kEndAlignment = 32;        // of the largest Metal scalar or vector type
constexpr size_t kThreadgroupArena = 256 << 10;
constexpr size_t kRedZone = 64;
constexpr uint16_t kAtomic = 0x8000;

char* arena;
size_t next_slot = 1;
std::vector<uint16_t> slot_owner;  // slot -> buffer id + 1
std::vector<Buffer> buffers;
std::vector<Binding> bindings;
std::vector<uint64_t> threadgroup_arguments;

struct Variable {
  const char* name;
  int id;
  char *begin, *end;
  Granules granules;
};
char* threadgroup_arena;
uint8_t variable_at[kThreadgroupArena / 16];  // variable number + 1
std::vector<Variable> variables;
size_t variables_end;                // offset of the first free byte of the arena
uint64_t variable_bytes;             // what the threadgroup has declared so far
Cell* threadgroup_cells;             // one for each byte of the arena
std::map<int, int> variable_shifts;  // by id: as narrow as an earlier threadgroup needed

struct UnsetConstant {
  const char *name, *begin, *end;
  int index;
};
std::vector<UnsetConstant> unset_constants;

alignas(64) char unbound_reference[4096];

void set_up() {
  if (arena) return;
  arena = map_memory(kArena, PROT_NONE);
  threadgroup_arena = map_memory(kThreadgroupArena + 2 * kPage, PROT_READ | PROT_WRITE);
  threadgroup_cells =
      reinterpret_cast<Cell*>(map_memory(kThreadgroupArena * sizeof(Cell), PROT_READ | PROT_WRITE));
  slot_owner.assign(1, 0);
}

// Room for a cell for each byte; untouched pages cost nothing.
size_t cell_bytes(const Buffer& b) {
  return static_cast<size_t>(b.end - b.begin + 1) * sizeof(Cell);
}

void release_cells(Buffer& b) {
  if (b.granules.cells) munmap(b.granules.cells, cell_bytes(b));
  b.granules = {};
}

bool in_arena(const char* p) {
  return p >= arena && p < arena + kArena;
}
bool in_threadgroup_arena(const char* p) {
  return p >= threadgroup_arena && p < threadgroup_arena + kThreadgroupArena;
}

// Whether `earlier` is unordered with an access that the running thread makes now.
template <MemoryClass M>
bool conflicts(const Access& earlier, bool atomic) {
  if (earlier.interval == 0) return false;
  const bool both_atomic = (earlier.thread & kAtomic) && atomic;
  if (earlier.interval < state.first_interval[M]) return M == kDevice && !both_atomic;
  if (earlier.interval != state.interval[M]) return false;  // a threadgroup barrier lies between
  const uint16_t thread = earlier.thread & ~kAtomic;
  if (thread == current->thread || both_atomic) return false;
  const bool same_simdgroup = thread / 32 == current->simdgroup;
  const uint16_t passed = state.simdgroups[current->simdgroup].barrier_count[M];
  return !(same_simdgroup && earlier.simd_barriers != passed);  // a simdgroup barrier lies between
}

template <MemoryClass M>
void remember(Recent& recent, const Access& me) {
  const Access& last = recent.last;
  if (last.interval && last.interval < state.first_interval[M]) {
    recent.foreign = last;
  } else if (last.interval == me.interval) {
    const uint32_t thread = last.thread & ~kAtomic;
    const uint32_t other_simdgroup = (recent.other.thread & ~kAtomic) / 32;
    const bool other_is_elsewhere =
        recent.other.interval == me.interval && other_simdgroup != current->simdgroup;
    const bool last_is_elsewhere = thread / 32 != current->simdgroup;
    if (last_is_elsewhere || (thread != current->thread && !other_is_elsewhere)) {
      recent.other = last;
    }
  }
  recent.last = me;
}

template <MemoryClass M>
const Access* find_conflict(const Recent& recent, bool atomic) {
  for (const Access* access : {&recent.last, &recent.other, &recent.foreign}) {
    if (conflicts<M>(*access, atomic)) return access;
  }
  return nullptr;
}

// The earlier access that conflicts with one that the running thread makes now, if any.
template <MemoryClass M>
const Access* find_conflict(const Cell& cell, bool write, bool atomic, bool atomics) {
  if (conflicts<M>(cell.write, atomic)) return &cell.write;
  const Access* found = write ? find_conflict<M>(cell.reads, atomic) : nullptr;
  // Atomic accesses do not conflict among themselves.
  if (!atomics || atomic || found) return found;
  found = find_conflict<M>(cell.atomic_writes, atomic);
  return found || !write ? found : find_conflict<M>(cell.atomic_reads, atomic);
}

bool is_write(const Cell& cell, const Access* access) {
  const Recent& w = cell.atomic_writes;
  return access == &cell.write || access == &w.last || access == &w.other || access == &w.foreign;
}

template <MemoryClass M>
void report_race(const Cell& cell, const Access& earlier, bool write, bool atomic, uint64_t pc,
                 const void* address) {
  const bool foreign = earlier.interval < state.first_interval[M];
  char where[160];
  report(kDataRace, pc, earlier.pc,
         "%s: %s%s by thread %u and earlier %s%s by thread %u%s are not ordered",
         describe(address, where, sizeof where), atomic ? "atomic " : "", write ? "write" : "read",
         current->thread, earlier.thread & kAtomic ? "atomic " : "",
         is_write(cell, &earlier) ? "write" : "read", earlier.thread & ~kAtomic & 0xFFFF,
         foreign ? " of another threadgroup" : "");
}

template <MemoryClass M>
void check_cells(Granules& granules, size_t offset, size_t size, bool write, bool atomic,
                 uint64_t pc, const void* address) {
  const Access me{state.interval[M],
                  static_cast<uint16_t>(current->thread | (atomic ? kAtomic : 0)),
                  static_cast<uint16_t>(state.simdgroups[current->simdgroup].barrier_count[M]),
                  static_cast<uint32_t>(pc)};
  bool told_race = false, told_undefined = false;
  granules.atomics |= atomic;
  Cell* cell = granules.at(offset, size);
  for (Cell* end = cell + (size >> granules.shift); cell != end; cell++) {
    const Access* conflict = find_conflict<M>(*cell, write, atomic, granules.atomics);
    if (__builtin_expect(conflict && !told_race, 0)) {
      report_race<M>(*cell, *conflict, write, atomic, pc, address);
      told_race = true;
    }
    if (M == kThreadgroup && !write && !told_undefined &&
        cell->write.interval < state.first_interval[M] &&
        cell->atomic_writes.last.interval < state.first_interval[M]) {
      char where[160];
      report(kUninitialisedRead, pc, 0, "read of uninitialised %s",
             describe(address, where, sizeof where));
      told_undefined = true;
    }
    if (write && !atomic) {
      cell->write = me;
    } else {
      remember<M>(write ? cell->atomic_writes : atomic ? cell->atomic_reads : cell->reads, me);
    }
  }
}

void check_buffer(Buffer& b, char* p, size_t size, bool write, bool atomic, uint64_t pc) {
  char where[160];
  const auto offset = static_cast<size_t>(p - b.begin);
  if (__builtin_expect(b.access == 0, 0)) {
    report(kBinding, pc, 0, "access to %s, which this launch does not bind",
           describe(p, where, sizeof where));
    return;
  }
  if (!b.defined) return;
  if (write) {
    if (__builtin_expect(!(b.access & kWrite), 0)) {
      report(kReadOnlyWrite, pc, 0, "write to read-only %s", describe(p, where, sizeof where));
      return;
    }
    memset(b.defined + offset, 1, size);
  } else {
    const bool undefined = memchr(b.defined + offset, 0, size) != nullptr;
    if (__builtin_expect(undefined, 0)) {
      report(kUninitialisedRead, pc, 0, "read of uninitialised %s",
             describe(p, where, sizeof where));
    }
    if (b.access == kRead) return;  // nobody writes it: nothing to race with
    if (!(b.access & kRead) && !undefined) {
      Cell* cell = b.granules.at(offset, size);
      Cell* end = cell + (size >> b.granules.shift);
      while (cell != end && (cell->write.interval || cell->atomic_writes.last.interval)) cell++;
      if (cell != end) {
        report(kUninitialisedRead, pc, 0, "read of write-only %s before this launch wrote it",
               describe(p, where, sizeof where));
      }
    }
  }
  check_cells<kDevice>(b.granules, offset, size, write, atomic, pc, p);
}

}  // namespace

void Granules::split(int to) {
  const size_t parts = size_t{1} << (shift - to);
  for (size_t i = touched; i-- > 0;) {  // from the end: the parts of one take the places of others
    const Cell whole = cells[i];
    for (size_t part = 0; part < parts; part++) cells[i * parts + part] = whole;
  }
  touched *= parts;
  shift = to;
}

const char* describe(const void* address, char* text, size_t size) {
  const char* p = static_cast<const char*>(address);
  if (in_threadgroup_arena(p)) {
    for (const Variable& v : variables) {
      if (p < v.begin - kRedZone || p >= v.end + kRedZone) continue;
      snprintf(text, size, "threadgroup '%s' (%td bytes) at byte %td", v.name, v.end - v.begin,
               p - v.begin);
      return text;
    }
    snprintf(text, size, "threadgroup memory outside any variable");
  } else if (in_arena(p)) {
    for (const Buffer& b : buffers) {
      if (p < b.begin - kSlot || p >= b.end + kSlot) continue;
      snprintf(text, size, "buffer %s (%td bytes) at byte %td", b.name.c_str(), b.end - b.begin,
               p - b.begin);
      return text;
    }
    snprintf(text, size, "device memory outside any buffer");
  } else if (reinterpret_cast<uintptr_t>(p) < (uintptr_t{1} << 20)) {
    snprintf(text, size, "a null or unbound pointer plus %zu", reinterpret_cast<size_t>(p));
  } else {
    snprintf(text, size, "memory that belongs to nothing");
  }
  return text;
}

void check_access(const volatile void* address, size_t size, bool write, bool atomic, uint64_t pc) {
  char* p = static_cast<char*>(const_cast<void*>(address));
  state.counters.accesses++;
  if (p >= current_stack_begin && p < current_stack_end) return;
  if (__builtin_expect(state.expired, 0)) check_watchdog(pc);
  char where[160];
  if (in_arena(p)) {
    (write ? state.counters.device_bytes_written : state.counters.device_bytes_read) += size;
    const size_t slot = static_cast<size_t>(p - arena) / kSlot;
    const int id = slot < slot_owner.size() ? slot_owner[slot] : 0;
    if (id) {
      Buffer& b = buffers[id - 1];
      if (p >= b.begin && p + size <= b.end) return check_buffer(b, p, size, write, atomic, pc);
    }
  } else if (in_threadgroup_arena(p)) {
    (write ? state.counters.threadgroup_bytes_written : state.counters.threadgroup_bytes_read) +=
        size;
    const int id = variable_at[(p - threadgroup_arena) / 16];
    if (id) {
      Variable& v = variables[id - 1];
      if (p >= v.begin && p + size <= v.end) {
        const auto offset = static_cast<size_t>(p - v.begin);
        return check_cells<kThreadgroup>(v.granules, offset, size, write, atomic, pc, p);
      }
    }
  } else if (p >= stack_base() && p < stack_base() + kMaxThreads * kStackBytes) {
    report(kPrivateMemory, pc, 0, "%s of the private memory of thread %zu",
           write ? "write" : "read", static_cast<size_t>(p - stack_base()) / kStackBytes);
    abort_launch();
  } else if (p >= unbound_reference && p < unbound_reference + sizeof unbound_reference) {
    if (!write) return;  // the optimiser may read a reference early, before its guard
  } else {
    const auto at = reinterpret_cast<uint64_t>(p);
    if (at >= state.module_begin && at < state.module_end) {
      if (write) report(kReadOnlyWrite, pc, 0, "write to a program-scope constant");
      for (const UnsetConstant& c : unset_constants) {
        if (p < c.begin || p >= c.end) continue;
        report(kUnsetConstant, pc, 0, "function constant %d ('%s') has no value", c.index, c.name);
      }
      return;
    }
  }
  report(kOutOfBounds, pc, 0, "%s of %zu bytes at %s", write ? "write" : "read", size,
         describe(p, where, sizeof where));
  abort_launch();
}

void reset_memory() {
  set_up();
  for (Buffer& b : buffers) {
    const size_t bytes = static_cast<size_t>(b.end - b.begin);
    char* page = b.begin - (reinterpret_cast<uintptr_t>(b.begin) & (kPage - 1));
    mmap(page, (bytes + 2 * kPage - 1) / kPage * kPage, PROT_NONE,
         MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    release_cells(b);
    if (b.defined) munmap(b.defined, bytes + 1);
  }
  buffers.clear();
  next_slot = 1;
  slot_owner.assign(1, 0);
  unbind_all();
}

int create_buffer(uint64_t bytes, const char* name, bool checked, bool defined) {
  set_up();
  const size_t body = (bytes + kEndAlignment - 1) / kEndAlignment * kEndAlignment;
  const size_t slots = (body + kSlot - 1) / kSlot + (body == 0);
  if ((next_slot + slots + 1) * kSlot > kArena) return -1;
  char* slot = arena + next_slot * kSlot;
  char* end = slot + slots * kSlot;
  const size_t committed = (body + kPage - 1) / kPage * kPage;
  if (committed) mprotect(end - committed, committed, PROT_READ | PROT_WRITE);
  Buffer b;
  b.begin = end - body;
  b.end = b.begin + bytes;
  b.name = name;
  if (checked) {
    b.defined = reinterpret_cast<uint8_t*>(map_memory(bytes + 1, PROT_READ | PROT_WRITE));
    if (defined) memset(b.defined, 1, bytes);
  }
  if (!defined) memset(b.begin, state.options.poison, bytes);
  buffers.push_back(b);
  slot_owner.resize(next_slot + slots + 1, 0);
  for (size_t i = 0; i < slots; i++) {
    slot_owner[next_slot + i] = static_cast<uint16_t>(buffers.size());
  }
  next_slot += slots + 1;  // one inaccessible slot between buffers
  return static_cast<int>(buffers.size()) - 1;
}

Buffer& buffer_at(int id) {
  return buffers[id];
}

void unbind_all() {
  bindings.clear();
  threadgroup_arguments.clear();
  for (Buffer& b : buffers) b.access = 0;
}

void bind(int index, int buffer, uint64_t offset, int access) {
  if (static_cast<int>(bindings.size()) <= index) bindings.resize(index + 1);
  bindings[index] = {buffer, offset};
  buffers[buffer].access |= access;
}

void clear_unset_constants() {
  unset_constants.clear();
}

void set_threadgroup_argument(int index, uint64_t bytes) {
  if (static_cast<int>(threadgroup_arguments.size()) <= index) {
    threadgroup_arguments.resize(index + 1, 0);
  }
  threadgroup_arguments[index] = bytes;
}

const Binding* binding_at(int index) {
  const bool bound = index >= 0 && index < static_cast<int>(bindings.size());
  return bound && bindings[index].buffer >= 0 ? &bindings[index] : nullptr;
}

size_t num_bindings() {
  return bindings.size();
}

void begin_launch() {
  variables.clear();
  variable_shifts.clear();
  for (Buffer& b : buffers) {
    release_cells(b);
    if (!b.defined || !(b.access & kWrite)) continue;
    b.granules.cells = reinterpret_cast<Cell*>(map_memory(cell_bytes(b), PROT_READ | PROT_WRITE));
  }
}

void begin_threadgroup() {
  for (const Variable& v : variables) variable_shifts[v.id] = v.granules.shift;
  variables.clear();
  memset(variable_at, 0, sizeof variable_at);
  variables_end = 0;
  variable_bytes = 0;
}

}  // namespace metal_host

using namespace metal_host;

extern "C" void* mh_rt_threadgroup_variable(const char* name, int id, mh_u64 size, mh_u64 align) {
  for (const Variable& v : variables) {
    if (v.id == id) return v.begin;
  }
  const size_t alignment = std::max<size_t>(align, 16);
  const size_t begin = (variables_end + kRedZone + alignment - 1) / alignment * alignment;
  variable_bytes = (variable_bytes + align - 1) / align * align + size;
  Counters& counters = state.counters;
  counters.threadgroup_memory = std::max<uint64_t>(counters.threadgroup_memory, variable_bytes);
  if (begin + size + kRedZone > kThreadgroupArena || variables.size() >= 255) {
    report(kLimit, 0, 0, "threadgroup memory of %zu bytes with '%s' is far beyond the limit",
           static_cast<size_t>(variable_bytes), name);
    abort_launch();
  }
  if (variable_bytes > state.options.threadgroup_limit) {
    report(kLimit, 0, 0, "threadgroup memory: %zu bytes with '%s', the limit is %zu",
           static_cast<size_t>(variable_bytes), name,
           static_cast<size_t>(state.options.threadgroup_limit));
  }
  Variable v{name, id, threadgroup_arena + begin, threadgroup_arena + begin + size, {}};
  v.granules.cells = threadgroup_cells + begin;
  const auto known = variable_shifts.find(id);
  if (known != variable_shifts.end()) v.granules.shift = known->second;
  variables.push_back(v);
  memset(v.begin, state.options.poison, size);
  for (size_t i = begin / 16; i < (begin + size + 15) / 16; i++) {
    variable_at[i] = static_cast<uint8_t>(variables.size());
  }
  variables_end = begin + size;
  return v.begin;
}

extern "C" void* mh_rt_buffer(int index, mh_u64 min_size, int is_threadgroup) {
  if (is_threadgroup) {
    const bool set = index < static_cast<int>(threadgroup_arguments.size());
    if (!set || !threadgroup_arguments[index]) {
      report(kBinding, 0, 0, "threadgroup(%d) has no length", index);
      abort_launch();
    }
    static char names[32][24];
    char* name = names[index & 31];
    snprintf(name, sizeof names[0], "threadgroup(%d)", index);
    return mh_rt_threadgroup_variable(name, -1 - index, threadgroup_arguments[index], 16);
  }
  const Binding* binding = binding_at(index);
  if (!binding) return min_size ? unbound_reference : nullptr;
  const Buffer& b = buffers[binding->buffer];
  char* p = b.begin + binding->offset;
  if (p + min_size > b.end) {
    report(kOutOfBounds, 0, 0, "buffer(%d) %s has %td bytes, the kernel's argument needs %zu",
           index, b.name.c_str(), b.end - p, static_cast<size_t>(min_size));
    abort_launch();
  }
  return p;
}

extern "C" void mh_rt_unset_constant(const char* name, int index, const void* address, int size) {
  const char* begin = static_cast<const char*>(address);
  unset_constants.push_back({name, begin, begin + size, index});
}
