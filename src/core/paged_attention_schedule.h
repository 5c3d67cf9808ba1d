// Which work of a call runs side by side, and in how much scratch; nothing here depends on threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/paged_attention.h"

namespace chunkdelta {

constexpr int64_t kSegmentKeys = 4096;

// The queries [position, position + positions) of a sequence that share a KV head, and the keys
// [key_begin, key_end) that at least one of them sees.
struct AttentionUnit {
  int sequence, kv_head;
  int64_t position, positions;
  int64_t key_begin, key_end;
  int64_t split_keys;  // 0: the segment loop; otherwise few rows, and keys split into tasks

  int64_t keys() const { return key_end > key_begin ? key_end - key_begin : 0; }
  // At least one, for the rows that see no key.
  int64_t splits() const { return keys() == 0 ? 1 : (keys() + split_keys - 1) / split_keys; }
  int64_t capacity() const;  // keys of a packed segment, rounded up to whole panels
};

// Floats of a unit in the shared workspace. Of the segment loop: packed keys and values, then o, m
// and l of its rows. With split keys: o, m and l of its rows for every split.
struct UnitFloats {
  int64_t keys, values, o, m, l;
  int64_t total() const { return keys + values + o + m + l; }
};
UnitFloats unit_floats(const PagedAttentionOptions& options, const AttentionUnit& unit);

std::vector<AttentionUnit> attention_units(const PagedAttentionOptions& options,
                                           const std::vector<int32_t>& seq_lens,
                                           const std::vector<int32_t>& cu_seqlens_q);

// Units [begin, result) form a wave: all of one kind, in `bytes` of shared workspace.
size_t wave_end(const PagedAttentionOptions& options, const std::vector<AttentionUnit>& units,
                size_t begin, int64_t* bytes);

// Which kernels a call runs, and why, in words.
std::pair<std::string, std::string> explain_paged_attention(
    const PagedAttentionOptions& options, const std::vector<int32_t>& seq_lens,
    const std::vector<int32_t>& cu_seqlens_q);

}  // namespace chunkdelta
