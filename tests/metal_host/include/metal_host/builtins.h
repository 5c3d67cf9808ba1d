// Compiler builtins below Apple's library that MLX's bfloat headers call directly; the trailing
// bool is the fast-math flag.
#pragma once

#define MH_BUILTIN_1(NAME, EXPRESSION)                \
  MH_FN float __metal_##NAME(float x, bool = false) { \
    return metal::NAME(x);                            \
  }
#define MH_BUILTIN_2(NAME, EXPRESSION)                         \
  MH_FN float __metal_##NAME(float x, float y, bool = false) { \
    return metal::NAME(x, y);                                  \
  }
#define MH_BUILTIN_3(NAME, EXPRESSION)                                  \
  MH_FN float __metal_##NAME(float x, float y, float z, bool = false) { \
    return metal::NAME(x, y, z);                                        \
  }
MH_UNARY_FUNCTIONS(MH_BUILTIN_1)
MH_BINARY_FUNCTIONS(MH_BUILTIN_2)
MH_TERNARY_FUNCTIONS(MH_BUILTIN_3)
MH_FN float __metal_ldexp(float x, int e, bool = false) {
  return __builtin_ldexpf(x, e);
}
MH_FN float __metal_frexp(float x, int* e, bool = false) {
  return __builtin_frexpf(x, e);
}
MH_FN float __metal_frexp(float x, int& e, bool = false) {
  return __builtin_frexpf(x, &e);
}

#define MH_BUILTIN_SIMD(NAME)                    \
  template <class T>                             \
  MH_COLLECTIVE T __metal_##NAME(T v, MH_SITE) { \
    return metal::NAME(v, site);                 \
  }
MH_BUILTIN_SIMD(simd_sum)
MH_BUILTIN_SIMD(simd_product)
MH_BUILTIN_SIMD(simd_max)
MH_BUILTIN_SIMD(simd_min)
MH_BUILTIN_SIMD(simd_prefix_inclusive_sum)
MH_BUILTIN_SIMD(simd_prefix_exclusive_sum)
MH_BUILTIN_SIMD(simd_prefix_inclusive_product)
MH_BUILTIN_SIMD(simd_prefix_exclusive_product)
// MLX names it for bfloat too, where it has no meaning.
template <class T>
MH_COLLECTIVE T __metal_simd_xor(T v, MH_SITE) {
  if constexpr (metal::is_integral_v<T>) return metal::simd_xor(v, site);
  mh_rt_fail("simd_xor of floating-point values", site);
  return v;
}
#define MH_BUILTIN_SHUFFLE(NAME)                           \
  template <class T>                                       \
  MH_COLLECTIVE T __metal_##NAME(T v, ushort k, MH_SITE) { \
    return metal::NAME(v, k, site);                        \
  }
MH_BUILTIN_SHUFFLE(simd_shuffle)
MH_BUILTIN_SHUFFLE(simd_broadcast)
MH_BUILTIN_SHUFFLE(simd_shuffle_xor)
MH_BUILTIN_SHUFFLE(simd_shuffle_up)
MH_BUILTIN_SHUFFLE(simd_shuffle_down)
MH_BUILTIN_SHUFFLE(simd_shuffle_rotate_up)
MH_BUILTIN_SHUFFLE(simd_shuffle_rotate_down)
template <class T>
MH_COLLECTIVE T __metal_simd_shuffle_and_fill_up(T v, T w, ushort k, ushort m, MH_SITE) {
  return metal::simd_shuffle_and_fill_up(v, w, k, m, site);
}
template <class T>
MH_COLLECTIVE T __metal_simd_shuffle_and_fill_down(T v, T w, ushort k, ushort m, MH_SITE) {
  return metal::simd_shuffle_and_fill_down(v, w, k, m, site);
}
MH_FN ushort __metal_get_simdgroup_size(ushort) {
  return 32;
}
MH_FN ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return (ushort)mh_rt_lane();
}
