#include "core/append_kv.h"

#include <algorithm>

#include "core/compute.h"
#include "core/page_codec_kernel.h"

namespace chunkdelta {

void append_kv(const AppendOptions& options, const std::vector<int32_t>& slots, const void* x,
               void* slab) {
  constexpr int64_t TOKENS_PER_TASK = 64;
  const int64_t tokens = static_cast<int64_t>(slots.size()), heads = options.num_kv_heads;
  const int64_t in_bytes = options.head_dim * size_of(options.dtype);
  const int64_t row_bytes = page_row_bytes(options.format, options.head_dim);
  const int64_t first_slot = options.first_page * options.page_size;
  const int64_t slab_slots = options.num_pages * options.page_size;
  Compute compute;
  compute.parallel_for((tokens + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK, [&](int64_t task, int) {
    const int64_t end = std::min(tokens, (task + 1) * TOKENS_PER_TASK);
    for (int64_t t = task * TOKENS_PER_TASK; t < end; t++) {
      const int64_t slot = slots[t] - first_slot;
      if (slots[t] < 0 || slot < 0 || slot >= slab_slots) continue;
      const int64_t page = slot / options.page_size, offset = slot % options.page_size;
      for (int64_t h = 0; h < heads; h++) {
        const int64_t row = (page * heads + h) * options.page_size + offset;
        CHUNKDELTA_DISPATCH(encode_row, options.format, options.head_dim, options.dtype,
                            static_cast<const char*>(x) + (t * heads + h) * in_bytes,
                            static_cast<char*>(slab) + row * row_bytes);
      }
    }
  });
}

}  // namespace chunkdelta
