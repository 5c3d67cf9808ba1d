// Runs every kernel that is linked in, without Python: how the runtime is tested on a machine that
// is only emulated. Buffer 0 is y, 64 floats of zero; buffer 1 is x, 0 to 63. Prints a line for
// each kernel: its name, the kinds of its reports, a colon, the bits of y.
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../runtime/abi.h"
#include "../runtime/report.h"

extern "C" {
extern const mh_entry mh_entries[];
extern const int mh_num_entries;
void mh_reset();
void mh_options(int, uint32_t, uint32_t, uint64_t, int, int, int, double);
int mh_create_buffer(uint64_t, const char*, int, int);
void* mh_buffer_data(int);
void mh_unbind_all();
void mh_bind(int, int, uint64_t, int);
int mh_launch(const mh_entry*, const uint32_t*, const uint32_t*);
size_t mh_num_reports();
const metal_host::Report* mh_reports();
}

int main() {
  constexpr uint32_t kThreads = 64, kGrid[3] = {kThreads, 1, 1};
  constexpr int kPoison = 0xFF, kChecked = 1, kDefined = 1, kRead = 1, kReadWrite = 3;
  constexpr double kCpuSeconds = 1;
  for (int k = 0; k < mh_num_entries; k++) {
    mh_options(kPoison, /*order=*/0, /*max_threads=*/1024, /*threadgroup_limit=*/32768,
               /*strict_simd=*/1, /*lockstep=*/0, /*flush_denormals=*/0, kCpuSeconds);
    mh_reset();
    mh_unbind_all();
    const int y = mh_create_buffer(kThreads * sizeof(float), "y", kChecked, kDefined);
    const int x = mh_create_buffer(kThreads * sizeof(float), "x", kChecked, kDefined);
    float values[kThreads];
    for (uint32_t i = 0; i < kThreads; i++) values[i] = static_cast<float>(i);
    memset(mh_buffer_data(y), 0, sizeof values);
    memcpy(mh_buffer_data(x), values, sizeof values);
    mh_bind(0, y, 0, kReadWrite);
    mh_bind(1, x, 0, kRead);
    mh_launch(&mh_entries[k], kGrid, kGrid);
    printf("%s", mh_entries[k].name);
    for (size_t i = 0; i < mh_num_reports(); i++) printf(" %d", mh_reports()[i].kind);
    printf(" :");
    uint32_t bits[kThreads];
    memcpy(bits, mh_buffer_data(y), sizeof bits);
    for (const uint32_t b : bits) printf(" %08" PRIx32, b);
    printf("\n");
  }
}
