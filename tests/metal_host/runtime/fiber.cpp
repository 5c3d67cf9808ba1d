#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "report.h"

namespace metal_host {

#if defined(__x86_64__)

asm(R"(
.text
.globl mh_switch_context
.hidden mh_switch_context
.type mh_switch_context, @function
mh_switch_context:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size mh_switch_context, .-mh_switch_context
)");

void* make_context(char* top, void (*entry)()) {
  auto* sp = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63});
  *--sp =
      0;  // return address of entry: the ABI wants rsp = 16n + 8 at a function's first instruction
  *--sp = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; i++) *--sp = 0;
  return sp;
}

#elif defined(__aarch64__)

asm(R"(
.text
.globl mh_switch_context
.hidden mh_switch_context
.type mh_switch_context, %function
mh_switch_context:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size mh_switch_context, .-mh_switch_context
)");

void* make_context(char* top, void (*entry)()) {
  constexpr int kFrameWords = 20, kLinkRegister = 11;  // x30 is the twelfth saved word
  auto* sp = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63});
  sp -= kFrameWords;
  memset(sp, 0, kFrameWords * sizeof(uint64_t));
  sp[kLinkRegister] = reinterpret_cast<uint64_t>(entry);
  return sp;
}

#else
#error "the Metal host runner knows x86-64 and aarch64 only"
#endif

char* stack_base() {
  static char* base = [] {
    char* p = map_memory(kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE);
    for (size_t i = 0; i < kMaxThreads; i++) mprotect(p + i * kStackBytes, 4096, PROT_NONE);
    return p;
  }();
  return base;
}

}  // namespace metal_host
