// The scheduler: threadgroups in a chosen order, their threads as fibers, barriers and simdgroup
// collectives that wait for everybody and report those who do not come.
#include "launch.h"

#include <dlfcn.h>
#include <link.h>
#include <setjmp.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "fiber.h"
#include "memory.h"
#include "signals.h"

namespace metal_host {

State state;
Fiber* current;
char *current_stack_begin, *current_stack_end;

namespace {

sigjmp_buf launch_end;

struct Random {
  uint64_t s;
  uint32_t below(uint32_t n) {
    s = s * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>((s >> 33) % n);
  }
};

// The order in which `n` things run: forward, reverse, or shuffled.
void fill_order(std::vector<uint32_t>& out, uint32_t n, uint32_t order, Random& random) {
  out.resize(n);
  for (uint32_t i = 0; i < n; i++) out[i] = order == 1 ? n - 1 - i : i;
  if (order <= 1) return;
  for (uint32_t i = n; i > 1; i--) std::swap(out[i - 1], out[random.below(i)]);
}

void yield() {
  state.counters.switches++;
  mh_switch_context(&current->context, state.scheduler_context);
}

void record_barrier(const mh_site& site, bool is_simdgroup, int flags) {
  for (BarrierSite& b : state.barrier_sites) {
    if (same_site(b.site, site) && b.is_simdgroup == is_simdgroup) {
      b.hits++;
      return;
    }
  }
  state.barrier_sites.push_back({site, is_simdgroup, flags, 1});
}

// Applies the launch's mutation to a barrier; false if it is skipped.
bool mutate(const mh_site& site, int& flags) {
  const Mutation& m = state.mutation;
  const bool hit = m.site.file && m.site.line == site.line && m.site.column == site.column &&
                   strcmp(m.site.file, site.file) == 0;
  if (!hit) return true;
  flags &= ~m.dropped_flags;
  return !m.skip;
}

// ---- collectives --------------------------------------------------------------------------------

bool is_matrix_op(int op) {
  return op == MH_OP_MMA || op == MH_OP_MATRIX_LOAD || op == MH_OP_MATRIX_STORE;
}

bool agree(const Fiber& a, const Fiber& b) {
  return same_site(a.site, b.site) && a.op == b.op && a.detail == b.detail;
}

// Lets the lanes of `mask`, which wait at the same collective, go on.
void complete(uint32_t simdgroup, uint32_t mask) {
  Simdgroup& s = state.simdgroups[simdgroup];
  auto* values = s.values[s.gathering];
  const uint32_t still_waiting = s.arrived & ~mask;
  s.gathering ^= 1;
  for (uint32_t m = still_waiting; m; m &= m - 1) {
    const int lane = __builtin_ctz(m);
    memcpy(s.values[s.gathering][lane], values[lane], MH_SLOT_BYTES);
  }
  s.arrived = still_waiting;
  const Fiber& first = state.fibers[simdgroup * 32 + __builtin_ctz(mask)];
  state.counters.ops[first.op]++;
  const bool is_barrier = first.op == MH_OP_BARRIER;
  if (is_barrier) record_barrier(first.site, true, first.detail);
  for (int m : {kDevice, kThreadgroup}) {
    const int flag = m == kDevice ? MH_MEM_DEVICE : MH_MEM_THREADGROUP;
    if (state.options.lockstep || (is_barrier && (first.detail & flag))) s.barrier_count[m]++;
  }
  for (uint32_t m = mask; m; m &= m - 1) {
    Fiber& f = state.fibers[simdgroup * 32 + __builtin_ctz(m)];
    f.status = Status::kRunnable;
    f.mask = mask;
    f.slots = values;
  }
}

void report_divergence(uint32_t simdgroup, const Fiber& at, uint32_t here, uint32_t all) {
  const Fiber& other = state.fibers[simdgroup * 32 + __builtin_ctz(all & ~here)];
  char what[160];
  if (other.status == Status::kDone) {
    snprintf(what, sizeof what, "has finished");
  } else {
    snprintf(
        what, sizeof what, "is at %s %s:%d",
        other.status == Status::kAtBarrier ? "the threadgroup_barrier" : "the simdgroup function",
        base_name(other.site.file), other.site.line);
  }
  current = const_cast<Fiber*>(&at);
  report_at(kSimdDivergence, at.site,
            "simdgroup function reached by lanes %08x of %08x only; thread %u %s", here, all,
            other.thread, what);
  current = nullptr;
}

// Some lanes wait at a collective and nobody else can run: complete the earliest one.
void resolve_collective(uint32_t simdgroup) {
  const Simdgroup& s = state.simdgroups[simdgroup];
  const Fiber* at = &state.fibers[simdgroup * 32 + __builtin_ctz(s.arrived)];
  for (uint32_t m = s.arrived; m; m &= m - 1) {
    const Fiber& f = state.fibers[simdgroup * 32 + __builtin_ctz(m)];
    if (f.site.line < at->site.line) at = &f;
  }
  uint32_t here = 0;
  for (uint32_t m = s.arrived; m; m &= m - 1) {
    const Fiber& f = state.fibers[simdgroup * 32 + __builtin_ctz(m)];
    if (agree(f, *at)) here |= 1u << f.lane;
  }
  const uint32_t all = full_mask(simdgroup);
  const bool must_be_all =
      state.options.strict_simd || is_matrix_op(at->op) || at->op == MH_OP_BARRIER;
  if (here != all && must_be_all) report_divergence(simdgroup, *at, here, all);
  complete(simdgroup, here);
}

// ---- threadgroup barriers -----------------------------------------------------------------------

void resolve_barrier() {
  Fiber* at = nullptr;
  const Fiber* other = nullptr;
  size_t finished = 0, elsewhere = 0;
  for (Fiber& f : state.fibers) {
    if (f.status == Status::kAtBarrier && !at) at = &f;
    if (f.status != Status::kDone) continue;
    finished++;
    other = &f;
  }
  for (const Fiber& f : state.fibers) {
    if (f.status != Status::kAtBarrier || same_site(f.site, at->site)) continue;
    elsewhere++;
    other = &f;
  }
  if (other) {
    char place[160] = "has finished";
    if (other->status != Status::kDone) {
      snprintf(place, sizeof place, "is at %s:%d", base_name(other->site.file), other->site.line);
    }
    current = at;
    report_at(kBarrierDivergence, at->site,
              "threadgroup_barrier not reached by all threads: %zu have finished, %zu wait at "
              "another barrier; thread %u %s",
              finished, elsewhere, other->thread, place);
    current = nullptr;
  }
  state.counters.threadgroup_barriers++;
  record_barrier(at->site, false, at->detail);
  if (at->detail & MH_MEM_DEVICE) state.interval[kDevice]++;
  if (at->detail & MH_MEM_THREADGROUP) state.interval[kThreadgroup]++;
  for (Fiber& f : state.fibers) {
    if (f.status == Status::kAtBarrier) f.status = Status::kRunnable;
  }
}

// No fiber can run: complete a collective, or else release the barrier.
void resolve() {
  for (uint32_t i = 0; i < state.simdgroups.size(); i++) {
    if (state.simdgroups[i].arrived) return resolve_collective(i);
  }
  resolve_barrier();
}

// ---- threads ------------------------------------------------------------------------------------

void fiber_main() {
  state.entry->call(state.entry, &current->builtins);
  current->status = Status::kDone;
  yield();
  __builtin_trap();
}

struct Shape {
  uint32_t grid[3], threadgroup[3], groups[3];
};

void set_builtins(Fiber& f, const Shape& shape, const uint32_t* size, uint32_t threads) {
  const uint32_t t = f.thread;
  const uint32_t in_group[3] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
  auto& b = f.builtins.builtin;
  memset(&f.builtins, 0, sizeof f.builtins);
  for (int i = 0; i < 3; i++) {
    b[MH_THREAD_POSITION_IN_GRID][i] = state.threadgroup[i] * shape.threadgroup[i] + in_group[i];
    b[MH_THREAD_POSITION_IN_THREADGROUP][i] = in_group[i];
    b[MH_THREADGROUP_POSITION_IN_GRID][i] = state.threadgroup[i];
    b[MH_THREADS_PER_GRID][i] = shape.grid[i];
    b[MH_THREADGROUPS_PER_GRID][i] = shape.groups[i];
    b[MH_THREADS_PER_THREADGROUP][i] = size[i];
    b[MH_DISPATCH_THREADS_PER_THREADGROUP][i] = shape.threadgroup[i];
  }
  const uint32_t dispatched = shape.threadgroup[0] * shape.threadgroup[1] * shape.threadgroup[2];
  b[MH_THREAD_INDEX_IN_THREADGROUP][0] = t;
  b[MH_THREAD_INDEX_IN_SIMDGROUP][0] = f.lane;
  b[MH_SIMDGROUP_INDEX_IN_THREADGROUP][0] = f.simdgroup;
  b[MH_SIMDGROUPS_PER_THREADGROUP][0] = (threads + 31) / 32;
  b[MH_THREADS_PER_SIMDGROUP][0] = 32;
  b[MH_THREAD_INDEX_IN_QUADGROUP][0] = t % 4;
  b[MH_QUADGROUP_INDEX_IN_THREADGROUP][0] = t / 4;
  b[MH_QUADGROUPS_PER_THREADGROUP][0] = (threads + 3) / 4;
  b[MH_DISPATCH_SIMDGROUPS_PER_THREADGROUP][0] = (dispatched + 31) / 32;
  b[MH_DISPATCH_QUADGROUPS_PER_THREADGROUP][0] = (dispatched + 3) / 4;
}

void run_threadgroup(const Shape& shape, Random& random, std::vector<uint32_t>& order) {
  uint32_t size[3];  // smaller than asked at the grid's end
  for (int i = 0; i < 3; i++) {
    const uint32_t begin = state.threadgroup[i] * shape.threadgroup[i];
    size[i] = std::min(shape.threadgroup[i], shape.grid[i] - begin);
  }
  const uint32_t threads = size[0] * size[1] * size[2];
  state.fibers.resize(threads);
  state.simdgroups.resize((threads + 31) / 32);
  begin_threadgroup();
  for (int m : {kDevice, kThreadgroup}) state.first_interval[m] = ++state.interval[m];
  for (Simdgroup& s : state.simdgroups) {
    s.arrived = 0;
    s.gathering = 0;
    s.barrier_count[kDevice] = s.barrier_count[kThreadgroup] = 0;
  }
  for (uint32_t t = 0; t < threads; t++) {
    Fiber& f = state.fibers[t];
    f.status = Status::kRunnable;
    f.thread = t;
    f.lane = t % 32;
    f.simdgroup = t / 32;
    f.site = {nullptr, 0, 0};
    f.context = make_context(stack_of(t + 1), fiber_main);
    set_builtins(f, shape, size, threads);
  }
  fill_order(order, threads, state.options.order, random);
  for (bool alive = true; alive;) {
    alive = false;
    bool progress = false;
    for (uint32_t t : order) {
      Fiber& f = state.fibers[t];
      if (f.status == Status::kRunnable) {
        current = &f;
        current_stack_begin = stack_of(f.thread);
        current_stack_end = current_stack_begin + kStackBytes;
        mh_switch_context(&state.scheduler_context, f.context);
        current = nullptr;
        progress = true;
      }
      alive |= f.status != Status::kDone;
    }
    if (state.expired) check_watchdog();
    if (alive && !progress) resolve();
  }
}

void run_all(const Shape& shape) {
  Random random{state.options.order};
  std::vector<uint32_t> groups, threads;
  const uint32_t n = shape.groups[0] * shape.groups[1] * shape.groups[2];
  fill_order(groups, n, state.options.order, random);
  for (uint32_t g : groups) {
    state.threadgroup[0] = g % shape.groups[0];
    state.threadgroup[1] = g / shape.groups[0] % shape.groups[1];
    state.threadgroup[2] = g / shape.groups[0] / shape.groups[1];
    run_threadgroup(shape, random, threads);
  }
}

void find_module(const mh_entry* entry) {
  Dl_info info;
  state.module_begin = state.module_end = 0;
  if (!dladdr(reinterpret_cast<void*>(entry->call), &info)) return;
  state.module_begin = state.module_end = reinterpret_cast<uint64_t>(info.dli_fbase);
  dl_iterate_phdr(
      [](dl_phdr_info* module, size_t, void*) {
        if (module->dlpi_addr != state.module_begin) return 0;
        for (int i = 0; i < module->dlpi_phnum; i++) {
          const auto& header = module->dlpi_phdr[i];
          if (header.p_type != PT_LOAD) continue;
          const uint64_t end = module->dlpi_addr + header.p_vaddr + header.p_memsz;
          state.module_end = std::max(state.module_end, end);
        }
        return 1;
      },
      nullptr);
}

bool check_shape(const mh_entry* entry, const Shape& shape) {
  const uint64_t threads =
      uint64_t{shape.threadgroup[0]} * shape.threadgroup[1] * shape.threadgroup[2];
  bool good = true;
  for (int i = 0; i < 3; i++) {
    if (shape.grid[i] && shape.threadgroup[i]) continue;
    report(kLimit, 0, 0, "empty grid or threadgroup in dimension %d", i);
    return false;
  }
  const size_t limit = std::min<size_t>(state.options.max_threads, kMaxThreads);
  if (threads > limit) {
    report(kLimit, 0, 0, "%zu threads per threadgroup, the limit is %zu",
           static_cast<size_t>(threads), limit);
    good = false;
  } else if (entry->max_threads && threads > static_cast<uint64_t>(entry->max_threads)) {
    report(kLimit, 0, 0, "%zu threads per threadgroup, max_total_threads_per_threadgroup is %d",
           static_cast<size_t>(threads), entry->max_threads);
    good = false;
  }
  for (int i = 0; i < entry->num_binds; i++) {
    const mh_bind& b = entry->binds[i];
    if (b.kind != MH_BUFFER) continue;
    if (b.index > 30) {
      report(kLimit, 0, 0, "buffer(%d): the last index is 30", b.index);
      good = false;
    } else if (b.required && !binding_at(b.index)) {
      report(kBinding, 0, 0, "buffer(%d) is not bound", b.index);
      good = false;
    }
  }
  return good;
}

}  // namespace

void abort_launch() {
  siglongjmp(launch_end, 1);
}

void check_watchdog(uint64_t pc) {
  if (!state.expired) return;
  report(kHang, pc, 0, "still running after %g s of CPU time", state.options.cpu_seconds);
  abort_launch();
}

void check_watchdog(const mh_site& site) {
  if (!state.expired) return;
  report_at(kHang, site, "still running after %g s of CPU time", state.options.cpu_seconds);
  abort_launch();
}

void check_watchdog() {
  for (const Fiber& f : state.fibers) {
    if (f.status != Status::kDone && f.site.file) check_watchdog(f.site);
  }
  check_watchdog(uint64_t{0});
}

// Runs one kernel; false if it was not started.
bool launch(const mh_entry* entry, const uint32_t* grid, const uint32_t* threadgroup) {
  Shape shape;
  for (int i = 0; i < 3; i++) {
    shape.grid[i] = grid[i];
    shape.threadgroup[i] = threadgroup[i];
    shape.groups[i] = threadgroup[i] ? (grid[i] + threadgroup[i] - 1) / threadgroup[i] : 0;
  }
  current = nullptr;
  state.entry = entry;
  state.counters = {};
  state.barrier_sites.clear();
  state.expired = false;
  memset(state.threadgroup, 0, sizeof state.threadgroup);
  find_module(entry);
  if (!check_shape(entry, shape)) return false;
  begin_launch();
  const Signals signals(state.options.cpu_seconds);
  const DenormalMode denormals(state.options.flush_denormals);
  state.launching = true;
  if (!sigsetjmp(launch_end, 1)) run_all(shape);
  state.launching = false;
  current = nullptr;
  return true;
}

}  // namespace metal_host

using namespace metal_host;

extern "C" mh_u32 mh_rt_lane() {
  return current->lane;
}

extern "C" void mh_rt_threadgroup_barrier(int flags, mh_site site) {
  if (state.expired) check_watchdog(site);
  if (!mutate(site, flags)) return;
  current->status = Status::kAtBarrier;
  current->detail = flags;
  current->site = site;
  yield();
}

extern "C" void mh_rt_collective(mh_slots* out, int op, int detail, const void* value, int size,
                                 mh_site site) {
  Fiber& f = *current;
  if (state.expired) check_watchdog(site);
  if (op == MH_OP_BARRIER && !mutate(site, detail)) return;
  Simdgroup& s = state.simdgroups[f.simdgroup];
  const uint32_t full = full_mask(f.simdgroup);
  if (is_matrix_op(op) && full != ~0u) {
    report_at(kSimdDivergence, site, "simdgroup_matrix function in a simdgroup of %d threads",
              __builtin_popcount(full));
  }
  memcpy(s.values[s.gathering][f.lane], value, static_cast<size_t>(size));
  f.site = site;
  f.op = op;
  f.detail = detail;
  s.arrived |= 1u << f.lane;
  bool complete_now = s.arrived == full;
  for (uint32_t m = complete_now ? full : 0; m; m &= m - 1) {
    if (agree(state.fibers[f.simdgroup * 32 + __builtin_ctz(m)], f)) continue;
    complete_now = false;
    break;
  }
  if (complete_now) {
    complete(f.simdgroup, full);
  } else {
    f.status = Status::kAtCollective;
    yield();
  }
  out->mask = f.mask;
  out->lane = f.lane;
  out->slot = f.slots;
}
