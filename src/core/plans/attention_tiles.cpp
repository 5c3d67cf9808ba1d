#include "core/plans/attention_tiles.h"

#include <stdexcept>

namespace chunkdelta {
namespace {

constexpr Dtype f32 = Dtype::f32;
constexpr Dtype f16 = Dtype::f16;
constexpr Dtype bf16 = Dtype::bf16;

// 64 rows halve the device reads and threadgroup writes of 32, two row fragments per simdgroup feed
// two products from each K or V fragment loaded. What binds is registers: a lane has 208 / 2 of
// them when 512 threads are to fit a core, 104 at 512 threads and 128 at 384 or fewer.
const char* const kWhole =
    "64 rows, 8 simdgroups as 4 x 2 with keys split in Q K^T: Q whole in registers, no exchange of "
    "partial scores, K and V each their own buffer, two barriers per 32 keys";
const char* const kWholeShared =
    "64 rows, 4 x 2, keys split; K and V share one buffer, two would not fit 32 KiB";
const char* const kFloat128 =
    "64 rows, 4 x 2, head dimension split in two: Q whole in float would take 64 registers a lane; "
    "K and V share one buffer, two would not fit 32 KiB";
const char* const kHalf192 =
    "64 rows, 4 x 2, head dimension split in two: Q whole would take 48 registers a lane, 124 in "
    "all; "
    "16 keys at a time leave two buffers within 24 KiB";
const char* const kHalf256 =
    "64 rows, 16 simdgroups as 4 x 4, head dimension split in two: the layout that fits 104 "
    "registers "
    "at 512 threads; 4 x 2 with keys split reads 15 % less threadgroup memory but needs 154";
const char* const kFloatWide =
    "32 rows, 4 x 2, head dimension split in two: 64 rows of float Q and O would need over 128 "
    "registers a lane; 16 keys at a time keep K and V in one buffer of 17 KiB";

const std::vector<AttentionTileShape> kTable = {
    // dtype, D, rows, keys, row groups, per group, parts of D, shared buffer, reason
    {f16, 64, 64, 32, 4, 2, 1, false, kWhole},      {f16, 80, 64, 32, 4, 2, 1, false, kWhole},
    {f16, 96, 64, 32, 4, 2, 1, false, kWhole},      {f16, 128, 64, 32, 4, 2, 1, false, kWhole},
    {f16, 192, 64, 16, 4, 2, 2, false, kHalf192},   {f16, 256, 64, 32, 4, 4, 2, true, kHalf256},
    {bf16, 64, 64, 32, 4, 2, 1, false, kWhole},     {bf16, 80, 64, 32, 4, 2, 1, false, kWhole},
    {bf16, 96, 64, 32, 4, 2, 1, false, kWhole},     {bf16, 128, 64, 32, 4, 2, 1, false, kWhole},
    {bf16, 192, 64, 16, 4, 2, 2, false, kHalf192},  {bf16, 256, 64, 32, 4, 4, 2, true, kHalf256},
    {f32, 64, 64, 32, 4, 2, 1, false, kWhole},      {f32, 80, 64, 32, 4, 2, 1, false, kWhole},
    {f32, 96, 64, 32, 4, 2, 1, true, kWholeShared}, {f32, 128, 64, 32, 4, 2, 2, true, kFloat128},
    {f32, 192, 32, 16, 4, 2, 2, true, kFloatWide},  {f32, 256, 32, 16, 4, 2, 2, true, kFloatWide},
};

}  // namespace

int32_t AttentionTileShape::registers() const {
  const int32_t words = dtype == f32 ? 2 : 1;  // registers of a pair of elements
  const int32_t rf = row_fragments();
  const int32_t own = keys / per_group / 8;                 // key fragments kept,
  const int32_t multiplied = own * dim_parts;               // and multiplied
  const int32_t q = rf * head_dim / dim_parts / 8 * words;  // a fragment is a pair per lane
  const int32_t o = rf * head_dim / per_group / 8 * 2;
  const int32_t s = rf * multiplied * 2 + (dim_parts > 1 ? rf * own * 2 : 0);
  const int32_t p = rf * own * words;
  const int32_t loads = 8 * words;  // two runs of eight elements
  return q + o + s + p + loads + 14;
}

int32_t AttentionTileShape::threadgroup_bytes() const {
  const int32_t size = int32_t(size_of(dtype));
  const int32_t rf = row_fragments();
  const int32_t own = keys / per_group / 8;
  const int32_t pairs = row_groups * per_group * rf * own * 32;
  const bool overlay = shared_buffer && dim_parts > 1;
  const int32_t kv = (shared_buffer ? 1 : 2) * keys * (head_dim * size + 16);
  const int32_t p = overlay ? 8 : pairs * 2 * size;  // an unused array keeps one element, padded
  const int32_t x = dim_parts > 1 ? pairs * (dim_parts - 1) * 8 : 8;
  return kv + p + x + row_groups * per_group * rf * 8 * 4;
}

std::string AttentionTileShape::kernel() const {
  return "flash_" + std::string(dtype_name(dtype)) + "_d" + std::to_string(head_dim) + "_r" +
         std::to_string(rows) + "_bk" + std::to_string(keys) + "_" + std::to_string(row_groups) +
         "x" + std::to_string(per_group);
}

std::string AttentionTileShape::source() const {
  return "attention/flash_d" + std::to_string(head_dim);
}

const std::vector<AttentionTileShape>& attention_tile_table() {
  return kTable;
}

const AttentionTileShape& attention_tile(Dtype dtype, int32_t head_dim) {
  for (const AttentionTileShape& shape : kTable) {
    if (shape.dtype == dtype && shape.head_dim == head_dim) return shape;
  }
  throw std::invalid_argument(
      "[paged_attention] expected head_dim in {64, 80, 96, 128, 192, 256}; got " +
      std::to_string(head_dim));
}

}  // namespace chunkdelta
