// What surrounds a launch: signal handlers, the CPU-time watchdog, the denormal mode.
#pragma once

#include <signal.h>
#include <time.h>

#include <cstdint>

namespace metal_host {

// Turns faults in a kernel into reports, and ends a launch that takes too long.
class Signals {
 public:
  explicit Signals(double cpu_seconds);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

 private:
  static constexpr int kFaults = 5;
  static constexpr int kSignals[kFaults + 1] = {SIGSEGV, SIGBUS,  SIGFPE,
                                                SIGILL,  SIGTRAP, SIGVTALRM};
  struct sigaction old_[kFaults + 1];
  stack_t old_stack_;
  timer_t timer_;
};

// Denormals as the hardware may treat them, flushed to zero.
class DenormalMode {
 public:
  explicit DenormalMode(bool flush);
  ~DenormalMode();
  DenormalMode(const DenormalMode&) = delete;
  DenormalMode& operator=(const DenormalMode&) = delete;

 private:
  uint64_t old_;
};

}  // namespace metal_host
