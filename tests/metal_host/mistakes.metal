// Kernels with one mistake each, and their correct twins: what the runner claims to find.
//
// KERNEL(name) instantiates name<true> as "name_wrong" and name<false> as "name_right"; the two
// differ in the mistake only. A comment "HERE" and the name marks the line that the report must
// give.
#include <metal_stdlib>
using namespace metal;

#define INSTANTIATE(name, wrong, suffix) \
  template[[host_name(#name suffix)]] [[kernel]] decltype(name<wrong>) name<wrong>;
#define KERNEL(name)                \
  INSTANTIATE(name, true, "_wrong") \
  INSTANTIATE(name, false, "_right")
#define THREAD                                                                             \
  uint i [[thread_position_in_grid]], uint t [[thread_position_in_threadgroup]],           \
      uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]], \
      uint group [[threadgroup_position_in_grid]]

constant int limit_value [[function_constant(0)]];
constant bool has_extra [[function_constant(1)]];

// ---- bounds
// ---------------------------------------------------------------------------------------

template <bool wrong>
[[kernel]] void buffer_overrun(device float* y [[buffer(0)]], THREAD) {
  y[i + (wrong ? 1 : 0)] = 1;  // HERE buffer_overrun
}
KERNEL(buffer_overrun)

template <bool wrong>
[[kernel]] void buffer_underrun(device float* y [[buffer(0)]], const device float* x [[buffer(1)]],
                                THREAD) {
  y[i] = x[int(i) - (wrong ? 1 : 0)];  // HERE buffer_underrun
}
KERNEL(buffer_underrun)

template <bool wrong>
[[kernel]] void vector_overrun(device float4* y [[buffer(0)]], THREAD) {
  if (i < 16) y[i + (wrong ? 1 : 0)] = float4(i);  // HERE vector_overrun
}
KERNEL(vector_overrun)

template <bool wrong>
[[kernel]] void threadgroup_overrun(device float* y [[buffer(0)]], THREAD) {
  threadgroup float a[64], b[64];
  a[t + (wrong ? 1 : 0)] = t;  // HERE threadgroup_overrun
  b[t] = t;
  y[i] = a[t] + b[t];
}
KERNEL(threadgroup_overrun)

struct Four {
  float value[4];
};
kernel void needs_four(constant Four& p [[buffer(1)]], device float* y [[buffer(0)]], THREAD) {
  y[i] = p.value[3];
}

// ---- races
// ----------------------------------------------------------------------------------------

template <bool wrong>
[[kernel]] void missing_barrier(device float* y [[buffer(0)]], THREAD) {
  threadgroup float a[64];
  a[t] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[63 - t];
  if (!wrong) threadgroup_barrier(mem_flags::mem_threadgroup);
  a[t] = 1;  // HERE missing_barrier
}
KERNEL(missing_barrier)

template <bool wrong>
[[kernel]] void device_needs_device_flag(device float* y [[buffer(0)]],
                                         device float* z [[buffer(1)]], THREAD) {
  y[i] = i;
  threadgroup_barrier(wrong ? mem_flags::mem_threadgroup : mem_flags::mem_device);
  z[i] = y[63 - i];  // HERE device_needs_device_flag
}
KERNEL(device_needs_device_flag)

template <bool wrong>
[[kernel]] void threadgroup_needs_threadgroup_flag(device float* y [[buffer(0)]], THREAD) {
  threadgroup float a[64];
  a[t] = t;
  threadgroup_barrier(wrong ? mem_flags::mem_device : mem_flags::mem_threadgroup);
  y[i] = a[63 - t];  // HERE threadgroup_needs_threadgroup_flag
}
KERNEL(threadgroup_needs_threadgroup_flag)

template <bool wrong>
[[kernel]] void barrier_without_flags(device float* y [[buffer(0)]], THREAD) {
  threadgroup float a[64];
  a[t] = t;
  threadgroup_barrier(wrong ? mem_flags::mem_none : mem_flags::mem_threadgroup);
  y[i] = a[t ^ 1];  // HERE barrier_without_flags
}
KERNEL(barrier_without_flags)

template <bool wrong>
[[kernel]] void simdgroup_barrier_is_local(device float* y [[buffer(0)]], THREAD) {
  threadgroup float a[64];
  a[t] = t;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[wrong ? 63 - t : t ^ 31];  // HERE simdgroup_barrier_is_local
}
KERNEL(simdgroup_barrier_is_local)

template <bool wrong>
[[kernel]] void simd_function_is_no_barrier(device float* y [[buffer(0)]], THREAD) {
  threadgroup float a[64];
  a[t] = t;
  const float total = simd_sum(1.0f);
  if (!wrong) simdgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[t ^ 31] + total;  // HERE simd_function_is_no_barrier
}
KERNEL(simd_function_is_no_barrier)

template <bool wrong>
[[kernel]] void same_value_race(device float* y [[buffer(0)]], THREAD) {
  if (!wrong && lane != 0) return;
  y[sg] = 0;  // HERE same_value_race
}
KERNEL(same_value_race)

template <bool wrong>
[[kernel]] void between_threadgroups(device float* y [[buffer(0)]], THREAD) {
  if (t == 0) y[wrong ? 0 : group] = i;  // HERE between_threadgroups
}
KERNEL(between_threadgroups)

// The reads of the first threadgroup and of the writer itself come last before the write.
template <bool wrong>
[[kernel]] void read_by_an_earlier_threadgroup(device float* y [[buffer(0)]], THREAD) {
  if (t != 0) return;
  const float x = y[wrong ? 2 : group];
  y[8 + group] = x;
  if (group == 1) y[wrong ? 2 : group] = x + 1;  // HERE read_by_an_earlier_threadgroup
}
KERNEL(read_by_an_earlier_threadgroup)

template <bool wrong>
[[kernel]] void atomic_and_plain(device atomic_uint* n [[buffer(0)]], device uint* y [[buffer(1)]],
                                 THREAD) {
  atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);
  if (wrong) {
    y[i] = *(const device uint*)n;  // HERE atomic_and_plain
  } else {
    y[i] = atomic_load_explicit(n, memory_order_relaxed);
  }
}
KERNEL(atomic_and_plain)

template <bool wrong>
[[kernel]] void float_atomics(device atomic_float* sum [[buffer(0)]],
                              const device float* x [[buffer(1)]], THREAD) {
  if (wrong) {
    *(device float*)sum += x[i];  // HERE float_atomics
  } else {
    atomic_fetch_add_explicit(sum, x[i], memory_order_relaxed);
  }
}
KERNEL(float_atomics)

// ---- undefined content
// ----------------------------------------------------------------------------

template <bool wrong>
[[kernel]] void uninitialised_threadgroup(device float* y [[buffer(0)]], THREAD) {
  threadgroup float a[65];
  a[t] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[t + (wrong ? 1 : 0)];  // HERE uninitialised_threadgroup
}
KERNEL(uninitialised_threadgroup)

template <bool wrong>
[[kernel]] void uninitialised_output(device float* y [[buffer(0)]], THREAD) {
  y[i] = (wrong ? y[i] : 0) + 1;  // HERE uninitialised_output
}
KERNEL(uninitialised_output)

template <bool wrong>
[[kernel]] void unwritten_output(device float* y [[buffer(0)]], THREAD) {
  if (!wrong || i != 60) y[i] = 1;
}
KERNEL(unwritten_output)

template <bool wrong>
[[kernel]] void read_only_write(device float* y [[buffer(0)]], device float* x [[buffer(1)]],
                                THREAD) {
  y[i] = x[i];
  if (wrong) x[i] = 0;  // HERE read_only_write
}
KERNEL(read_only_write)

// ---- divergence
// -----------------------------------------------------------------------------------

template <bool wrong>
[[kernel]] void barrier_in_branch(device float* y [[buffer(0)]], THREAD) {
  if (!wrong || t < 32) threadgroup_barrier(mem_flags::mem_none);  // HERE barrier_in_branch
  y[i] = i;
}
KERNEL(barrier_in_branch)

template <bool wrong>
[[kernel]] void return_before_barrier(device float* y [[buffer(0)]], THREAD) {
  y[i] = i;
  if (wrong && t == 5) return;
  threadgroup_barrier(mem_flags::mem_none);  // HERE return_before_barrier
}
KERNEL(return_before_barrier)

template <bool wrong>
[[kernel]] void two_barriers(device float* y [[buffer(0)]], THREAD) {
  if (wrong ? t < 32 : group == 0) {
    threadgroup_barrier(mem_flags::mem_none);  // HERE two_barriers
  } else {
    threadgroup_barrier(mem_flags::mem_none);
  }
  y[i] = i;
}
KERNEL(two_barriers)

template <bool wrong>
[[kernel]] void simd_sum_in_branch(device float* y [[buffer(0)]], THREAD) {
  float s = 0;
  if (!wrong || lane < 8) s = simd_sum(1.0f);  // HERE simd_sum_in_branch
  y[i] = s;
}
KERNEL(simd_sum_in_branch)

template <bool wrong>
[[kernel]] void two_simd_functions(device float* y [[buffer(0)]], THREAD) {
  float s;
  if (wrong ? (lane & 1) != 0 : sg == 0) {
    s = simd_sum(1.0f);  // HERE two_simd_functions
  } else {
    s = simd_max(2.0f);
  }
  y[i] = s;
}
KERNEL(two_simd_functions)

template <bool wrong>
[[kernel]] void uneven_shuffle_mask(device float* y [[buffer(0)]], THREAD) {
  y[i] = simd_shuffle_xor(float(i), ushort(wrong && lane < 4 ? 1 : 2));  // HERE uneven_shuffle_mask
}
KERNEL(uneven_shuffle_mask)

template <bool wrong>
[[kernel]] void simdgroup_barrier_in_branch(device float* y [[buffer(0)]], THREAD) {
  if (!wrong || lane < 8)
    simdgroup_barrier(mem_flags::mem_none);  // HERE simdgroup_barrier_in_branch
  y[i] = i;
}
KERNEL(simdgroup_barrier_in_branch)

// Launched with 48 threads: the second simdgroup is half empty.
template <bool wrong>
[[kernel]] void partial_simdgroup_matrix(device float* y [[buffer(0)]], THREAD) {
  y[i] = i;
  if (!wrong && sg == 1) return;
  const auto one = make_filled_simdgroup_matrix<float, 8>(1.0f);
  simdgroup_float8x8 product;
  simdgroup_multiply(product, one, one);  // HERE partial_simdgroup_matrix
  y[i] = product.thread_elements()[0];
}
KERNEL(partial_simdgroup_matrix)

template <bool wrong>
[[kernel]] void inactive_lane(device float* y [[buffer(0)]], THREAD) {
  float s = 0;
  if (lane < 8) s = simd_shuffle(1.0f, ushort(wrong ? 9 : 7));  // HERE inactive_lane
  y[i] = s;
}
KERNEL(inactive_lane)

// ---- private memory, undefined behaviour
// ----------------------------------------------------------

template <bool wrong>
[[kernel]] void leaked_private_pointer(device float* y [[buffer(0)]], THREAD) {
  threadgroup ulong address[64];
  float z = i;
  address[t] = (ulong)&z;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = *(thread float*)address[wrong ? 63 - t : t];  // HERE leaked_private_pointer
}
KERNEL(leaked_private_pointer)

template <bool wrong>
[[kernel]] void private_array_index(device float* y [[buffer(0)]], THREAD) {
  float a[4] = {0, 1, 2, 3};
  y[i] = a[i & (wrong ? 7 : 3)];  // HERE private_array_index
}
KERNEL(private_array_index)

template <bool wrong>
[[kernel]] void vector_component_index(device float* y [[buffer(0)]], THREAD) {
  float4 a = float4(i);
  y[i] = a[i & (wrong ? 7 : 3)];  // HERE vector_component_index
}
KERNEL(vector_component_index)

template <bool wrong>
[[kernel]] void misaligned_vector(device float* y [[buffer(0)]],
                                  const device float* x [[buffer(1)]], THREAD) {
  y[i] = ((const device float4*)(x + (wrong ? 1 : 0)))[i / 8].x;  // HERE misaligned_vector
}
KERNEL(misaligned_vector)

template <bool wrong>
[[kernel]] void shift_too_far(device int* y [[buffer(0)]], const device int* x [[buffer(1)]],
                              THREAD) {
  y[i] = 1 << (x[i] + (wrong ? 32 : 0));  // HERE shift_too_far
}
KERNEL(shift_too_far)

template <bool wrong>
[[kernel]] void division_by_zero(device int* y [[buffer(0)]], const device int* x [[buffer(1)]],
                                 THREAD) {
  y[i] = int(i) / (x[i] + (wrong ? 0 : 1));  // HERE division_by_zero
}
KERNEL(division_by_zero)

template <bool wrong>
[[kernel]] void signed_overflow(device int* y [[buffer(0)]], const device int* x [[buffer(1)]],
                                THREAD) {
  y[i] = (x[i] + 2147483647) + (wrong ? int(i) : 0);  // HERE signed_overflow
}
KERNEL(signed_overflow)

template <bool wrong>
[[kernel]] void float_beyond_int(device int* y [[buffer(0)]], const device int* x [[buffer(1)]],
                                 THREAD) {
  y[i] = int((x[i] + 1) * (wrong ? 1e10f : 1e3f));  // HERE float_beyond_int
}
KERNEL(float_beyond_int)

inline int deep(int n) {
  volatile int a[64];
  a[n & 63] = n;
  return n ? deep(n - 1) + a[n & 63] : 0;
}
template <bool wrong>
[[kernel]] void stack_overflow(device int* y [[buffer(0)]], THREAD) {
  y[i] = deep(wrong ? 1000000 : 3);
}
KERNEL(stack_overflow)

// ---- limits, bindings, constants, hangs
// -----------------------------------------------------------

template <bool wrong>
[[kernel]] void threadgroup_memory_limit(device float* y [[buffer(0)]], THREAD) {
  threadgroup float a[wrong ? 8193 : 8192];
  a[t] = i;
  y[i] = a[t];
}
KERNEL(threadgroup_memory_limit)

template <bool wrong>
[[ kernel, max_total_threads_per_threadgroup(wrong ? 32 : 64) ]] void declared_threads(
    device float* y [[buffer(0)]], THREAD) {
  y[i] = i;
}
KERNEL(declared_threads)

kernel void fills(device float* y [[buffer(0)]], THREAD) {
  y[i] = i;
}

kernel void optional_argument(device float* y [[buffer(0)]],
                              const device float* extra [[buffer(1), function_constant(has_extra)]],
                              THREAD) {
  y[i] = has_extra ? extra[i] : 0;
}

kernel void threadgroup_argument(device float* y [[buffer(0)]],
                                 threadgroup float* a [[threadgroup(0)]], THREAD) {
  a[t] = t;
  y[i] = a[t];
}

kernel void reads_constant(device float* y [[buffer(0)]], THREAD) {
  y[i] = limit_value;  // HERE reads_constant
}

template <bool wrong>
[[kernel]] void endless_loop(device int* y [[buffer(0)]], const device int* x [[buffer(1)]],
                             THREAD) {
  int n = i;
  while (wrong ? n >= 0 : n > 0) n = (n + x[i]) / 2;  // HERE endless_loop
  y[i] = n;
}
KERNEL(endless_loop)

template <bool wrong>
[[kernel]] void endless_barriers(device int* y [[buffer(0)]], const device int* x [[buffer(1)]],
                                 THREAD) {
  for (int n = 1; n > 0; n = wrong ? 1 : n - 1) {
    threadgroup_barrier(mem_flags::mem_none);  // HERE endless_barriers
  }
  y[i] = x[i];
}
KERNEL(endless_barriers)
