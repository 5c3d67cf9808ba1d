// State of the launch in progress: its threads, simdgroups and options.
//
// Threadgroups run one after another, their threads as fibers of one host thread; nothing here is
// meant to be called from two threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "report.h"

namespace metal_host {

enum MemoryClass { kDevice = 0, kThreadgroup = 1 };

enum class Status : uint8_t { kRunnable, kAtBarrier, kAtCollective, kDone };

struct Fiber {
  void* context;
  Status status;
  uint32_t thread;     // index in the threadgroup
  uint32_t lane;       // index in the simdgroup
  uint32_t simdgroup;  // index in the threadgroup
  mh_site site;        // of the barrier or collective it waits at
  int op;              // mh_op of the collective
  int detail;          // barrier: memory flags; collective: tag that must agree between lanes
  uint32_t mask;       // lanes of the collective that completed last
  char (*slots)[MH_SLOT_BYTES];
  mh_context builtins;
};

struct Simdgroup {
  // Values of the collective being gathered and of the one being read, swapped on completion.
  alignas(64) char values[2][32][MH_SLOT_BYTES];
  int gathering;
  uint32_t arrived;           // lanes that wait at a collective
  uint32_t barrier_count[2];  // simdgroup barriers passed that order each memory class
};

// Options of one launch, set by Python before it.
struct Options {
  int poison = 0xFF;                   // byte that fills memory with undefined content
  uint32_t order = 0;                  // 0 forward, 1 reverse, otherwise the seed of a shuffle
  uint32_t max_threads = 1024;         // at most kMaxThreads
  uint64_t threadgroup_limit = 32768;  // bytes
  bool strict_simd = true;             // a simdgroup function must be reached by all lanes
  bool lockstep = false;               // every simdgroup function orders memory, as hardware may
  bool flush_denormals = false;
  double cpu_seconds = 60;  // watchdog
};

// A barrier site to weaken during the next launches: skip it, or take bits off its flags.
struct Mutation {
  mh_site site{nullptr, 0, 0};
  bool skip = false;
  int dropped_flags = 0;
};

struct Counters {
  uint64_t device_bytes_read, device_bytes_written;
  uint64_t threadgroup_bytes_read, threadgroup_bytes_written;
  uint64_t threadgroup_memory;  // peak bytes of one threadgroup
  uint64_t threadgroup_barriers;
  uint64_t ops[MH_NUM_OPS];  // simdgroup collectives by mh_op
  uint64_t accesses;         // instrumented loads and stores
  uint64_t switches;         // fiber switches
};

struct BarrierSite {
  mh_site site;
  int is_simdgroup;
  int flags;
  uint64_t hits;
};

struct State {
  const mh_entry* entry = nullptr;
  uint64_t module_begin = 0, module_end = 0;  // the kernel's shared object
  uint32_t threadgroup[3] = {0, 0, 0};        // position of the running one
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  // Barrier intervals: the number of the current one and of this threadgroup's first one. Two
  // accesses of the same memory class in one interval are not ordered by any threadgroup barrier.
  uint32_t interval[2] = {1, 1}, first_interval[2] = {1, 1};
  void* scheduler_context = nullptr;
  bool launching = false;
  volatile bool expired = false;  // the watchdog fired; looked at wherever fibers enter the runtime
  Options options;
  Mutation mutation;
  Counters counters{};
  std::vector<BarrierSite> barrier_sites;
};

extern State state;
extern Fiber* current;  // the running fiber, null in the scheduler
extern char *current_stack_begin, *current_stack_end;

inline bool same_site(const mh_site& a, const mh_site& b) {
  return a.line == b.line && a.column == b.column && a.file == b.file;
}

// Lanes that exist in a simdgroup.
inline uint32_t full_mask(uint32_t simdgroup) {
  const size_t lanes = state.fibers.size() - size_t{simdgroup} * 32;
  return lanes >= 32 ? ~0u : (1u << lanes) - 1;
}

// Ends the launch at once; what the threads have written stays.
[[noreturn]] void abort_launch();

// Reports a hang and ends the launch if the watchdog fired: at an instruction, at a barrier or
// collective, or where the first unfinished thread waits.
void check_watchdog(uint64_t pc);
void check_watchdog(const mh_site& site);
void check_watchdog();

}  // namespace metal_host
