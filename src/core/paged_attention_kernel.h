// The inner loops of paged attention: packing a segment's keys and values, a row tile over a packed
// segment, and few rows over pages directly.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/isa.h"
#include "core/page_format.h"

namespace chunkdelta {

// Rows are (position, q head) pairs of a KV head. GFLOP/s of both products over panels of a
// 4,096-key segment, D = 256, one core of Zen 4 at AVX-512, by rows and keys of a tile (noise 3 %;
// a tile's scores, queries and outputs must stay in L2, and short tiles waste less at the
// diagonal):
//   64 x 128 111 | 64 x 256 112 | 64 x 512 114 | 128 x 128 112 | 128 x 256 108 | 128 x 512 109
constexpr int kTileRows = 64;
constexpr int kTileKeys = 256;
// Up to this many rows a unit reads its pages directly: one tile uses a decoded key only once, so
// packed segments have nobody to share them with. CPU ms for 16,384 bf16 keys, D = 256, 4 KV heads,
// packed / direct: 32 rows 45.7 / 37.3, 64 rows 66.7 / 64.0.
constexpr int kSplitRows = kTileRows;

constexpr int padded_head_dim(int head_dim) {
  return (head_dim + 15) / 16 * 16;
}

// Keys of one KV head. With P the columns of a GEMM register block, `packed` are
//   keys    [key / P][head_dim][P]               so that Q K^T reads rows of P keys
//   values  [column / P][capacity][P or less]    so that P V reads rows of P columns
struct SegmentKeys {
  PageFormat k_format, v_format;
  int head_dim;
  int64_t begin;  // in the sequence, a multiple of 16
  int count;
  const void* const* k_blocks;  // rows of the keys [16 i, 16 i + 16) of the segment
  const void* const* v_blocks;
  float *packed_keys, *packed_values;
  int capacity;  // a multiple of every P
};

// Query rows position * group + head of one KV head, and their running softmax.
struct RowTile {
  Dtype dtype;
  int num_q_heads, group, head_dim;
  const void* q;  // of the sequence's position 0, first q head of the KV head
  int64_t row_begin;
  int rows;       // at most kTileRows
  int64_t shift;  // keys minus queries: position p sees keys <= p + shift
  bool causal;
  int64_t window;    // 0: none
  float q_scale;     // log2(e) * scale, or scale / softcap
  float softcap;     // log2(e) * softcap, or 0
  float *m, *l, *o;  // maximum (log2 units), sum, output [rows][padded_head_dim]
  float* scratch;    // kTileScratchFloats
};

// Leading dimension of queries and scores: an odd number of cache lines, because rows 1 KiB apart
// fall into the same cache set.
constexpr int kTileLd = 256 + 16;
static_assert(kTileKeys == 256);
// Queries, scores, and what attend_pages decodes: a panel of at most 32 keys, 16 rows of values.
constexpr int kTileScratchFloats = 2 * kTileRows * kTileLd + (32 + 16) * 256;

CHUNKDELTA_DECLARE_KERNEL(
    // Keys [begin, end) of the segment, begin a multiple of 64.
    void pack_segment(const SegmentKeys& keys, int begin, int end);
    void attend_packed(const RowTile& tile, const SegmentKeys& keys);
    // The same straight from the pages, decoding a panel at a time.
    void attend_pages(const RowTile& tile, const SegmentKeys& keys);
    // The (m, l, O) of `splits` disjoint key sets, one after the other in memory, into the first.
    void merge_splits(const RowTile& tile, int64_t splits);
    // o / l in the output's dtype and the natural-log LSE (lse may be null); out and lse as q is.
    void finish_tile(const RowTile& tile, void* out, float* lse))

}  // namespace chunkdelta
