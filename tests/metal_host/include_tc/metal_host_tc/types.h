// Vectors, matrices, arrays and atomic types.
#pragma once

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class T, int N>
using packed_vec = T __attribute__((ext_vector_type(N)));

#define MH_FOR_EACH_INTEGER(F) F(char) F(uchar) F(short) F(ushort) F(int) F(uint) F(long) F(ulong)
#define MH_FOR_EACH_SCALAR(F) MH_FOR_EACH_INTEGER(F) F(half) F(float) F(bfloat)
#define MH_VECTOR_NAMES(T)         \
  typedef vec<T, 2> T##2;          \
  typedef vec<T, 3> T##3;          \
  typedef vec<T, 4> T##4;          \
  typedef vec<T, 2> packed_##T##2; \
  typedef vec<T, 3> packed_##T##3; \
  typedef vec<T, 4> packed_##T##4;
MH_FOR_EACH_SCALAR(MH_VECTOR_NAMES)
// Comparisons of native vectors give integer masks.
typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;

template <class T>
struct vector_traits {
  static constexpr int size = 1;
  typedef T element;
};
template <class T, int N>
struct vector_traits<T __attribute__((ext_vector_type(N)))> {
  static constexpr int size = N;
  typedef T element;
};
// float4(a, b, c) is written make_vector<float4>(a, b, c) by typecheck.py: C++ has no constructors
// of native vectors.
template <class V, class... A>
constexpr V make_vector(A...) {
  constexpr int given = (0 + ... + vector_traits<A>::size);
  static_assert(given == vector_traits<V>::size || (sizeof...(A) == 1 && given == 1),
                "wrong number of vector elements");
  return V();
}

template <class T, int C, int R>
struct matrix {
  vec<T, R> columns[C];
  vec<T, R>& operator[](int);
};
typedef matrix<float, 2, 2> float2x2;
typedef matrix<float, 3, 3> float3x3;
typedef matrix<float, 4, 4> float4x4;
typedef matrix<float, 2, 4> float2x4;
typedef matrix<half, 4, 4> half4x4;
typedef matrix<half, 2, 4> half2x4;

template <class T, size_t N>
struct array {
  T e[N];
  T& operator[](size_t);
  const T& operator[](size_t) const;
  static constexpr size_t size() { return N; }
};
template <class T>
using uniform = T;
template <class T>
constexpr T make_uniform(T x) {
  return x;
}
}  // namespace metal

template <class To, class From>
To as_type(From) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return To();
}
namespace metal {
using ::as_type;
}
#define MH_GLOBAL_NAMES(T) \
  using metal::T##2;       \
  using metal::T##3;       \
  using metal::T##4;
MH_GLOBAL_NAMES(bool)
MH_FOR_EACH_SCALAR(MH_GLOBAL_NAMES)
using metal::float2x2;
using metal::float2x4;
using metal::float3x3;
using metal::float4x4;
using metal::half2x4;
using metal::half4x4;
