// What a compiled kernel and the runtime know of each other.
//
// A .metal source becomes a shared object whose entry points are described by `mh_entry` tables;
// the metal_stdlib in ../include turns barriers, simdgroup functions and buffer arguments into the
// calls declared here. Plain C types only: the kernel side is compiled without any system header.
#pragma once

typedef unsigned char mh_u8;
typedef unsigned int mh_u32;
typedef unsigned long mh_u64;

#pragma GCC visibility push(default)
extern "C" {

// How one parameter of a kernel gets its value. The numbers from MH_THREAD_POSITION_IN_GRID on are
// the built-in attributes; rewrite.py holds the same table by name.
enum mh_bind_kind {
  MH_BUFFER = 0,
  MH_THREADGROUP_BUFFER = 1,
  MH_THREAD_POSITION_IN_GRID = 2,
  MH_THREAD_POSITION_IN_THREADGROUP,
  MH_THREADGROUP_POSITION_IN_GRID,
  MH_THREADS_PER_GRID,
  MH_THREADGROUPS_PER_GRID,
  MH_THREADS_PER_THREADGROUP,
  MH_DISPATCH_THREADS_PER_THREADGROUP,
  MH_THREAD_INDEX_IN_THREADGROUP,
  MH_THREAD_INDEX_IN_SIMDGROUP,
  MH_SIMDGROUP_INDEX_IN_THREADGROUP,
  MH_SIMDGROUPS_PER_THREADGROUP,
  MH_THREADS_PER_SIMDGROUP,
  MH_THREAD_INDEX_IN_QUADGROUP,
  MH_QUADGROUP_INDEX_IN_THREADGROUP,
  MH_QUADGROUPS_PER_THREADGROUP,
  MH_DISPATCH_SIMDGROUPS_PER_THREADGROUP,
  MH_DISPATCH_QUADGROUPS_PER_THREADGROUP,
  MH_GRID_ORIGIN,
  MH_NUM_BIND_KINDS
};

struct mh_bind {
  int kind;      // mh_bind_kind
  int index;     // of a buffer or threadgroup argument
  int required;  // 0 when its [[function_constant(...)]] is false
};

// The built-in attributes of one thread, by mh_bind_kind.
struct mh_context {
  mh_u32 builtin[MH_NUM_BIND_KINDS][3];
};

struct mh_entry {
  const char* name;
  void (*call)(const mh_entry*, const mh_context*);
  const mh_bind* binds;
  int num_binds;
  int max_threads;  // [[max_total_threads_per_threadgroup]], 0 without it
};

enum mh_op {
  MH_OP_BARRIER,
  MH_OP_REDUCE,
  MH_OP_SHUFFLE,
  MH_OP_BALLOT,
  MH_OP_MMA,
  MH_OP_MATRIX_LOAD,
  MH_OP_MATRIX_STORE,
  MH_OP_QUAD,
  MH_NUM_OPS
};

enum { MH_MEM_NONE = 0, MH_MEM_DEVICE = 1, MH_MEM_THREADGROUP = 2 };

enum { MH_SLOT_BYTES = 64 };  // the largest value that a lane gives to a collective

// What a simdgroup collective returns to each lane: who took part, and everybody's value.
struct mh_slots {
  mh_u32 mask;
  mh_u32 lane;
  const char (*slot)[MH_SLOT_BYTES];
};

// Where in the user's source a barrier or collective stands. Kernels name it explicitly (not by
// return address): optimisers duplicate calls, and a site must stay one site.
struct mh_site {
  const char* file;
  int line;
  int column;
};

#define MH_CONVERGENT __attribute__((convergent))
MH_CONVERGENT void mh_rt_threadgroup_barrier(int flags, mh_site site);
MH_CONVERGENT void mh_rt_collective(mh_slots* out, int op, int detail, const void* value, int size,
                                    mh_site site);
mh_u32 mh_rt_lane();
void* mh_rt_threadgroup_variable(const char* name, int id, mh_u64 size, mh_u64 align);
void* mh_rt_buffer(int index, mh_u64 min_size, int is_threadgroup);
int mh_rt_constant(int index, void* value, int size);  // 1 if it was given, else zeroed and 0
// A function constant without a value: reading it is reported.
void mh_rt_unset_constant(const char* name, int index, const void* address, int size);
void mh_rt_fail(const char* message, mh_site site);
}
#pragma GCC visibility pop
