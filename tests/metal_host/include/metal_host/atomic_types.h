// Atomic types and logging, for execution and for the type check alike.
#pragma once

namespace metal {
template <class T>
struct _atomic {
  T value;
};
template <class T>
using atomic = _atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

struct os_log {
  template <class... A>
  constexpr os_log(A...) {}
  template <class... A>
  void log(const char*, A...) const {}
  template <class... A>
  void log_debug(const char*, A...) const {}
  template <class... A>
  void log_info(const char*, A...) const {}
  template <class... A>
  void log_error(const char*, A...) const {}
};
}  // namespace metal
