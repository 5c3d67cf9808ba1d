#include "report.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "launch.h"

namespace metal_host {

namespace {

constexpr size_t kMaxReports = 64;

void add(Kind kind, uint64_t pc, uint64_t other_pc, const char* text) {
  for (Report& r : reports()) {
    const bool same_place = r.pc == pc && r.other_pc == other_pc;
    if (r.kind == kind && same_place && (pc != 0 || strcmp(r.text, text) == 0)) {
      r.count++;
      return;
    }
  }
  if (reports().size() >= kMaxReports) return;
  Report r{};
  r.kind = kind;
  r.count = 1;
  r.pc = pc;
  r.other_pc = other_pc;
  r.thread = current ? static_cast<int>(current->thread) : -1;
  memcpy(r.threadgroup, state.threadgroup, sizeof r.threadgroup);
  snprintf(r.text, sizeof r.text, "%s", text);
  reports().push_back(r);
}

}  // namespace

std::vector<Report>& reports() {
  static std::vector<Report> all;
  return all;
}

void report(Kind kind, uint64_t pc, uint64_t other_pc, const char* format, ...) {
  char text[sizeof(Report::text)];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  add(kind, pc, other_pc, text);
}

void report_at(Kind kind, const mh_site& site, const char* format, ...) {
  char text[sizeof(Report::text)];
  int n = snprintf(text, sizeof text, "%s:%d: ", base_name(site.file), site.line);
  if (n < 0 || n >= static_cast<int>(sizeof text)) n = 0;
  va_list args;
  va_start(args, format);
  vsnprintf(text + n, sizeof text - n, format, args);
  va_end(args);
  add(kind, 0, 0, text);
}

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

void fail(const char* message) {
  fprintf(stderr, "metal_host: %s: %s\n", message, strerror(errno));
  abort();
}

char* map_memory(size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("cannot map memory");
  return static_cast<char*>(p);
}

}  // namespace metal_host
