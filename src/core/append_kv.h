// Writing new keys or values into the pages of one slab.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/page_format.h"

namespace chunkdelta {

struct AppendOptions {
  Dtype dtype;  // of the new rows
  PageFormat format;
  int num_kv_heads, head_dim, page_size;
  int64_t first_page, num_pages;  // of the slab
};

// x [slots.size(), num_kv_heads, head_dim]; slots[t] = page * page_size + offset over all slabs, -1
// skips. Slots of other slabs are skipped, whatever they are: nothing outside `slab` is written.
void append_kv(const AppendOptions& options, const std::vector<int32_t>& slots, const void* x,
               void* slab);

}  // namespace chunkdelta
