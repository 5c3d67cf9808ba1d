// 8x8 simdgroup matrices by lane: each lane holds elements (row, col) and (row, col + 1) of a tile.
//
// The mapping is the one that MLX's kernels and llama.cpp's rely on.  Because an accumulator and a
// right operand share it, a product can be used as the next product's operand without leaving the
// registers.
#pragma once

#include <metal_stdlib>

using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")

// Element e (0 or 1) of this lane's share of a simdgroup matrix.
#define ELEMENT(M, E) M.thread_elements()[E]

struct FragmentLane {
  short row;
  short col;
};

METAL_FUNC FragmentLane fragment_lane(uint lane) {
  FragmentLane at;
  at.row = ((lane >> 4) & 1) * 4 + ((lane >> 1) & 3);
  at.col = ((lane >> 3) & 1) * 4 + (lane & 1) * 2;
  return at;
}

METAL_FUNC void fragment_zero(thread simdgroup_float8x8& m) {
  ELEMENT(m, 0) = 0.0f;
  ELEMENT(m, 1) = 0.0f;
}

METAL_FUNC void fragment_add(thread simdgroup_float8x8& m, thread simdgroup_float8x8& x) {
  ELEMENT(m, 0) += ELEMENT(x, 0);
  ELEMENT(m, 1) += ELEMENT(x, 1);
}

METAL_FUNC void fragment_scale(thread simdgroup_float8x8& m, float s) {
  ELEMENT(m, 0) *= s;
  ELEMENT(m, 1) *= s;
}

// Two neighbouring elements as float; p must be aligned to both.
template <typename T>
METAL_FUNC float2 load_pair(const device T* p) {
  const vec<T, 2> x = *(const device vec<T, 2>*)p;
  return float2(float(x.x), float(x.y));
}

template <typename T>
METAL_FUNC float2 load_pair(const threadgroup T* p) {
  const vec<T, 2> x = *(const threadgroup vec<T, 2>*)p;
  return float2(float(x.x), float(x.y));
}

template <typename T>
METAL_FUNC void store_pair(device T* p, float2 x) {
  *(device vec<T, 2>*)p = vec<T, 2>(T(x.x), T(x.y));
}

// The same where only `left` elements remain in the row (any alignment, `stride` apart); the others
// read as 0.
template <typename T>
METAL_FUNC float2 load_pair(const device T* p, int left, int stride) {
  return float2(left > 0 ? float(p[0]) : 0.0f, left > 1 ? float(p[stride]) : 0.0f);
}

template <typename T>
METAL_FUNC void store_pair(device T* p, float2 x, int left) {
  if (left > 0) p[0] = T(x.x);
  if (left > 1) p[1] = T(x.y);
}

// A tile from memory; p points at this lane's first element (row, col).
template <typename T>
METAL_FUNC void fragment_load(thread simdgroup_float8x8& m, const threadgroup T* p) {
  const float2 x = load_pair(p);
  ELEMENT(m, 0) = x.x;
  ELEMENT(m, 1) = x.y;
}

// The transpose of a tile in memory with rows `ld` apart; p points at its element (col, row).
template <typename T>
METAL_FUNC void fragment_load_transposed(
    thread simdgroup_float8x8& m, const threadgroup T* p, int ld) {
  ELEMENT(m, 0) = float(p[0]);
  ELEMENT(m, 1) = float(p[ld]);
}
