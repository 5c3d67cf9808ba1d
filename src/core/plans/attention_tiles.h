// Which row tile of metal/attention/flash.h a dtype and head dim take, and why.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace chunkdelta {

struct AttentionTileShape {
  Dtype dtype;
  int32_t head_dim;
  int32_t rows;        // query rows (position, q head) of a threadgroup
  int32_t keys;        // BK
  int32_t row_groups;  // WM
  int32_t per_group;   // WN: simdgroups that share a row group
  int32_t dim_parts;   // DS: parts of the head dimension in Q K^T
  bool shared_buffer;  // K and V tiles take turns in one buffer
  const char* reason;

  int32_t threads() const { return row_groups * per_group * 32; }
  // Row fragments of a simdgroup.
  int32_t row_fragments() const { return rows / (8 * row_groups); }
  // Estimated 32-bit registers of a lane: live tiles and 14 more
  // (docs/performance/attention_tiles.md).
  int32_t registers() const;
  int32_t threadgroup_bytes() const;
  std::string kernel() const;  // host_name of the instantiation
  std::string source() const;
};

const std::vector<AttentionTileShape>& attention_tile_table();

// Throws std::invalid_argument naming the supported head dims.
const AttentionTileShape& attention_tile(Dtype dtype, int32_t head_dim);

}  // namespace chunkdelta
