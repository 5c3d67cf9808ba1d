// Atomics: compare-exchange loops on the integer of the same size, which checked builds turn into
// __tsan_atomic calls.
#pragma once

#include "atomic_types.h"

namespace metal_host {
template <class T>
struct bits_of {
  typedef T type;
};
template <>
struct bits_of<float> {
  typedef uint type;
};
template <>
struct bits_of<half> {
  typedef ushort type;
};
template <>
struct bits_of<bfloat> {
  typedef ushort type;
};
template <>
struct bits_of<bool> {
  typedef uchar type;
};

template <class T, class F>
MH_FN T read_modify_write(volatile T* p, F f) {
  typedef typename bits_of<T>::type U;
  U old = __atomic_load_n((volatile U*)p, __ATOMIC_RELAXED), replacement;
  do {
    replacement = __builtin_bit_cast(U, f(__builtin_bit_cast(T, old)));
  } while (!__atomic_compare_exchange_n((volatile U*)p, &old, replacement, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  return __builtin_bit_cast(T, old);
}
}  // namespace metal_host

namespace metal {
#define MH_OPERAND typename metal_host::identity<T>::type

template <class T>
MH_FN T atomic_load_explicit(const volatile _atomic<T>* p, memory_order) {
  typedef typename metal_host::bits_of<T>::type U;
  return __builtin_bit_cast(T, __atomic_load_n((const volatile U*)&p->value, __ATOMIC_RELAXED));
}
template <class T>
MH_FN void atomic_store_explicit(volatile _atomic<T>* p, MH_OPERAND x, memory_order) {
  typedef typename metal_host::bits_of<T>::type U;
  __atomic_store_n((volatile U*)&p->value, __builtin_bit_cast(U, (T)x), __ATOMIC_RELAXED);
}
#define MH_ATOMIC(NAME, EXPRESSION)                                                        \
  template <class T>                                                                       \
  MH_FN T atomic_##NAME##_explicit(volatile _atomic<T>* p, MH_OPERAND b, memory_order) {   \
    return metal_host::read_modify_write(&p->value, [b](T a) { return (T)(EXPRESSION); }); \
  }
MH_ATOMIC(exchange, b)
MH_ATOMIC(fetch_add, a + b)
MH_ATOMIC(fetch_sub, a - b)
MH_ATOMIC(fetch_max, a < b ? b : a)
MH_ATOMIC(fetch_min, b < a ? b : a)
MH_ATOMIC(fetch_and, (a & b))
MH_ATOMIC(fetch_or, (a | b))
MH_ATOMIC(fetch_xor, a ^ b)
template <class T>
MH_FN bool atomic_compare_exchange_weak_explicit(volatile _atomic<T>* p, T* expected, MH_OPERAND x,
                                                 memory_order, memory_order) {
  typedef typename metal_host::bits_of<T>::type U;
  U old = __builtin_bit_cast(U, *expected);
  const bool done =
      __atomic_compare_exchange_n((volatile U*)&p->value, &old, __builtin_bit_cast(U, (T)x), false,
                                  __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  *expected = __builtin_bit_cast(T, old);
  return done;
}

constexpr os_log os_log_default;
}  // namespace metal
