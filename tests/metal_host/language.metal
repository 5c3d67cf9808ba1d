// One kernel for each piece of the language that test_language.py compares with NumPy.
#include <metal_stdlib>
using namespace metal;

#define LANE_KERNEL(name, T, expression)                                                   \
  kernel void name(const device T* x [[buffer(0)]], const device int* index [[buffer(1)]], \
                   device T* y [[buffer(2)]], uint i [[thread_position_in_grid]],          \
                   uint lane [[thread_index_in_simdgroup]]) {                              \
    const T v = x[i];                                                                      \
    const ushort k = ushort(index[i]);                                                     \
    y[i] = T(expression);                                                                  \
  }
LANE_KERNEL(sum_float, float, simd_sum(v))
LANE_KERNEL(sum_int, int, simd_sum(v))
LANE_KERNEL(product_float, float, simd_product(v))
LANE_KERNEL(max_float, float, simd_max(v))
LANE_KERNEL(min_int, int, simd_min(v))
LANE_KERNEL(and_int, int, simd_and(v))
LANE_KERNEL(or_int, int, simd_or(v))
LANE_KERNEL(xor_int, int, simd_xor(v))
LANE_KERNEL(inclusive_sum, int, simd_prefix_inclusive_sum(v))
LANE_KERNEL(exclusive_sum, int, simd_prefix_exclusive_sum(v))
LANE_KERNEL(inclusive_product, float, simd_prefix_inclusive_product(v))
LANE_KERNEL(exclusive_product, float, simd_prefix_exclusive_product(v))
LANE_KERNEL(shuffle, float, simd_shuffle(v, k))
LANE_KERNEL(shuffle_xor, float, simd_shuffle_xor(v, 5))
LANE_KERNEL(shuffle_up, float, simd_shuffle_up(v, 3))
LANE_KERNEL(shuffle_down, float, simd_shuffle_down(v, 3))
LANE_KERNEL(rotate_up, float, simd_shuffle_rotate_up(v, 3))
LANE_KERNEL(rotate_down, float, simd_shuffle_rotate_down(v, 3))
LANE_KERNEL(fill_up, float, simd_shuffle_and_fill_up(v, -v, 3))
LANE_KERNEL(fill_down, float, simd_shuffle_and_fill_down(v, -v, 3))
LANE_KERNEL(fill_up_8, float, simd_shuffle_and_fill_up(v, -v, 3, 8))
LANE_KERNEL(fill_down_8, float, simd_shuffle_and_fill_down(v, -v, 3, 8))
LANE_KERNEL(broadcast, float, simd_broadcast(v, 9))
LANE_KERNEL(broadcast_first, float, simd_broadcast_first(v))
LANE_KERNEL(ballot, int, int(ulong(simd_ballot(v > 0))))
LANE_KERNEL(vote_all, int, simd_all(v > -1000))
LANE_KERNEL(vote_any, int, simd_any(v > 1000))
LANE_KERNEL(is_first, int, simd_is_first())
LANE_KERNEL(quad_sums, float, quad_sum(v))
LANE_KERNEL(quad_maxima, float, quad_max(v))
LANE_KERNEL(quad_shuffles, float, quad_shuffle_xor(v, 2))
LANE_KERNEL(vector_shuffle, float, simd_shuffle_xor(float4(v, -v, 2 * v, 0), 1).z)

// ---- matrices
// -------------------------------------------------------------------------------------

template <typename T>
[[kernel]] void matrix_load(const device T* x [[buffer(0)]], device T* y [[buffer(1)]],
                            constant int& stride [[buffer(2)]], constant int4& at [[buffer(3)]],
                            uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<T, 8, 8> m;
  simdgroup_load(m, x, stride, ulong2(at.x, at.y), at.z != 0);
  y[2 * lane] = m.thread_elements()[0];
  y[2 * lane + 1] = m.thread_elements()[1];
}
template
    [[host_name("matrix_load_float")]] [[kernel]] decltype(matrix_load<float>) matrix_load<float>;
template [[host_name("matrix_load_half")]] [[kernel]] decltype(matrix_load<half>) matrix_load<half>;

kernel void matrix_store(device float* y [[buffer(0)]], constant int& stride [[buffer(1)]],
                         constant int4& at [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 m;
  m.thread_elements()[0] = 2 * lane;
  m.thread_elements()[1] = 2 * lane + 1;
  simdgroup_store(m, y, stride, ulong2(at.x, at.y), at.z != 0);
}

kernel void matrix_diagonal(device float* y [[buffer(0)]],
                            uint lane [[thread_index_in_simdgroup]]) {
  const simdgroup_float8x8 m(3.0f);
  simdgroup_store(m, y, 8);
}

template <typename A, typename B, typename D>
[[kernel]] void matrix_product(const device A* a [[buffer(0)]], const device B* b [[buffer(1)]],
                               const device float* c [[buffer(2)]], device D* d [[buffer(3)]],
                               device D* e [[buffer(4)]]) {
  simdgroup_matrix<A, 8, 8> left;
  simdgroup_matrix<B, 8, 8> right;
  simdgroup_float8x8 sum;
  simdgroup_matrix<D, 8, 8> out;
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 8);
  simdgroup_load(sum, c, 8);
  simdgroup_multiply_accumulate(out, left, right, sum);
  simdgroup_store(out, d, 8);
  simdgroup_multiply(out, left, right);
  simdgroup_store(out, e, 8);
}
#define PRODUCT(name, A, B, D) \
  template [[host_name(name)]] [[kernel]] decltype(matrix_product<A, B, D>) matrix_product<A, B, D>;
PRODUCT("matrix_product_float", float, float, float)
PRODUCT("matrix_product_half", half, half, float)
PRODUCT("matrix_product_bfloat", bfloat, bfloat, float)
PRODUCT("matrix_product_half_half", half, half, half)
PRODUCT("matrix_product_float_half", float, half, float)

// ---- arithmetic
// -----------------------------------------------------------------------------------

template <typename T>
[[kernel]] void arithmetic(const device T* a [[buffer(0)]], const device T* b [[buffer(1)]],
                           device T* sum [[buffer(2)]], device T* product [[buffer(3)]],
                           device T* quotient [[buffer(4)]], device T* narrowed [[buffer(5)]],
                           device float* widened [[buffer(6)]],
                           uint i [[thread_position_in_grid]]) {
  sum[i] = a[i] + b[i];
  product[i] = a[i] * b[i];
  quotient[i] = a[i] / b[i];
  narrowed[i] = T(float(a[i]) * 1.0009765625f + 1e-3f);
  widened[i] = float(a[i]);
}
#define ARITHMETIC(name, T) \
  template [[host_name(name)]] [[kernel]] decltype(arithmetic<T>) arithmetic<T>;
ARITHMETIC("arithmetic_float", float)
ARITHMETIC("arithmetic_half", half)
ARITHMETIC("arithmetic_bfloat", bfloat)

kernel void floats(const device float* x [[buffer(0)]], device float* y [[buffer(1)]]) {
  const float nan = NAN;
  y[0] = 1.0 / 3.0;  // literals are float
  y[1] = max(nan, x[0]);
  y[2] = min(x[0], nan);
  y[3] = clamp(x[0], 5.0f, 6.0f);
  y[4] = select(1.0f, 2.0f, x[0] > 0);
  y[5] = fma(x[0], x[0], -x[1]);
  y[6] = exp2(x[0]);
  y[7] = rsqrt(x[0]);
  y[8] = as_type<float>(0x40490fdbu);
  y[9] = float(1e-8h);
  y[10] = precise::exp(x[0]);
  y[11] = fast::log(x[0]);
  y[12] = sign(-x[0]);
  y[13] = mix(x[0], x[1], 0.25f);
  y[14] = float(isnan(nan)) + 2 * float(isinf(INFINITY)) + 4 * float(isfinite(x[0]));
  y[15] = fract(x[1]);
}

kernel void integers(const device uint* x [[buffer(0)]], device uint* y [[buffer(1)]]) {
  y[0] = popcount(x[0]);
  y[1] = clz(x[0]);
  y[2] = ctz(x[0]);
  y[3] = reverse_bits(x[0]);
  y[4] = rotate(x[0], 8u);
  y[5] = extract_bits(x[0], 4, 8);
  y[6] = insert_bits(x[0], 0xABu, 8, 8);
  y[7] = mulhi(x[0], x[1]);
  y[8] = absdiff(3u, 5u);
  y[9] = max3(1u, 9u, 4u);
  y[10] = uint(clz(ushort(1)));
  y[11] = clz(0u);
}

kernel void vectors(device float* y [[buffer(0)]], device int* sizes [[buffer(1)]]) {
  float4 v = float4(1, float2(2, 3), 4);
  v.xz = v.zx;
  v.w += v.y;
  y[0] = v.x;
  y[1] = v.y;
  y[2] = v.z;
  y[3] = v.w;
  y[4] = dot(v.xyz, float3(1));
  y[5] = (v.rgb * 2.0f).b;
  y[6] = all(v > float4(0)) && !any(v < 0.0f);
  const int3 n = int3(float3(1.9f, -1.9f, 7.0f));
  y[7] = n.x * 100 + n.y * 10 + n.z;
  const uint4 m = (uint4(1, 2, 3, 4) << 2u) & 12u;
  y[8] = m[0] + m[1] + m[2] + m[3];
  y[9] = v[3];
  sizes[0] = sizeof(float3);
  sizes[1] = sizeof(packed_float3);
  sizes[2] = sizeof(half4);
  sizes[3] = alignof(float4);
  sizes[4] = sizeof(bfloat2);
  sizes[5] = sizeof(long4);
}

// ---- atomics, built-ins
// ---------------------------------------------------------------------------

kernel void atomics(device atomic_int* a [[buffer(0)]], device atomic_float* f [[buffer(1)]],
                    const device float* x [[buffer(2)]], device int* shared [[buffer(3)]],
                    uint i [[thread_position_in_grid]], uint t [[thread_position_in_threadgroup]],
                    uint group [[threadgroup_position_in_grid]]) {
  threadgroup atomic_uint count;
  if (t == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&count, t, memory_order_relaxed);
  atomic_fetch_add_explicit(&a[0], int(i), memory_order_relaxed);
  atomic_fetch_max_explicit(&a[1], int(i), memory_order_relaxed);
  atomic_fetch_min_explicit(&a[2], -int(i), memory_order_relaxed);
  atomic_fetch_or_explicit(&a[3], 1 << (i % 31), memory_order_relaxed);
  atomic_fetch_xor_explicit(&a[4], int(i), memory_order_relaxed);
  int seen = atomic_load_explicit(&a[5], memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(&a[5], &seen, seen + 2, memory_order_relaxed,
                                                memory_order_relaxed)) {
  }
  atomic_fetch_add_explicit(f, x[i], memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) shared[group] = int(atomic_load_explicit(&count, memory_order_relaxed));
}

kernel void positions(
    device uint* y [[buffer(0)]], constant uint2& width [[buffer(1)]],
    uint2 position [[thread_position_in_grid]], ushort2 in_group [[thread_position_in_threadgroup]],
    uint2 group [[threadgroup_position_in_grid]], uint2 grid [[threads_per_grid]],
    uint2 groups [[threadgroups_per_grid]], uint2 size [[threads_per_threadgroup]],
    uint2 asked [[dispatch_threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  device uint* out = y + (position.y * width.x + position.x) * 12;
  out[0] = in_group.x;
  out[1] = in_group.y;
  out[2] = group.x * 10 + group.y;
  out[3] = grid.x * 1000 + grid.y;
  out[4] = groups.x * 10 + groups.y;
  out[5] = size.x * 100 + size.y;
  out[6] = asked.x * 100 + asked.y;
  out[7] = index;
  out[8] = lane;
  out[9] = simdgroup;
  out[10] = simdgroups;
  out[11] = 32;
}
