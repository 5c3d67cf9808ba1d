// Scalar types, constants and attributes, for execution and for the type check alike.
#pragma once
#ifndef MH_TYPE_CHECK
#include "../../runtime/abi.h"
#endif

// Library functions are `nodebug`: what is inlined from them has the line of the kernel's call.
#define MH_FN inline __attribute__((always_inline, nodebug))
#define MH_COLLECTIVE inline __attribute__((always_inline, nodebug, convergent))
#define MH_UNCHECKED __attribute__((no_sanitize("thread"), nodebug))
#define METAL_FUNC inline __attribute__((always_inline))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;
typedef long intptr_t;
typedef _Float16 half;
typedef __bf16 bfloat;

constexpr half operator""h(long double x) {
  return (half)x;
}
constexpr half operator""h(unsigned long long x) {
  return (half)x;
}
constexpr half operator"" H(long double x) {
  return (half)x;
}
constexpr bfloat operator"" bf(long double x) {
  return (bfloat)(float)x;
}
constexpr bfloat operator"" BF(long double x) {
  return (bfloat)(float)x;
}

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_huge_valf()
#define MAXFLOAT FLT_MAX
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_EXP 128
#define FLT_MIN_EXP (-125)
#define HALF_MAX ((half)65504.f)
#define HALF_MIN ((half)6.103515625e-05f)
#define HALF_EPSILON ((half)9.765625e-04f)
#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 0x7fffffff
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 0xffffffffu
#define LONG_MAX 0x7fffffffffffffffl
#define LONG_MIN (-LONG_MAX - 1)
#define ULONG_MAX 0xfffffffffffffffful
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define __METAL_MAYBE_FAST_MATH__ false
#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false
