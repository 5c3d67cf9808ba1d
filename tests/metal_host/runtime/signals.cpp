#include "signals.h"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "fiber.h"
#include "launch.h"
#include "memory.h"

#ifndef sigev_notify_thread_id  // glibc before 2.38 has the field without the name
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace metal_host {

namespace {

uint64_t program_counter(void* context) {
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return static_cast<uint64_t>(machine.gregs[REG_RIP]);
#else
  return machine.pc;
#endif
}

bool in_module(uint64_t pc) {
  return pc >= state.module_begin && pc < state.module_end;
}

void on_fault(int signal_number, siginfo_t* info, void* context) {
  if (!state.launching || !current) {
    signal(signal_number, SIG_DFL);
    return;
  }
  const uint64_t pc = program_counter(context);
  const uint64_t offset = in_module(pc) ? pc - state.module_begin : 0;
  char* address = static_cast<char*>(info->si_addr);
  const bool overflow =
      address >= current_stack_begin - 8192 && address < current_stack_begin + 8192;
  char where[160];
  if (signal_number == SIGFPE) {
    report(kUndefinedBehaviour, offset, 0, "integer division by zero");
  } else if (signal_number == SIGILL || signal_number == SIGTRAP) {
    report(kUndefinedBehaviour, offset, 0, "trap: undefined behaviour was reached");
  } else if (overflow) {
    report(kFault, offset, 0, "thread stack overflow (%zu KiB)", kStackBytes >> 10);
  } else {
    report(kOutOfBounds, offset, 0, "invalid access at %s", describe(address, where, sizeof where));
  }
  abort_launch();
}

void on_watchdog(int, siginfo_t*, void* context) {
  if (!state.launching) return;
  state.expired = true;
  const uint64_t pc = program_counter(context);
  // Anywhere else the runtime (or libm) is at work and must not be left midway; it looks at
  // `expired` itself, and the timer fires again.
  if (current && in_module(pc)) check_watchdog(pc - state.module_begin);
}

}  // namespace

Signals::Signals(double cpu_seconds) {
  alignas(16) static char handler_stack[64 << 10];
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &old_stack_);
  struct sigaction action{};
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  action.sa_sigaction = on_fault;
  for (int i = 0; i < kFaults; i++) sigaction(kSignals[i], &action, &old_[i]);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  action.sa_sigaction = on_watchdog;
  sigaction(kSignals[kFaults], &action, &old_[kFaults]);
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = kSignals[kFaults];
  event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
  if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_)) fail("cannot make a timer");
  itimerspec when{};
  when.it_value.tv_sec = static_cast<time_t>(cpu_seconds);
  when.it_value.tv_nsec =
      static_cast<long>((cpu_seconds - static_cast<double>(when.it_value.tv_sec)) * 1e9);
  when.it_interval.tv_nsec = 20'000'000;
  timer_settime(timer_, 0, &when, nullptr);
}

Signals::~Signals() {
  timer_delete(timer_);
  for (int i = 0; i <= kFaults; i++) sigaction(kSignals[i], &old_[i], nullptr);
  sigaltstack(&old_stack_, nullptr);
}

DenormalMode::DenormalMode(bool flush) {
#if defined(__x86_64__)
  old_ = _mm_getcsr();
  constexpr uint32_t kFlush = 0x8000, kInputsAreZero = 0x0040;
  if (flush) _mm_setcsr(static_cast<uint32_t>(old_) | kFlush | kInputsAreZero);
#else
  asm volatile("mrs %0, fpcr" : "=r"(old_));
  if (flush) asm volatile("msr fpcr, %0" ::"r"(old_ | (uint64_t{1} << 24)));
#endif
}

DenormalMode::~DenormalMode() {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<uint32_t>(old_));
#else
  asm volatile("msr fpcr, %0" ::"r"(old_));
#endif
}

}  // namespace metal_host
