// Threads and workspace of the CPU kernels.
//
// MLX runs all CPU primitives of a stream on one thread and has no parallel-for. A kernel opens a
// Compute for its duration: ops of several streams take turns on the one pool, so that threads are
// never oversubscribed and one workspace serves all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace chunkdelta {

// Workers of the pool, the calling thread included: CHUNKDELTA_NUM_THREADS, or the CPUs that the
// process may use. Results do not depend on it.
int num_threads();
void set_num_threads(int n);  // between ops; n >= 1

// Bytes that the pool's workspaces hold now and held at most (memory plans count them).
size_t workspace_bytes();
size_t workspace_peak_bytes();
void reset_workspace_peak();
void release_workspace();  // frees all of it; the next op allocates anew

class Compute {
 public:
  Compute();
  ~Compute();
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  // Calls fn(task, worker) for every task in [0, tasks), worker in [0, num_threads()), and returns
  // when all are done. Tasks are handed out in order to whichever worker is free; what a task
  // computes must not depend on its worker. The first exception of a task is rethrown here.
  void parallel_for(int64_t tasks, const std::function<void(int64_t task, int worker)>& fn);

  // Scratch that lasts until the next call for the same owner or the end of this Compute: at least
  // `bytes`, aligned to 64, contents undefined. One shared block, and one per worker.
  void* shared_workspace(size_t bytes);
  void* worker_workspace(int worker, size_t bytes);
};

}  // namespace chunkdelta
