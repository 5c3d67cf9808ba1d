// Calls a kernel with its arguments, deduced from its type: the only place that knows how Metal's
// parameters are passed.
#pragma once

namespace metal_host {
template <class A>
struct argument {
  typedef remove_cv_t<A> V;
  template <class S>
  static inline MH_UNCHECKED void convert(S& value, const mh_u32* from) {
    value = (S)from[0];
  }
  template <class S, int N>
  static inline MH_UNCHECKED void convert(vec<S, N>& value, const mh_u32* from) {
    for (int i = 0; i < N; i++) value.e[i] = (S)from[i];
  }
  static inline MH_UNCHECKED V get(const mh_bind& bind, const mh_context* context) {
    V value;
    convert(value, context->builtin[bind.kind]);
    return value;
  }
};
template <class T>
struct argument<T*> {
  static inline MH_UNCHECKED T* get(const mh_bind& bind, const mh_context*) {
    return (T*)mh_rt_buffer(bind.index, 0, bind.kind == MH_THREADGROUP_BUFFER);
  }
};
template <class T>
struct argument<T&> {
  static inline MH_UNCHECKED T& get(const mh_bind& bind, const mh_context*) {
    return *(T*)mh_rt_buffer(bind.index, sizeof(T), bind.kind == MH_THREADGROUP_BUFFER);
  }
};

template <class... A, size_t... I>
inline MH_UNCHECKED void invoke(void (*kernel)(A...), const mh_entry* entry,
                                const mh_context* context, integer_sequence<size_t, I...>) {
  kernel(argument<A>::get(entry->binds[I], context)...);
}
template <class... A>
inline MH_UNCHECKED void call(void (*kernel)(A...), const mh_entry* entry,
                              const mh_context* context) {
  invoke(kernel, entry, context, make_index_sequence<sizeof...(A)>());
}

template <class T>
MH_UNCHECKED T constant_value(int index) {
  T value;
  mh_rt_constant(index, &value, sizeof value);
  return value;
}
inline MH_UNCHECKED bool constant_is_defined(int index) {
  ulong value;
  return mh_rt_constant(index, &value, sizeof value);
}
}  // namespace metal_host
