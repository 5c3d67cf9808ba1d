// How a plan of paged attention is built: pieces of work, packed into rounds, emitted as launches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/params.h"
#include "core/plans/attention_tiles.h"
#include "core/plans/paged_attention.h"

namespace chunkdelta::paged_attention_plan {

// Keys of one threadgroup of the gather kernel.
constexpr int64_t kGatherSpan = 64;
constexpr int32_t kDecodeRows = 8;

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// How a kernel gets at K and V: gathered into scratch first, or from the pages in place.
struct Reads {
  bool k_gathered = false;
  bool v_gathered = false;
  bool gathered() const { return k_gathered || v_gathered; }
};

// Launches that share one filling of the gathered scratch.
struct Round {
  std::vector<AttentionTile> tiles;
  std::vector<GatherSpan> spans;
  double milliseconds = 0;
  int64_t gathered_rows = 0;
  bool carries = false;
};

// A round's piece: keys of some row tiles of one sequence.
struct Piece {
  std::vector<AttentionTile> tiles;  // `gathered` still to be set
  KeyRange keys;
  double milliseconds = 0;
  bool carries = false;    // some tile starts or ends within the segment loop
  bool continues = false;  // earlier keys of these rows are in an earlier piece
};

class Planner {
 public:
  explicit Planner(const PagedAttentionCall& call);
  Plan plan();

 private:
  void check() const;
  void plan_flash(int32_t sequence);
  void plan_decode(int32_t sequence, int64_t target_splits);
  void add(Piece piece, const Reads& reads, std::vector<Round>& rounds, int32_t sequence);
  KeyRange visible(int32_t sequence, int64_t row, int64_t rows_per_tile) const;
  KeyRange visible_to_tiles(int32_t sequence, int64_t t0, int64_t t1, int64_t rows_per_tile) const;
  AttentionTile tile_at(int32_t sequence, int64_t row, int64_t state) const;
  int64_t segment_keys(const Reads& reads, double milliseconds_per_key, int64_t keys) const;
  void emit_gather(const Round& round, const Reads& reads);
  void emit_attention(const Round& round, bool decode);
  void emit_merge();
  std::vector<FunctionConstant> constants(bool carries, bool decode) const;
  int32_t device_format(PageFormat format, bool gathered) const;
  PagedAttentionParams params() const;
  std::string why() const;

  int64_t queries(int32_t n) const { return call_.cu_seqlens_q[n + 1] - call_.cu_seqlens_q[n]; }
  int64_t tokens() const { return call_.cu_seqlens_q.back(); }
  int32_t sequences() const { return int32_t(call_.seq_lens.size()); }
  int64_t max_pages() const {
    return sequences() ? int64_t(call_.block_table.size()) / sequences() : 0;
  }
  // Scratch bytes of one gathered key, all KV heads.
  int64_t gathered_key_bytes(const Reads& reads) const {
    return (int64_t(reads.k_gathered) + reads.v_gathered) * call_.num_kv_heads * call_.head_dim *
           size_of(call_.dtype);
  }

  const PagedAttentionCall& call_;
  const AttentionTileShape& shape_;
  const int64_t group_;
  int64_t num_pages_ = 0;
  Reads flash_reads_;
  Reads decode_reads_;

  Plan plan_;
  std::vector<Round> flash_;
  std::vector<Round> decode_;
  int64_t state_rows_ = 0;
  int64_t carrying_blocks_ = 0;
  int64_t partial_rows_ = 0;
  std::vector<MergeRow> merge_rows_;
  std::vector<AttentionTile> tiles_;
  std::vector<GatherSpan> spans_;
  int64_t gathered_rows_ = 0;  // of the fullest round
  int64_t longest_segment_ = 0;
};

}  // namespace chunkdelta::paged_attention_plan
