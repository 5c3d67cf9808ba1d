// Barriers, simdgroup functions and simdgroup_matrix.
#pragma once

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return (mem_flags)((int)a | (int)b);
}
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};
void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);

// No bfloat: Metal's simdgroup arithmetic is for half, float and integers.
#define MH_REDUCTION(NAME) \
  template <class T>       \
  enable_if_t<!__is_same(T, bfloat), T> NAME(T);
MH_REDUCTION(simd_sum)
MH_REDUCTION(simd_product)
MH_REDUCTION(simd_max)
MH_REDUCTION(simd_min)
MH_REDUCTION(simd_and)
MH_REDUCTION(simd_or)
MH_REDUCTION(simd_xor)
MH_REDUCTION(simd_prefix_inclusive_sum)
MH_REDUCTION(simd_prefix_exclusive_sum)
MH_REDUCTION(simd_prefix_inclusive_product)
MH_REDUCTION(simd_prefix_exclusive_product)
MH_REDUCTION(simd_broadcast_first)
MH_REDUCTION(quad_sum)
MH_REDUCTION(quad_product)
MH_REDUCTION(quad_max)
MH_REDUCTION(quad_min)
#define MH_SHUFFLE(NAME) \
  template <class T>     \
  T NAME(T, ushort);
MH_SHUFFLE(simd_shuffle)
MH_SHUFFLE(simd_broadcast)
MH_SHUFFLE(simd_shuffle_xor)
MH_SHUFFLE(simd_shuffle_up)
MH_SHUFFLE(simd_shuffle_down)
MH_SHUFFLE(simd_shuffle_rotate_up)
MH_SHUFFLE(simd_shuffle_rotate_down)
MH_SHUFFLE(quad_shuffle)
MH_SHUFFLE(quad_broadcast)
MH_SHUFFLE(quad_shuffle_xor)
MH_SHUFFLE(quad_shuffle_up)
MH_SHUFFLE(quad_shuffle_down)
template <class T>
T simd_shuffle_and_fill_up(T, T, ushort);
template <class T>
T simd_shuffle_and_fill_up(T, T, ushort, ushort);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort, ushort);

struct simd_vote {
  typedef ulong vote_t;
  explicit simd_vote(vote_t = 0);
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

template <class T, int C = 8, int R = 8>
struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "only 8x8 simdgroup matrices exist");
  static_assert(__is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat),
                "simdgroup_matrix elements are float, half or bfloat");
  typedef vec<T, 2> storage_type;
  storage_type elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  storage_type& thread_elements();
  const storage_type& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C = 8, int R = C>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);

#define MH_MATRIX_LOAD(SPACE)                                                \
  template <class T>                                                         \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const SPACE T*, ulong = 8, \
                      vec<ulong, 2> = vec<ulong, 2>(0), bool = false);
MH_MATRIX_LOAD(MH_DEVICE)
MH_MATRIX_LOAD(MH_THREADGROUP)
MH_MATRIX_LOAD(MH_CONSTANT_SPACE)
#define MH_MATRIX_STORE(SPACE)                                                \
  template <class T>                                                          \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8>&, SPACE T*, ulong = 8, \
                       vec<ulong, 2> = vec<ulong, 2>(0), bool = false);
MH_MATRIX_STORE(MH_DEVICE)
MH_MATRIX_STORE(MH_THREADGROUP)

template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                                   const simdgroup_matrix<B, 8, 8>&,
                                   const simdgroup_matrix<C, 8, 8>&);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                        const simdgroup_matrix<B, 8, 8>&);
template <class T>
simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8>&,
                                    const simdgroup_matrix<T, 8, 8>&);
}  // namespace metal
