// Mathematical and integer functions.
#pragma once

#define MH_UNARY(T, NAME)    \
  T NAME(T);                 \
  vec<T, 2> NAME(vec<T, 2>); \
  vec<T, 3> NAME(vec<T, 3>); \
  vec<T, 4> NAME(vec<T, 4>);
#define MH_BINARY(T, NAME)              \
  T NAME(T, T);                         \
  vec<T, 2> NAME(vec<T, 2>, vec<T, 2>); \
  vec<T, 3> NAME(vec<T, 3>, vec<T, 3>); \
  vec<T, 4> NAME(vec<T, 4>, vec<T, 4>);
#define MH_TERNARY(T, NAME)                        \
  T NAME(T, T, T);                                 \
  vec<T, 2> NAME(vec<T, 2>, vec<T, 2>, vec<T, 2>); \
  vec<T, 3> NAME(vec<T, 3>, vec<T, 3>, vec<T, 3>); \
  vec<T, 4> NAME(vec<T, 4>, vec<T, 4>, vec<T, 4>);
#define MH_FLOATS(SHAPE, NAME) SHAPE(float, NAME) SHAPE(half, NAME)
// clang-format off
#define MH_INTEGERS(SHAPE, NAME)           \
  SHAPE(char, NAME) SHAPE(uchar, NAME)     \
  SHAPE(short, NAME) SHAPE(ushort, NAME)   \
  SHAPE(int, NAME) SHAPE(uint, NAME)       \
  SHAPE(long, NAME) SHAPE(ulong, NAME)
// clang-format on
#define MH_NUMBERS(SHAPE, NAME) MH_FLOATS(SHAPE, NAME) MH_INTEGERS(SHAPE, NAME)

namespace metal {
#include "math_functions.h"
namespace precise {
#include "math_functions.h"
}
namespace fast {
#include "math_functions.h"
}
MH_INTEGERS(MH_UNARY, abs)
MH_FLOATS(MH_TERNARY, max3)
MH_FLOATS(MH_TERNARY, min3)
MH_FLOATS(MH_TERNARY, median3)

template <class T>
bool isnan(T);
template <class T>
bool isinf(T);
template <class T>
bool isfinite(T);
template <class T>
bool signbit(T);
template <class T, class C>
T select(T, T, C);
template <class V>
typename vector_traits<V>::element dot(V, V);
template <class V>
typename vector_traits<V>::element length(V);
template <class V>
typename vector_traits<V>::element length_squared(V);
template <class V>
V normalize(V);
template <class V>
bool all(V);
template <class V>
bool any(V);
template <class T>
void swap(T&, T&);

template <class T>
T popcount(T);
template <class T>
T clz(T);
template <class T>
T ctz(T);
template <class T>
T reverse_bits(T);
template <class T>
T rotate(T, T);
template <class T>
T extract_bits(T, uint, uint);
template <class T>
T insert_bits(T, T, uint, uint);
template <class T>
T mulhi(T, T);
template <class T>
T madhi(T, T, T);
template <class T>
T mad24(T, T, T);
template <class T>
T absdiff(T, T);
template <class T>
T addsat(T, T);
template <class T>
T subsat(T, T);
}  // namespace metal
