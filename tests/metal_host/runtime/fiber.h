// Cooperative threads: one fiber per GPU thread, switched by saving the callee-saved registers.
#pragma once

#include <cstddef>

namespace metal_host {

constexpr size_t kStackBytes = 128 << 10;  // of one fiber, its lowest page inaccessible
constexpr size_t kMaxThreads = 1024;       // of one threadgroup

// Saves the running context to *save and continues the one that `load` points at.
extern "C" void mh_switch_context(void** save, void* load);

// A context that starts `entry` on the stack that ends at `top`; entry never returns.
void* make_context(char* top, void (*entry)());

// The stacks of all fibers: one mapping, committed as it is touched.
char* stack_base();
inline char* stack_of(size_t thread) {
  return stack_base() + thread * kStackBytes;
}

}  // namespace metal_host
