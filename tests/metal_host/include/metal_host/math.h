// Floating-point functions, in namespaces metal, metal::precise and metal::fast.
//
// All three are the host's libm in float32: what differs on a GPU (ulps of the fast versions) is
// outside of what the runner can tell. half goes through float32 and is rounded once.
#pragma once

namespace metal_host {
MH_FN float fract(float x) {
  const float r = x - __builtin_floorf(x);
  return r < 1.f ? r : 0x1.fffffep-1f;
}
MH_FN float smoothstep(float a, float b, float x) {
  float t = (x - a) / (b - a);
  t = t < 0 ? 0 : t > 1 ? 1 : t;
  return t * t * (3 - 2 * t);
}
}  // namespace metal_host

#define MH_MAP(EXPRESSION)                           \
  {                                                  \
    decltype(v) r;                                   \
    for (int i = 0; i < N; i++) r.e[i] = EXPRESSION; \
    return r;                                        \
  }

// The functions and their float32 expressions; builtins.h walks the same lists.
// clang-format off
#define MH_UNARY_FUNCTIONS(F)            \
  F(acos, __builtin_acosf(x))            \
  F(acosh, __builtin_acoshf(x))          \
  F(asin, __builtin_asinf(x))            \
  F(asinh, __builtin_asinhf(x))          \
  F(atan, __builtin_atanf(x))            \
  F(atanh, __builtin_atanhf(x))          \
  F(ceil, __builtin_ceilf(x))            \
  F(floor, __builtin_floorf(x))          \
  F(rint, __builtin_rintf(x))            \
  F(round, __builtin_roundf(x))          \
  F(trunc, __builtin_truncf(x))          \
  F(fract, metal_host::fract(x))         \
  F(cos, __builtin_cosf(x))              \
  F(cosh, __builtin_coshf(x))            \
  F(sin, __builtin_sinf(x))              \
  F(sinh, __builtin_sinhf(x))            \
  F(tan, __builtin_tanf(x))              \
  F(tanh, __builtin_tanhf(x))            \
  F(cospi, __builtin_cosf(M_PI_F * x))   \
  F(sinpi, __builtin_sinf(M_PI_F * x))   \
  F(tanpi, __builtin_tanf(M_PI_F * x))   \
  F(exp, __builtin_expf(x))              \
  F(exp2, __builtin_exp2f(x))            \
  F(exp10, __builtin_powf(10.f, x))      \
  F(log, __builtin_logf(x))              \
  F(log2, __builtin_log2f(x))            \
  F(log10, __builtin_log10f(x))          \
  F(sqrt, __builtin_sqrtf(x))            \
  F(rsqrt, 1.0f / __builtin_sqrtf(x))    \
  F(fabs, __builtin_fabsf(x))
#define MH_BINARY_FUNCTIONS(F)               \
  F(atan2, __builtin_atan2f(x, y))           \
  F(fmod, __builtin_fmodf(x, y))             \
  F(pow, __builtin_powf(x, y))               \
  F(powr, __builtin_powf(x, y))              \
  F(fmax, __builtin_fmaxf(x, y))             \
  F(fmin, __builtin_fminf(x, y))             \
  F(fdim, __builtin_fdimf(x, y))             \
  F(copysign, __builtin_copysignf(x, y))     \
  F(nextafter, __builtin_nextafterf(x, y))   \
  F(step, (y < x ? 0.f : 1.f))               \
  F(divide, x / y)
#define MH_TERNARY_FUNCTIONS(F)                      \
  F(fma, __builtin_fmaf(x, y, z))                    \
  F(mix, x + (y - x) * z)                            \
  F(smoothstep, metal_host::smoothstep(x, y, z))     \
  F(fmax3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))\
  F(fmin3, __builtin_fminf(x, __builtin_fminf(y, z)))\
  F(fmedian3, __builtin_fmaxf(__builtin_fminf(x, y), \
                              __builtin_fminf(__builtin_fmaxf(x, y), z)))
// clang-format on
#define MH_FOR_EACH_INTEGER(F) F(char) F(uchar) F(short) F(ushort) F(int) F(uint) F(long) F(ulong)

// Metal's library has no bfloat overloads: arguments convert to float.
#define MH_FROM_BFLOAT(NAME)                                    \
  template <class B, class = enable_if_t<__is_same(B, bfloat)>> \
  MH_FN float NAME(B x) {                                       \
    return NAME((float)x);                                      \
  }
#define MH_UNARY(NAME, EXPRESSION) \
  MH_FN float NAME(float x) {      \
    return EXPRESSION;             \
  }                                \
  MH_FN half NAME(half h) {        \
    const float x = (float)h;      \
    return (half)(EXPRESSION);     \
  }                                \
  template <class T, int N>        \
  MH_FN vec<T, N> NAME(vec<T, N> v) MH_MAP(NAME(v.e[i])) MH_FROM_BFLOAT(NAME)
#define MH_BINARY(NAME, EXPRESSION)         \
  MH_FN float NAME(float x, float y) {      \
    return EXPRESSION;                      \
  }                                         \
  MH_FN half NAME(half a, half b) {         \
    const float x = (float)a, y = (float)b; \
    return (half)(EXPRESSION);              \
  }                                         \
  template <class T, int N>                 \
  MH_FN vec<T, N> NAME(vec<T, N> v, vec<T, N> w) MH_MAP(NAME(v.e[i], w.e[i]))
#define MH_TERNARY(NAME, EXPRESSION)                                                           \
  MH_FN float NAME(float x, float y, float z) {                                                \
    return EXPRESSION;                                                                         \
  }                                                                                            \
  MH_FN half NAME(half a, half b, half c) {                                                    \
    const float x = (float)a, y = (float)b, z = (float)c;                                      \
    return (half)(EXPRESSION);                                                                 \
  }                                                                                            \
  template <class T, int N>                                                                    \
  MH_FN vec<T, N> NAME(vec<T, N> v, vec<T, N> w, vec<T, N> u)                                  \
      MH_MAP(NAME(v.e[i], w.e[i], u.e[i])) template <class T, int N>                           \
      MH_FN vec<T, N> NAME(vec<T, N> v, vec<T, N> w, typename metal_host::identity<T>::type u) \
          MH_MAP(NAME(v.e[i], w.e[i], u))

// min, max, clamp and friends of one scalar type. With one NaN, min and max give the other operand.
#define MH_MIN_MAX(T, MAX, MIN, ABS) \
  MH_FN T max(T a, T b) {            \
    return MAX;                      \
  }                                  \
  MH_FN T min(T a, T b) {            \
    return MIN;                      \
  }                                  \
  MH_FN T max3(T a, T b, T c) {      \
    return max(a, max(b, c));        \
  }                                  \
  MH_FN T min3(T a, T b, T c) {      \
    return min(a, min(b, c));        \
  }                                  \
  MH_FN T clamp(T x, T lo, T hi) {   \
    return min(max(x, lo), hi);      \
  }                                  \
  MH_FN T abs(T a) {                 \
    return ABS;                      \
  }
#define MH_INTEGER_MIN_MAX(T) MH_MIN_MAX(T, a < b ? b : a, b < a ? b : a, (T)(a < 0 ? -a : a))
#define MH_FLOAT_ONLY(T)                          \
  MH_FN T saturate(T a) {                         \
    return clamp(a, (T)0, (T)1);                  \
  }                                               \
  MH_FN T sign(T a) {                             \
    return a > 0 ? (T)1 : a < 0 ? (T) - 1 : (T)0; \
  }                                               \
  MH_FN T median3(T a, T b, T c) {                \
    return max(min(a, b), min(max(a, b), c));     \
  }

namespace metal {
#include "math_functions.h"
namespace precise {
#include "math_functions.h"
}
namespace fast {
#include "math_functions.h"
}

#define MH_CLASSIFY(NAME, EXPRESSION)                         \
  template <class T>                                          \
  MH_FN enable_if_t<is_floating_point_v<T>, bool> NAME(T x) { \
    return EXPRESSION;                                        \
  }                                                           \
  template <class T, int N>                                   \
  MH_FN vec<bool, N> NAME(vec<T, N> v) {                      \
    vec<bool, N> r;                                           \
    for (int i = 0; i < N; i++) r.e[i] = NAME(v.e[i]);        \
    return r;                                                 \
  }
MH_CLASSIFY(isnan, x != x)
MH_CLASSIFY(isinf, __builtin_isinf((float)x))
MH_CLASSIFY(isfinite, __builtin_isfinite((float)x))
MH_CLASSIFY(signbit, __builtin_signbit((float)x) != 0)

template <class T>
MH_FN enable_if_t<metal_host::is_scalar<T>, T> select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
MH_FN vec<T, N> select(vec<T, N> v, vec<T, N> w, vec<bool, N> c)
    MH_MAP(c.e[i] ? w.e[i] : v.e[i]) template <class T, int N>
    MH_FN T dot(vec<T, N> a, vec<T, N> b) {
  T s = a.e[0] * b.e[0];
  for (int i = 1; i < N; i++) s += a.e[i] * b.e[i];
  return s;
}
template <class T, int N>
MH_FN T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <class T, int N>
MH_FN T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <class T, int N>
MH_FN vec<T, N> normalize(vec<T, N> a) {
  return a * vec<T, N>(rsqrt(dot(a, a)));
}
template <int N>
MH_FN bool all(vec<bool, N> v) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= v.e[i];
  return r;
}
template <int N>
MH_FN bool any(vec<bool, N> v) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= v.e[i];
  return r;
}
}  // namespace metal
