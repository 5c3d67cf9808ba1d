// Launch plans of the ops that write pages.
#pragma once

#include <cstdint>
#include <vector>

#include "core/append_kv.h"
#include "core/launch_plan.h"

namespace chunkdelta {

// Roles of the plan's buffers: x, pages (of the slab). Nothing outside the slab is written,
// whatever the slots. `aligned`: x begins at a multiple of 4 elements.
Plan plan_append_kv(const AppendOptions& options, const std::vector<int32_t>& slots, bool aligned);

struct CopyPagesCall {
  int64_t page_bytes = 0;           // a multiple of 16
  std::vector<int64_t> first_page;  // of each slab, and behind the last the pages of them all
  int32_t slab = 0;                 // that is written
  std::vector<int32_t> source;      // pages of any slab, none of which is a target
  std::vector<int32_t> target;      // those in other slabs are left to their plans
};

// Roles of the plan's buffers: pages.i, slab i; the one written and those that it reads.
Plan plan_copy_pages(const CopyPagesCall& call);

}  // namespace chunkdelta
