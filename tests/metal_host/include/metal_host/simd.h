// Barriers and simdgroup (and quadgroup) functions: collectives of the runtime.
//
// Each lane gives its value, waits until all lanes of its simdgroup stand at the same place, and
// computes its own result from everybody's values. A function's place is the kernel's call, taken
// by the default argument MH_SITE.
#pragma once

#define MH_HERE                                            \
  mh_site {                                                \
    __builtin_FILE(), __builtin_LINE(), __builtin_COLUMN() \
  }
#define MH_SITE mh_site site = MH_HERE

namespace metal {
enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
MH_FN constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return (mem_flags)((int)a | (int)b);
}
MH_FN constexpr mem_flags operator&(mem_flags a, mem_flags b) {
  return (mem_flags)((int)a & (int)b);
}
enum memory_order {
  memory_order_relaxed = 0,
  memory_order_acquire = 2,
  memory_order_release = 3,
  memory_order_acq_rel = 4,
  memory_order_seq_cst = 5
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};

MH_COLLECTIVE void threadgroup_barrier(mem_flags flags, MH_SITE) {
  mh_rt_threadgroup_barrier((int)flags, site);
}
MH_COLLECTIVE void simdgroup_barrier(mem_flags flags, MH_SITE) {
  mh_slots slots;
  mh_rt_collective(&slots, MH_OP_BARRIER, (int)flags, &slots, 0, site);
}
MH_FN void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}
}  // namespace metal

namespace metal_host {
// The function, so that two of them at one place (a conditional expression) stay apart.
enum function {
  f_sum,
  f_product,
  f_max,
  f_min,
  f_and,
  f_or,
  f_xor,
  f_inclusive_sum,
  f_inclusive_product,
  f_exclusive_sum,
  f_exclusive_product,
  f_shuffle,
  f_shuffle_xor,
  f_shuffle_up,
  f_shuffle_down,
  f_rotate_up,
  f_rotate_down,
  f_fill_up,
  f_fill_down,
  f_fill,
  f_broadcast,
  f_broadcast_first,
  f_ballot,
  f_all,
  f_any,
  f_is_first,
  f_active,
  f_quad
};

struct gathered {
  mh_slots slots;
  template <class T>
  MH_FN T get(int lane) const {
    T value;
    __builtin_memcpy_inline(&value, slots.slot[lane], sizeof(T));
    return value;
  }
  MH_FN bool has(int lane) const { return lane >= 0 && lane < 32 && (slots.mask >> lane & 1); }
  MH_FN int lane() const { return (int)slots.lane; }
};

// `argument` must be the same in all lanes, as Metal asks of deltas and masks.
template <class T>
__attribute__((noinline, convergent, no_sanitize("thread"), nodebug)) gathered
gather(int op, function which, int argument, T value, mh_site site) {
  static_assert(sizeof(T) <= MH_SLOT_BYTES, "value too large for a simdgroup function");
  gathered g;
  mh_rt_collective(&g.slots, op, (int)which | argument << 8, &value, sizeof(T), site);
  return g;
}

// Pairwise: lane i with lane i + 16, then 8, 4, 2, 1.
template <class T, class F>
__attribute__((noinline)) MH_UNCHECKED T reduce(const gathered& g, int first, int lanes, F f) {
  T value[32];
  bool has[32];
  for (int i = 0; i < lanes; i++) {
    has[i] = g.has(first + i);
    if (has[i]) value[i] = g.get<T>(first + i);
  }
  for (int d = lanes / 2; d; d /= 2) {
    for (int i = 0; i < d; i++) {
      if (!has[i + d]) continue;
      value[i] = has[i] ? f(value[i], value[i + d]) : value[i + d];
      has[i] = true;
    }
  }
  return value[0];
}

template <class T, class F>
__attribute__((noinline)) MH_UNCHECKED T scan(const gathered& g, int end, T zero, F f) {
  T value = zero;
  bool any = false;
  for (int i = 0; i < end; i++) {
    if (!g.has(i)) continue;
    value = any ? f(value, g.get<T>(i)) : g.get<T>(i);
    any = true;
  }
  return value;
}

template <class T>
__attribute__((noinline)) MH_UNCHECKED T pick(const gathered& g, int lane, mh_site site) {
  if (g.has(lane)) return g.get<T>(lane);
  mh_rt_fail(
      lane >= 0 && lane < 32 ? "shuffle reads an inactive lane" : "shuffle lane out of range",
      site);
  T nothing;
  __builtin_memset(&nothing, 0xFF, sizeof nothing);
  return nothing;
}

// The lanes that gave true.
inline __attribute__((noinline)) MH_UNCHECKED uint true_lanes(const gathered& g) {
  uint lanes = 0;
  for (int i = 0; i < 32; i++) lanes |= uint(g.has(i) && g.get<bool>(i)) << i;
  return lanes;
}
}  // namespace metal_host

namespace metal {
// No bfloat overloads in Metal's simdgroup arithmetic.
#define MH_SIMD_VALUE(T) enable_if_t<!__is_same(T, bfloat), T>
#define MH_COMBINE(EXPRESSION) [](T a, T b) MH_UNCHECKED { return (T)(EXPRESSION); }

#define MH_REDUCTION(NAME, EXPRESSION)                                           \
  template <class T>                                                             \
  MH_COLLECTIVE MH_SIMD_VALUE(T) simd_##NAME(T v, MH_SITE) {                     \
    auto g = metal_host::gather(MH_OP_REDUCE, metal_host::f_##NAME, 0, v, site); \
    return metal_host::reduce<T>(g, 0, 32, MH_COMBINE(EXPRESSION));              \
  }                                                                              \
  template <class T>                                                             \
  MH_COLLECTIVE MH_SIMD_VALUE(T) quad_##NAME(T v, MH_SITE) {                     \
    auto g = metal_host::gather(MH_OP_QUAD, metal_host::f_##NAME, 0, v, site);   \
    return metal_host::reduce<T>(g, g.lane() & ~3, 4, MH_COMBINE(EXPRESSION));   \
  }
MH_REDUCTION(sum, a + b)
MH_REDUCTION(product, (a * b))
MH_REDUCTION(max, max(a, b))
MH_REDUCTION(min, min(a, b))
MH_REDUCTION(and, (a & b))
MH_REDUCTION(or, (a | b))
MH_REDUCTION(xor, a ^ b)

#define MH_SCAN(NAME, ZERO, EXPRESSION)                                                    \
  template <class T>                                                                       \
  MH_COLLECTIVE MH_SIMD_VALUE(T) simd_prefix_inclusive_##NAME(T v, MH_SITE) {              \
    auto g = metal_host::gather(MH_OP_REDUCE, metal_host::f_inclusive_##NAME, 0, v, site); \
    return metal_host::scan<T>(g, g.lane() + 1, (T)ZERO, MH_COMBINE(EXPRESSION));          \
  }                                                                                        \
  template <class T>                                                                       \
  MH_COLLECTIVE MH_SIMD_VALUE(T) simd_prefix_exclusive_##NAME(T v, MH_SITE) {              \
    auto g = metal_host::gather(MH_OP_REDUCE, metal_host::f_exclusive_##NAME, 0, v, site); \
    return metal_host::scan<T>(g, g.lane(), (T)ZERO, MH_COMBINE(EXPRESSION));              \
  }
MH_SCAN(sum, 0, a + b)
MH_SCAN(product, 1, (a * b))

// NAME(value, k): UNIFORM is the part of k that all lanes must agree on, SOURCE the lane read.
#define MH_SHUFFLE(NAME, OP, FUNCTION, UNIFORM, SOURCE)                      \
  template <class T>                                                         \
  MH_COLLECTIVE T NAME(T v, ushort k, MH_SITE) {                             \
    auto g = metal_host::gather(OP, metal_host::FUNCTION, UNIFORM, v, site); \
    const int lane = g.lane(), n = k;                                        \
    (void)lane;                                                              \
    return metal_host::pick<T>(g, SOURCE, site);                             \
  }
MH_SHUFFLE(simd_shuffle, MH_OP_SHUFFLE, f_shuffle, 0, n)
MH_SHUFFLE(simd_broadcast, MH_OP_SHUFFLE, f_broadcast, k, n)
MH_SHUFFLE(simd_shuffle_xor, MH_OP_SHUFFLE, f_shuffle_xor, k, lane ^ n)
// Lanes without a source keep their own value.
MH_SHUFFLE(simd_shuffle_up, MH_OP_SHUFFLE, f_shuffle_up, k, lane < n ? lane : lane - n)
MH_SHUFFLE(simd_shuffle_down, MH_OP_SHUFFLE, f_shuffle_down, k, lane + n > 31 ? lane : lane + n)
MH_SHUFFLE(simd_shuffle_rotate_up, MH_OP_SHUFFLE, f_rotate_up, k, (lane - n) & 31)
MH_SHUFFLE(simd_shuffle_rotate_down, MH_OP_SHUFFLE, f_rotate_down, k, (lane + n) & 31)
MH_SHUFFLE(quad_shuffle, MH_OP_QUAD, f_shuffle, 0, (lane & ~3) | (n & 3))
MH_SHUFFLE(quad_broadcast, MH_OP_QUAD, f_broadcast, k, (lane & ~3) | (n & 3))
MH_SHUFFLE(quad_shuffle_xor, MH_OP_QUAD, f_shuffle_xor, k, (lane & ~3) | ((lane ^ n) & 3))
MH_SHUFFLE(quad_shuffle_up, MH_OP_QUAD, f_shuffle_up, k, (lane & 3) < n ? lane : lane - n)
MH_SHUFFLE(quad_shuffle_down, MH_OP_QUAD, f_shuffle_down, k, (lane & 3) + n > 3 ? lane : lane + n)

// Shuffles that take the missing values from `fill`: lane p of a group of `modulo` lanes.
template <class T>
MH_COLLECTIVE T simd_shuffle_and_fill_up(T v, T fill, ushort k, ushort modulo, MH_SITE) {
  auto g = metal_host::gather(MH_OP_SHUFFLE, metal_host::f_fill_up, k, v, site);
  const int first = g.lane() / modulo * modulo, from = g.lane() - first - k;
  T own{};
  if (from >= 0) own = metal_host::pick<T>(g, first + from, site);
  auto f = metal_host::gather(MH_OP_SHUFFLE, metal_host::f_fill, k, fill, site);
  return from >= 0 ? own : metal_host::pick<T>(f, first + modulo + from, site);
}
template <class T>
MH_COLLECTIVE T simd_shuffle_and_fill_down(T v, T fill, ushort k, ushort modulo, MH_SITE) {
  auto g = metal_host::gather(MH_OP_SHUFFLE, metal_host::f_fill_down, k, v, site);
  const int first = g.lane() / modulo * modulo, from = g.lane() - first + k;
  T own{};
  if (from < modulo) own = metal_host::pick<T>(g, first + from, site);
  auto f = metal_host::gather(MH_OP_SHUFFLE, metal_host::f_fill, k, fill, site);
  return from < modulo ? own : metal_host::pick<T>(f, first + from - modulo, site);
}
template <class T>
MH_COLLECTIVE T simd_shuffle_and_fill_up(T v, T fill, ushort k, MH_SITE) {
  return simd_shuffle_and_fill_up(v, fill, k, (ushort)32, site);
}
template <class T>
MH_COLLECTIVE T simd_shuffle_and_fill_down(T v, T fill, ushort k, MH_SITE) {
  return simd_shuffle_and_fill_down(v, fill, k, (ushort)32, site);
}
template <class T>
MH_COLLECTIVE T simd_broadcast_first(T v, MH_SITE) {
  auto g = metal_host::gather(MH_OP_SHUFFLE, metal_host::f_broadcast_first, 0, v, site);
  return metal_host::pick<T>(g, __builtin_ctz(g.slots.mask), site);
}

struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  MH_FN explicit simd_vote(vote_t v = 0) : votes(v) {}
  MH_FN explicit operator vote_t() const { return votes; }
  MH_FN bool all() const { return votes == 0xffffffffull; }
  MH_FN bool any() const { return votes != 0; }
};
MH_COLLECTIVE simd_vote simd_ballot(bool b, MH_SITE) {
  auto g = metal_host::gather(MH_OP_BALLOT, metal_host::f_ballot, 0, b, site);
  return simd_vote(metal_host::true_lanes(g));
}
MH_COLLECTIVE bool simd_all(bool b, MH_SITE) {
  auto g = metal_host::gather(MH_OP_BALLOT, metal_host::f_all, 0, b, site);
  return metal_host::true_lanes(g) == g.slots.mask;
}
MH_COLLECTIVE bool simd_any(bool b, MH_SITE) {
  auto g = metal_host::gather(MH_OP_BALLOT, metal_host::f_any, 0, b, site);
  return metal_host::true_lanes(g) != 0;
}
MH_COLLECTIVE bool simd_is_first(MH_SITE) {
  auto g = metal_host::gather(MH_OP_BALLOT, metal_host::f_is_first, 0, true, site);
  return g.lane() == __builtin_ctz(g.slots.mask);
}
MH_COLLECTIVE simd_vote simd_active_threads_mask(MH_SITE) {
  auto g = metal_host::gather(MH_OP_BALLOT, metal_host::f_active, 0, true, site);
  return simd_vote(g.slots.mask);
}
}  // namespace metal
