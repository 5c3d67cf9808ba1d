#include "core/compute.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace chunkdelta {
namespace {

std::atomic<size_t> held_bytes{0};
std::atomic<size_t> peak_bytes{0};

// A block that grows and is kept between ops.
class Block {
 public:
  void* get(size_t bytes) {
    if (bytes > size_) {
      release();
      const size_t rounded = (bytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(4096, rounded);
      if (!data_) throw std::bad_alloc();
      size_ = rounded;
      const size_t held = held_bytes += size_;
      size_t peak = peak_bytes;
      while (held > peak && !peak_bytes.compare_exchange_weak(peak, held)) {
      }
    }
    return data_;
  }
  void release() {
    std::free(data_);
    held_bytes -= size_;
    data_ = nullptr;
    size_ = 0;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

int default_num_threads() {
  if (const char* wanted = std::getenv("CHUNKDELTA_NUM_THREADS"); wanted && *wanted) {
    char* end = nullptr;
    const long n = std::strtol(wanted, &end, 10);
    if (*end != '\0' || n < 1 || n > 1024) {
      throw std::invalid_argument(
          std::string("[threads] expected CHUNKDELTA_NUM_THREADS in 1..1024; got ") + wanted);
    }
    return static_cast<int>(n);
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// A fork-join pool. Workers sleep on a condition variable between regions. It is never destroyed:
// at exit its threads may be anywhere, and a forked child starts with an empty one.
struct Pool {
  std::mutex region;  // held by the open Compute
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable finished;
  uint64_t generation = 0;
  int running = 0;

  const std::function<void(int64_t, int)>* fn = nullptr;
  int64_t tasks = 0;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;

  int wanted = default_num_threads();
  std::vector<std::thread> threads;  // worker i + 1
  Block shared;
  std::vector<Block> workers;

  void work(int worker) {
    while (true) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      try {
        (*fn)(task, worker);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next = tasks;  // the remaining tasks would be thrown away with the result
      }
    }
  }

  void loop(int worker, uint64_t seen) {
    std::unique_lock lock(mutex);
    while (true) {
      wake.wait(lock, [&] { return generation != seen; });
      seen = generation;
      if (worker >= wanted) continue;  // set_num_threads lowered the count
      lock.unlock();
      work(worker);
      lock.lock();
      if (--running == 0) finished.notify_one();
    }
  }
};

Pool* pool_instance = nullptr;

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool_instance = new Pool;
    pthread_atfork(nullptr, nullptr, [] {
      held_bytes = 0;
      peak_bytes = 0;
      pool_instance = new Pool;  // the parent's threads do not exist here; leak what they held
    });
  });
  return *pool_instance;
}

}  // namespace

int num_threads() {
  return pool().wanted;
}

void set_num_threads(int n) {
  if (n < 1) {
    throw std::invalid_argument("[set_num_threads] expected n >= 1; got " + std::to_string(n));
  }
  Pool& p = pool();
  std::lock_guard region(p.region);
  std::lock_guard lock(p.mutex);
  p.wanted = n;
}

size_t workspace_bytes() {
  return held_bytes;
}
size_t workspace_peak_bytes() {
  return peak_bytes;
}
void reset_workspace_peak() {
  peak_bytes = held_bytes.load();
}

void release_workspace() {
  Pool& p = pool();
  std::lock_guard region(p.region);
  p.shared.release();
  for (Block& block : p.workers) block.release();
}

Compute::Compute() {
  Pool& p = pool();
  p.region.lock();
  if (p.workers.size() < static_cast<size_t>(p.wanted)) p.workers.resize(p.wanted);
}

Compute::~Compute() {
  pool().region.unlock();
}

void Compute::parallel_for(int64_t tasks, const std::function<void(int64_t, int)>& fn) {
  Pool& p = pool();
  const int helpers = static_cast<int>(std::min<int64_t>(p.wanted, tasks)) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks; task++) fn(task, 0);
    return;
  }
  {
    std::lock_guard lock(p.mutex);
    while (p.threads.size() < static_cast<size_t>(p.wanted - 1)) {
      const int worker = static_cast<int>(p.threads.size()) + 1;
      p.threads.emplace_back([&p, worker, seen = p.generation] { p.loop(worker, seen); });
    }
    p.fn = &fn;
    p.tasks = tasks;
    p.next = 0;
    p.error = nullptr;
    p.running = p.wanted - 1;
    p.generation++;
  }
  p.wake.notify_all();
  p.work(0);
  std::unique_lock lock(p.mutex);
  p.finished.wait(lock, [&] { return p.running == 0; });
  p.fn = nullptr;
  if (p.error) std::rethrow_exception(p.error);
}

void* Compute::shared_workspace(size_t bytes) {
  return pool().shared.get(bytes);
}

void* Compute::worker_workspace(int worker, size_t bytes) {
  return pool().workers[worker].get(bytes);
}

}  // namespace chunkdelta
