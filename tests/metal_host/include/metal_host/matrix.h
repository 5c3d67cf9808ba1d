// simdgroup_matrix: 8x8, two elements a lane, in the layout of Apple's hardware.
//
// Lane l holds elements (row, col) and (row, col + 1); MLX's BaseMMAFrag, MetalFlashAttention and
// metal2vk state the same map. A product is k-ascending float32 FMA, rounded to D's type once.
#pragma once

namespace metal_host {
MH_FN uint fragment_row(uint lane) {
  return (lane >> 4 & 1) * 4 + (lane >> 1 & 3);
}
MH_FN uint fragment_column(uint lane) {
  return (lane >> 3 & 1) * 4 + (lane & 1) * 2;
}
MH_FN uint fragment_lane(uint row, uint column) {
  return (row >> 2 & 1) << 4 | (column >> 2 & 1) << 3 | (row & 3) << 1 | (column >> 1 & 1);
}

template <class A, class B>
struct operands {
  A a[2];
  B b[2];
};

template <class D, class A, class B, class C>
__attribute__((noinline, convergent, no_sanitize("thread"), nodebug)) void multiply_accumulate(
    D* d, const A* a, const B* b, const C* c, mh_site site) {
  const operands<A, B> mine{{a[0], a[1]}, {b[0], b[1]}};
  mh_slots slots;
  mh_rt_collective(&slots, MH_OP_MMA, 0, &mine, sizeof mine, site);
  const uint row = fragment_row(slots.lane), column = fragment_column(slots.lane);
  float sum[2] = {c ? (float)c[0] : 0.f, c ? (float)c[1] : 0.f};
  for (uint k = 0; k < 8; k++) {
    const auto* left = (const operands<A, B>*)slots.slot[fragment_lane(row, k)];
    const auto* right = (const operands<A, B>*)slots.slot[fragment_lane(k, column)];
    const float x = (float)left->a[k & 1];
    sum[0] = __builtin_fmaf(x, (float)right->b[0], sum[0]);
    sum[1] = __builtin_fmaf(x, (float)right->b[1], sum[1]);
  }
  d[0] = (D)sum[0];
  d[1] = (D)sum[1];
}
}  // namespace metal_host

namespace metal {
template <class T, int C = 8, int R = 8>
struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "only 8x8 simdgroup matrices exist");
  static_assert(__is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat),
                "simdgroup_matrix elements are float, half or bfloat");
  typedef vec<T, 2> storage_type;
  storage_type elements;
  simdgroup_matrix() = default;
  MH_FN explicit simdgroup_matrix(T diagonal) {
    const uint lane = mh_rt_lane();
    const uint row = metal_host::fragment_row(lane), column = metal_host::fragment_column(lane);
    elements.e[0] = row == column ? diagonal : T(0);
    elements.e[1] = row == column + 1 ? diagonal : T(0);
  }
  MH_FN storage_type& thread_elements() { return elements; }
  MH_FN const storage_type& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C = 8, int R = C>
MH_FN simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.elements.e[0] = m.elements.e[1] = value;
  return m;
}

// `origin` is (column, row) of the matrix's first element; rows are `stride` elements apart.
template <class T>
MH_COLLECTIVE void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* source, ulong stride = 8,
                                  vec<ulong, 2> origin = vec<ulong, 2>(0, 0),
                                  bool transpose = false, MH_SITE) {
  mh_slots slots;
  mh_rt_collective(&slots, MH_OP_MATRIX_LOAD, 0, &slots, 0, site);
  const uint row = metal_host::fragment_row(slots.lane);
  const uint column = metal_host::fragment_column(slots.lane);
  source += origin.y * stride + origin.x;
  for (uint i = 0; i < 2; i++) {
    d.elements.e[i] =
        transpose ? source[(column + i) * stride + row] : source[row * stride + column + i];
  }
}
template <class T>
MH_COLLECTIVE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& s, T* target, ulong stride = 8,
                                   vec<ulong, 2> origin = vec<ulong, 2>(0, 0),
                                   bool transpose = false, MH_SITE) {
  mh_slots slots;
  mh_rt_collective(&slots, MH_OP_MATRIX_STORE, 0, &slots, 0, site);
  const uint row = metal_host::fragment_row(slots.lane);
  const uint column = metal_host::fragment_column(slots.lane);
  target += origin.y * stride + origin.x;
  for (uint i = 0; i < 2; i++) {
    (transpose ? target[(column + i) * stride + row] : target[row * stride + column + i]) =
        s.elements.e[i];
  }
}

template <class D, class A, class B, class C>
MH_COLLECTIVE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                 const simdgroup_matrix<A, 8, 8>& a,
                                                 const simdgroup_matrix<B, 8, 8>& b,
                                                 const simdgroup_matrix<C, 8, 8>& c, MH_SITE) {
  D out[2];
  metal_host::multiply_accumulate(out, a.elements.e, b.elements.e, c.elements.e, site);
  d.elements.e[0] = out[0];
  d.elements.e[1] = out[1];
}
template <class D, class A, class B>
MH_COLLECTIVE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d,
                                      const simdgroup_matrix<A, 8, 8>& a,
                                      const simdgroup_matrix<B, 8, 8>& b, MH_SITE) {
  D out[2];
  metal_host::multiply_accumulate(out, a.elements.e, b.elements.e, (const D*)nullptr, site);
  d.elements.e[0] = out[0];
  d.elements.e[1] = out[1];
}
template <class T>
MH_COLLECTIVE simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>& a,
                                                  const simdgroup_matrix<T, 8, 8>& b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}
}  // namespace metal
