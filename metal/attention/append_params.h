// Arguments of the kernels that write pages, shared by src/core/plans/append_kv.cpp and the
// shaders.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace chunkdelta {

struct AppendKVParams {
  int32_t rows;  // tokens * num_kv_heads
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t page_size;
  int32_t first_page;   // of the slab
  int32_t num_pages;    // of the slab
  int32_t first_group;  // threadgroups of the launches before this one
};

// A page to copy, counted within its slab.
struct PageCopy {
  int32_t from;
  int32_t to;
};

struct CopyPagesParams {
  int32_t words;       // 16-byte words of a page
  int32_t first_copy;  // of this launch in copies
};

}  // namespace chunkdelta
