// Integer functions.
#pragma once

namespace metal {
template <class T>
MH_FN T popcount(T x) {
  return (T)__builtin_popcountll((ulong)(__make_unsigned(T))x);
}
template <class T>
MH_FN T clz(T x) {
  constexpr int bits = 8 * sizeof(T);
  return x ? (T)(__builtin_clzll((ulong)(__make_unsigned(T))x) - (64 - bits)) : (T)bits;
}
template <class T>
MH_FN T ctz(T x) {
  return x ? (T)__builtin_ctzll((ulong)x) : (T)(8 * sizeof(T));
}
template <class T>
MH_FN T reverse_bits(T x) {
  __make_unsigned(T) in = x, out = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); i++, in >>= 1) out = (out << 1) | (in & 1);
  return (T)out;
}
template <class T>
MH_FN T rotate(T x, T n) {
  constexpr int bits = 8 * sizeof(T);
  typedef __make_unsigned(T) U;
  n &= bits - 1;
  return n ? (T)(((U)x << n) | ((U)x >> (bits - n))) : x;
}
template <class T>
MH_FN T low_mask(uint bits) {
  return bits >= 8 * sizeof(T) ? (T)-1 : (T)(((T)1 << bits) - 1);
}
template <class T>
MH_FN T extract_bits(T x, uint offset, uint bits) {
  return bits ? (T)((x >> offset) & low_mask<T>(bits)) : (T)0;
}
template <class T>
MH_FN T insert_bits(T base, T inserted, uint offset, uint bits) {
  const T mask = (T)(low_mask<T>(bits) << offset);
  return (base & ~mask) | ((inserted << offset) & mask);
}
MH_FN uint mulhi(uint a, uint b) {
  return (uint)(((ulong)a * b) >> 32);
}
MH_FN int mulhi(int a, int b) {
  return (int)(((long)a * b) >> 32);
}
MH_FN ulong mulhi(ulong a, ulong b) {
  return (ulong)(((unsigned __int128)a * b) >> 64);
}
template <class T>
MH_FN T absdiff(T a, T b) {
  return a < b ? b - a : a - b;
}
template <class T>
MH_FN T mad24(T a, T b, T c) {
  return a * b + c;
}
template <class T>
MH_FN T madhi(T a, T b, T c) {
  return mulhi(a, b) + c;
}
template <class T>
MH_FN T addsat(T a, T b) {
  T r;
  if (!__builtin_add_overflow(a, b, &r)) return r;
  return b < 0 ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
template <class T>
MH_FN T subsat(T a, T b) {
  T r;
  if (!__builtin_sub_overflow(a, b, &r)) return r;
  return b < 0 || a >= 0 ? (a < b ? numeric_limits<T>::min() : numeric_limits<T>::max())
                         : numeric_limits<T>::min();
}
}  // namespace metal
