// Short runs of consecutive elements, read or written with as few memory operations as their size
// allows: 16 bytes at a time where eight 16-bit elements are asked for.
#pragma once

#include <metal_stdlib>

using namespace metal;

template <typename T, int N>
struct Pack;

template <typename T>
struct Pack<T, 2> {
  vec<T, 2> v;
  METAL_FUNC T operator[](int e) const thread { return v[e]; }
};

template <typename T>
struct Pack<T, 4> {
  vec<T, 4> v;
  METAL_FUNC T operator[](int e) const thread { return v[e]; }
};

template <typename T>
struct Pack<T, 8> {
  vec<T, 4> lo;
  vec<T, 4> hi;
  METAL_FUNC T operator[](int e) const thread { return e < 4 ? lo[e & 3] : hi[e & 3]; }
};

template <typename T>
METAL_FUNC void zero_pack(thread Pack<T, 2>& x) {
  x.v = vec<T, 2>(T(0));
}
template <typename T>
METAL_FUNC void zero_pack(thread Pack<T, 4>& x) {
  x.v = vec<T, 4>(T(0));
}
template <typename T>
METAL_FUNC void zero_pack(thread Pack<T, 8>& x) {
  x.lo = vec<T, 4>(T(0));
  x.hi = vec<T, 4>(T(0));
}

// p is aligned to the run, at most to 16 bytes.
template <typename T>
METAL_FUNC void load_pack(thread Pack<T, 2>& x, const device T* p) {
  x.v = *(const device vec<T, 2>*)p;
}
template <typename T>
METAL_FUNC void load_pack(thread Pack<T, 4>& x, const device T* p) {
  x.v = *(const device vec<T, 4>*)p;
}
template <typename T, enable_if_t<sizeof(T) == 2, bool> = true>
METAL_FUNC void load_pack(thread Pack<T, 8>& x, const device T* p) {
  const uint4 w = *(const device uint4*)p;
  x.lo = as_type<vec<T, 4>>(w.xy);
  x.hi = as_type<vec<T, 4>>(w.zw);
}
template <typename T, enable_if_t<sizeof(T) == 4, bool> = true>
METAL_FUNC void load_pack(thread Pack<T, 8>& x, const device T* p) {
  x.lo = *(const device vec<T, 4>*)p;
  x.hi = *(const device vec<T, 4>*)(p + 4);
}

template <typename T>
METAL_FUNC void load_pack(thread Pack<T, 2>& x, const threadgroup T* p) {
  x.v = *(const threadgroup vec<T, 2>*)p;
}
template <typename T>
METAL_FUNC void load_pack(thread Pack<T, 4>& x, const threadgroup T* p) {
  x.v = *(const threadgroup vec<T, 4>*)p;
}
template <typename T, enable_if_t<sizeof(T) == 2, bool> = true>
METAL_FUNC void load_pack(thread Pack<T, 8>& x, const threadgroup T* p) {
  const uint4 w = *(const threadgroup uint4*)p;
  x.lo = as_type<vec<T, 4>>(w.xy);
  x.hi = as_type<vec<T, 4>>(w.zw);
}
template <typename T, enable_if_t<sizeof(T) == 4, bool> = true>
METAL_FUNC void load_pack(thread Pack<T, 8>& x, const threadgroup T* p) {
  x.lo = *(const threadgroup vec<T, 4>*)p;
  x.hi = *(const threadgroup vec<T, 4>*)(p + 4);
}
