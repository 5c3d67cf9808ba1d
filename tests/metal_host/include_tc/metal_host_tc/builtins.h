// Compiler builtins below Apple's library that MLX's bfloat headers call directly.
#pragma once

#define MH_BUILTIN_1(NAME) float __metal_##NAME(float, bool);
#define MH_BUILTIN_2(NAME) float __metal_##NAME(float, float, bool = false);
#define MH_BUILTIN_3(NAME) float __metal_##NAME(float, float, float, bool = false);
MH_BUILTIN_1(acos)
MH_BUILTIN_1(acosh)
MH_BUILTIN_1(asin)
MH_BUILTIN_1(asinh)
MH_BUILTIN_1(atan)
MH_BUILTIN_1(atanh)
MH_BUILTIN_1(ceil)
MH_BUILTIN_1(cos)
MH_BUILTIN_1(cosh)
MH_BUILTIN_1(cospi)
MH_BUILTIN_1(exp)
MH_BUILTIN_1(exp2)
MH_BUILTIN_1(exp10)
MH_BUILTIN_1(fabs)
MH_BUILTIN_1(floor)
MH_BUILTIN_1(fract)
MH_BUILTIN_1(log)
MH_BUILTIN_1(log2)
MH_BUILTIN_1(log10)
MH_BUILTIN_1(rint)
MH_BUILTIN_1(round)
MH_BUILTIN_1(rsqrt)
MH_BUILTIN_1(sin)
MH_BUILTIN_1(sinh)
MH_BUILTIN_1(sinpi)
MH_BUILTIN_1(sqrt)
MH_BUILTIN_1(tan)
MH_BUILTIN_1(tanh)
MH_BUILTIN_1(tanpi)
MH_BUILTIN_1(trunc)
MH_BUILTIN_2(atan2)
MH_BUILTIN_2(copysign)
MH_BUILTIN_2(divide)
MH_BUILTIN_2(fdim)
MH_BUILTIN_2(fmax)
MH_BUILTIN_2(fmin)
MH_BUILTIN_2(fmod)
MH_BUILTIN_2(nextafter)
MH_BUILTIN_2(pow)
MH_BUILTIN_2(powr)
MH_BUILTIN_3(fma)
MH_BUILTIN_3(fmax3)
MH_BUILTIN_3(fmedian3)
MH_BUILTIN_3(fmin3)
MH_BUILTIN_3(mix)
float __metal_ldexp(float, int, bool);
float __metal_frexp(float, int&, bool = false);
float __metal_frexp(float, int*, bool = false);

#define MH_BUILTIN_SIMD(NAME) \
  template <class T>          \
  T __metal_simd_##NAME(T);
MH_BUILTIN_SIMD(sum)
MH_BUILTIN_SIMD(product)
MH_BUILTIN_SIMD(max)
MH_BUILTIN_SIMD(min)
MH_BUILTIN_SIMD(xor)
MH_BUILTIN_SIMD(prefix_inclusive_sum)
MH_BUILTIN_SIMD(prefix_exclusive_sum)
MH_BUILTIN_SIMD(prefix_inclusive_product)
MH_BUILTIN_SIMD(prefix_exclusive_product)
#define MH_BUILTIN_SHUFFLE(NAME) \
  template <class T>             \
  T __metal_simd_##NAME(T, ushort);
MH_BUILTIN_SHUFFLE(shuffle)
MH_BUILTIN_SHUFFLE(broadcast)
MH_BUILTIN_SHUFFLE(shuffle_xor)
MH_BUILTIN_SHUFFLE(shuffle_up)
MH_BUILTIN_SHUFFLE(shuffle_down)
MH_BUILTIN_SHUFFLE(shuffle_rotate_up)
MH_BUILTIN_SHUFFLE(shuffle_rotate_down)
template <class T>
T __metal_simd_shuffle_and_fill_up(T, T, ushort, ushort);
template <class T>
T __metal_simd_shuffle_and_fill_down(T, T, ushort, ushort);
ushort __metal_get_simdgroup_size(ushort);
ushort __metal_get_thread_index_in_simdgroup(ushort);
