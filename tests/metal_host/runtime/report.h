// Findings of a launch, as plain structs that Python reads through ctypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "abi.h"

namespace metal_host {

// report.py holds the same list by name.
enum Kind : int {
  kOutOfBounds,
  kDataRace,
  kUninitialisedRead,
  kBarrierDivergence,
  kSimdDivergence,
  kPrivateMemory,
  kUndefinedBehaviour,
  kFault,
  kLimit,
  kBinding,
  kReadOnlyWrite,
  kUnsetConstant,
  kHang,
};

// `pc` and `other_pc` are offsets in the kernel's shared object, 0 where the place is in `text`.
struct Report {
  int kind;
  int count;
  uint64_t pc, other_pc;
  int thread;  // index in the threadgroup, -1 outside any thread
  uint32_t threadgroup[3];
  char text[320];
};

std::vector<Report>& reports();

// Adds a report, or counts it if the same one is there already.
__attribute__((format(printf, 4, 5))) void report(Kind kind, uint64_t pc, uint64_t other_pc,
                                                  const char* format, ...);

// As report(), for a finding at a barrier or collective.
__attribute__((format(printf, 3, 4))) void report_at(Kind kind, const mh_site& site,
                                                     const char* format, ...);

// The last component of a path.
const char* base_name(const char* path);

// A message and abort: for what the runner cannot go on without.
[[noreturn]] void fail(const char* message);

// Anonymous memory, or fail().
char* map_memory(size_t bytes, int protection);

}  // namespace metal_host
