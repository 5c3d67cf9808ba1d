// The inner loops of paged attention: packing a segment's keys and values, and one row tile over
// it.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/isa.h"
#include "core/page_format.h"

namespace chunkdelta {

constexpr int kTileRows = 64;   // (position, q head) pairs of a row tile
constexpr int kTileKeys = 256;  // keys whose scores a row tile holds

// A segment of one KV head, decoded for the GEMMs. With P the columns of a GEMM register block:
//   keys    [key / P][head_dim][P]               so that Q K^T reads rows of P keys
//   values  [column / P][capacity][P or less]    so that P V reads rows of P columns
struct PackedSegment {
  float* keys;
  float* values;
  int capacity;  // keys, a multiple of every P
};

struct PackArguments {
  PageFormat k_format, v_format;
  int head_dim;
  int count;                    // keys of the segment
  const void* const* k_blocks;  // rows of the keys [16 i, 16 i + 16) of the segment
  const void* const* v_blocks;
  PackedSegment segment;
};

struct TileArguments {
  Dtype dtype;
  int num_q_heads, group, head_dim;
  const void* q;      // of the sequence's position 0, first q head of the KV head
  int64_t row_begin;  // rows are position * group + head
  int rows;           // at most kTileRows
  int64_t key_begin;  // of the segment, in the sequence
  int count;          // keys of the segment
  int64_t shift;      // keys minus queries: position p sees keys <= p + shift
  bool causal;
  int64_t window;  // 0: none
  float q_scale;   // log2(e) * scale, or scale / softcap
  float softcap;   // log2(e) * softcap, or 0
  PackedSegment segment;
  float *m, *l, *o;  // the tile's running maximum (log2 units), sum and output [rows][padded_dim]
  float* scratch;    // kTileScratchFloats
};

// Leading dimensions of the tile's queries and scores: an odd number of cache lines, because rows
// 1 KiB apart fall into the same cache set.
constexpr int kTileScratchFloats = kTileRows * (256 + 16) + kTileRows * (kTileKeys + 16);

constexpr int padded_head_dim(int head_dim) {
  return (head_dim + 15) / 16 * 16;
}

CHUNKDELTA_DECLARE_KERNEL(
    // Keys [begin, end) of the segment, begin a multiple of 64.
    void pack_segment(const PackArguments& arguments, int begin, int end);
    void attend_tile(const TileArguments& arguments);
    // o / l in the output's dtype and the natural-log LSE (lse may be null); out and lse as q is.
    void finish_tile(const TileArguments& arguments, void* out, float* lse))

}  // namespace chunkdelta
