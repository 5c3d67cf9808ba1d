// Copies whole pages of one slab into another, or within one: copy on write.
#include "attention/append_params.h"

#include <metal_stdlib>

using namespace metal;
using namespace chunkdelta;

// Threadgroup: (128, 1, 1). Grid: (threadgroups a page, copies of this launch, 1) threadgroups. No
// page that is written is read: the plan has made sure.
[[kernel, max_total_threads_per_threadgroup(128)]] void copy_pages(
    const device uint4* from [[buffer(0)]],       // [pages, words]
    const device PageCopy* copies [[buffer(1)]],  // those of all launches
    constant CopyPagesParams& params [[buffer(2)]],
    device uint4* to [[buffer(3)]],  // [pages, words]
    uint3 tg [[threadgroup_position_in_grid]],
    uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  const device PageCopy* copy = copies + params.first_copy + int(tg.y);
  const size_t words = size_t(params.words);
  const device uint4* source = from + size_t(copy->from) * words;
  device uint4* target = to + size_t(copy->to) * words;
  for (uint i = at.x; i < uint(params.words); i += size.x) target[i] = source[i];
}
