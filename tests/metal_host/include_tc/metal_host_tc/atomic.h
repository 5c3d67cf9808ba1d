// Atomics, in device and threadgroup memory; and logging.
#pragma once

#include "../../include/metal_host/atomic_types.h"

namespace metal {
template <class T>
struct identity {
  typedef T type;
};
#define MH_OPERAND typename identity<T>::type

#define MH_READ_MODIFY_WRITE(SPACE, NAME) \
  template <class T>                      \
  T atomic_##NAME##_explicit(volatile SPACE _atomic<T>*, MH_OPERAND, memory_order);
#define MH_ATOMICS(SPACE)                                                                \
  template <class T>                                                                     \
  T atomic_load_explicit(const volatile SPACE _atomic<T>*, memory_order);                \
  template <class T>                                                                     \
  void atomic_store_explicit(volatile SPACE _atomic<T>*, MH_OPERAND, memory_order);      \
  template <class T>                                                                     \
  bool atomic_compare_exchange_weak_explicit(volatile SPACE _atomic<T>*, T*, MH_OPERAND, \
                                             memory_order, memory_order);                \
  MH_READ_MODIFY_WRITE(SPACE, exchange)                                                  \
  MH_READ_MODIFY_WRITE(SPACE, fetch_add)                                                 \
  MH_READ_MODIFY_WRITE(SPACE, fetch_sub)                                                 \
  MH_READ_MODIFY_WRITE(SPACE, fetch_max)                                                 \
  MH_READ_MODIFY_WRITE(SPACE, fetch_min)                                                 \
  MH_READ_MODIFY_WRITE(SPACE, fetch_and)                                                 \
  MH_READ_MODIFY_WRITE(SPACE, fetch_or)                                                  \
  MH_READ_MODIFY_WRITE(SPACE, fetch_xor)
MH_ATOMICS(MH_DEVICE)
MH_ATOMICS(MH_THREADGROUP)
}  // namespace metal
