// The entry points that clang's sanitizer instrumentation calls.
//
// Kernels are compiled with -fsanitize=thread and some of -fsanitize=undefined but linked without
// their run-time libraries, as the Linux kernel does for KCSAN: every load and store that may touch
// shared memory arrives here, and one callback finds races, bounds and uninitialised reads.
#include <cstdint>
#include <cstring>

#include "launch.h"
#include "memory.h"

using namespace metal_host;

#define EXPORT extern "C" __attribute__((visibility("default")))

// The place of the access, as an offset in the kernel's module: one byte back from the return
// address, so that it lies inside the call.
#define CALLER_PC                                                                               \
  (reinterpret_cast<uint64_t>(__builtin_extract_return_addr(__builtin_return_address(0))) - 1 - \
   state.module_begin)
#define CHECK(address, size, write, atomic)                             \
  do {                                                                  \
    if (current) check_access(address, size, write, atomic, CALLER_PC); \
  } while (0)

#define PLAIN_ACCESS(N)                                 \
  EXPORT void __tsan_read##N(void* a) {                 \
    CHECK(a, N, false, false);                          \
  }                                                     \
  EXPORT void __tsan_write##N(void* a) {                \
    CHECK(a, N, true, false);                           \
  }                                                     \
  EXPORT void __tsan_unaligned_read##N(void* a) {       \
    CHECK(a, N, false, false);                          \
  }                                                     \
  EXPORT void __tsan_unaligned_write##N(void* a) {      \
    CHECK(a, N, true, false);                           \
  }                                                     \
  EXPORT void __tsan_volatile_read##N(void* a) {        \
    CHECK(a, N, false, false);                          \
  }                                                     \
  EXPORT void __tsan_volatile_write##N(void* a) {       \
    CHECK(a, N, true, false);                           \
  }                                                     \
  EXPORT void __tsan_read_write##N(void* a) {           \
    CHECK(a, N, false, false);                          \
    CHECK(a, N, true, false);                           \
  }                                                     \
  EXPORT void __tsan_unaligned_read_write##N(void* a) { \
    CHECK(a, N, false, false);                          \
    CHECK(a, N, true, false);                           \
  }
// clang-format off
PLAIN_ACCESS(1)
PLAIN_ACCESS(2)
PLAIN_ACCESS(4)
PLAIN_ACCESS(8)
PLAIN_ACCESS(16)
// clang-format on

EXPORT void __tsan_init() {}
EXPORT void __tsan_func_entry(void*) {}
EXPORT void __tsan_func_exit() {}
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_vptr_read(void**) {}

EXPORT void* __tsan_memcpy(void* to, const void* from, size_t n) {
  if (n) {
    CHECK(from, n, false, false);
    CHECK(to, n, true, false);
  }
  return memcpy(to, from, n);
}
EXPORT void* __tsan_memmove(void* to, const void* from, size_t n) {
  if (n) {
    CHECK(from, n, false, false);
    CHECK(to, n, true, false);
  }
  return memmove(to, from, n);
}
EXPORT void* __tsan_memset(void* to, int value, size_t n) {
  if (n) CHECK(to, n, true, false);
  return memset(to, value, n);
}

// One host thread runs all fibers, so plain operations are atomic.
#define READ_MODIFY_WRITE(BITS, T, NAME, EXPRESSION)               \
  EXPORT T __tsan_atomic##BITS##_##NAME(volatile T* a, T v, int) { \
    CHECK(a, sizeof(T), true, true);                               \
    const T old = *a;                                              \
    *a = static_cast<T>(EXPRESSION);                               \
    return old;                                                    \
  }
#define COMPARE_EXCHANGE(BITS, T, NAME)                                                          \
  EXPORT int __tsan_atomic##BITS##_compare_exchange_##NAME(volatile T* a, T* e, T v, int, int) { \
    CHECK(a, sizeof(T), true, true);                                                             \
    const T old = *a;                                                                            \
    if (old != *e) {                                                                             \
      *e = old;                                                                                  \
      return 0;                                                                                  \
    }                                                                                            \
    *a = v;                                                                                      \
    return 1;                                                                                    \
  }
#define ATOMIC(BITS, T)                                                                    \
  EXPORT T __tsan_atomic##BITS##_load(const volatile T* a, int) {                          \
    CHECK(a, sizeof(T), false, true);                                                      \
    return *a;                                                                             \
  }                                                                                        \
  EXPORT void __tsan_atomic##BITS##_store(volatile T* a, T v, int) {                       \
    CHECK(a, sizeof(T), true, true);                                                       \
    *a = v;                                                                                \
  }                                                                                        \
  READ_MODIFY_WRITE(BITS, T, exchange, v)                                                  \
  READ_MODIFY_WRITE(BITS, T, fetch_add, old + v)                                           \
  READ_MODIFY_WRITE(BITS, T, fetch_sub, old - v)                                           \
  READ_MODIFY_WRITE(BITS, T, fetch_and, (old & v))                                         \
  READ_MODIFY_WRITE(BITS, T, fetch_or, old | v)                                            \
  READ_MODIFY_WRITE(BITS, T, fetch_xor, old ^ v)                                           \
  COMPARE_EXCHANGE(BITS, T, strong)                                                        \
  COMPARE_EXCHANGE(BITS, T, weak)                                                          \
  EXPORT T __tsan_atomic##BITS##_compare_exchange_val(volatile T* a, T e, T v, int, int) { \
    CHECK(a, sizeof(T), true, true);                                                       \
    const T old = *a;                                                                      \
    if (old == e) *a = v;                                                                  \
    return old;                                                                            \
  }
// clang-format off
ATOMIC(8, uint8_t)
ATOMIC(16, uint16_t)
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)
// clang-format on

EXPORT void __tsan_atomic_thread_fence(int) {}
EXPORT void __tsan_atomic_signal_fence(int) {}

// ---- undefined behaviour: each handler's data begins with the place -----------------------------

namespace {
struct Location {
  const char* file;
  uint32_t line, column;
};
// Places inside the standard library's headers say nothing to the user: there the call's own
// address is given, which symbolises to the line of the kernel that it was inlined into.
void undefined(const Location* l, const char* what, uint64_t pc) {
  if (!l->file || strstr(l->file, "metal_host/include/")) {
    report(kUndefinedBehaviour, pc, 0, "%s", what);
    return;
  }
  const mh_site site{l->file, static_cast<int>(l->line), static_cast<int>(l->column)};
  report_at(kUndefinedBehaviour, site, "%s", what);
}
}  // namespace

#define UNDEFINED(NAME, TEXT)                              \
  EXPORT void __ubsan_handle_##NAME(Location* l) {         \
    undefined(l, TEXT, CALLER_PC);                         \
  }                                                        \
  EXPORT void __ubsan_handle_##NAME##_abort(Location* l) { \
    undefined(l, TEXT, CALLER_PC);                         \
    abort_launch();                                        \
  }
UNDEFINED(out_of_bounds, "index outside an array")
UNDEFINED(shift_out_of_bounds, "shift by a negative amount or by the type's width or more")
UNDEFINED(divrem_overflow, "division by zero, or overflow in a division")
UNDEFINED(add_overflow, "signed overflow in +")
UNDEFINED(sub_overflow, "signed overflow in -")
UNDEFINED(mul_overflow, "signed overflow in *")
UNDEFINED(negate_overflow, "signed overflow in negation")
UNDEFINED(load_invalid_value, "invalid value of a bool or enum")
UNDEFINED(float_cast_overflow, "float value outside the range of the integer it is converted to")
UNDEFINED(pointer_overflow, "pointer overflow")
UNDEFINED(vla_bound_not_positive, "array of no elements")
UNDEFINED(invalid_builtin, "count of zeros of 0")

EXPORT void __ubsan_handle_builtin_unreachable(Location* l) {
  undefined(l, "unreachable code was reached", CALLER_PC);
  abort_launch();
}
EXPORT void __ubsan_handle_missing_return(Location* l) {
  undefined(l, "end of a function without a return value", CALLER_PC);
  abort_launch();
}
EXPORT void __ubsan_handle_type_mismatch_v1(Location* l, uintptr_t address) {
  undefined(l, address ? "misaligned access" : "access through a null pointer", CALLER_PC);
}
EXPORT void __ubsan_handle_type_mismatch_v1_abort(Location* l, uintptr_t address) {
  undefined(l, address ? "misaligned access" : "access through a null pointer", CALLER_PC);
  abort_launch();
}

EXPORT void mh_rt_fail(const char* message, mh_site site) {
  if (site.file) {
    report_at(kUndefinedBehaviour, site, "%s", message);
  } else {
    report(kUndefinedBehaviour, CALLER_PC, 0, "%s", message);
  }
}

// ---- compiler-rt helpers for bfloat -------------------------------------------------------------

EXPORT __bf16 __truncsfbf2(float f) {  // round to nearest even
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  const auto rounded =
      static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  __bf16 out;
  memcpy(&out, &rounded, sizeof out);
  return out;
}
EXPORT __bf16 __truncdfbf2(double d) {
  return __truncsfbf2(static_cast<float>(d));
}
