#include "core/plans/paged_attention.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "core/plans/paged_attention_planner.h"

namespace chunkdelta {
namespace paged_attention_plan {
namespace {

// Segments are cut at multiples of this, so that every kernel's key tiles are whole in all of them.
constexpr int64_t kSegmentAlign = 64;
// Rows are planned in blocks for which a segment at least this long fits the time budget; shorter
// ones would spend their time on carrying (m, l, O).
constexpr int64_t kLeastSegment = 1024;
// Decode splits keys until this many threadgroups per core are busy, but not below kLeastSplit
// keys.
constexpr int64_t kDecodeThreadgroupsPerCore = 4;
constexpr int64_t kLeastSplit = 256;

[[noreturn]] void fail(const std::string& what) {
  throw std::invalid_argument("[paged_attention] expected " + what);
}

}  // namespace

Planner::Planner(const PagedAttentionCall& call)
    : call_(call),
      shape_(attention_tile(call.dtype, call.head_dim)),
      group_(call.num_kv_heads > 0 ? call.num_q_heads / call.num_kv_heads : 0) {
  for (int32_t pages : call.slab_pages) num_pages_ += pages;
  // Pages of one slab in the queries' own type are read in place. Decode reads other formats in
  // place too: it uses a page once per 8 rows, while flash would decode it for each of its row
  // tiles. Where the head dim is no multiple of 64 some of its loads are shorter than a codec's
  // runs of eight.
  const bool slabs = call.slab_pages.size() > 1;
  flash_reads_ = {slabs || !page_format_is(call.k_format, call.dtype),
                  slabs || !page_format_is(call.v_format, call.dtype)};
  if (slabs || call.head_dim % 64 != 0) decode_reads_ = flash_reads_;
}

void Planner::check() const {
  const auto limit = int64_t(std::numeric_limits<int32_t>::max());
  const auto pool_rows = num_pages_ * call_.num_kv_heads * call_.page_size;
  if (call_.num_kv_heads < 1 || call_.num_q_heads % call_.num_kv_heads != 0) {
    fail("num_q_heads a multiple of num_kv_heads; got " + std::to_string(call_.num_q_heads) +
         " and " + std::to_string(call_.num_kv_heads));
  }
  if (call_.page_size < 16 || call_.page_size % 16 != 0) {
    fail("page_size a multiple of 16; got " + std::to_string(call_.page_size));
  }
  if (call_.cu_seqlens_q.size() != call_.seq_lens.size() + 1 || call_.cu_seqlens_q[0] != 0) {
    fail("cu_seqlens_q [N+1] from 0 and seq_lens [N]; got lengths " +
         std::to_string(call_.cu_seqlens_q.size()) + " and " +
         std::to_string(call_.seq_lens.size()));
  }
  if (sequences() > 0 && call_.block_table.size() % call_.seq_lens.size() != 0) {
    fail("block_table [N, max_pages]; got " + std::to_string(call_.block_table.size()) +
         " entries for " + std::to_string(sequences()) + " sequences");
  }
  for (int32_t n = 0; n < sequences(); ++n) {
    if (queries(n) < 0) fail("cu_seqlens_q that does not decrease");
    if (call_.seq_lens[n] < 0 || call_.seq_lens[n] > max_pages() * call_.page_size) {
      fail("0 <= seq_lens <= max_pages * page_size; got " + std::to_string(call_.seq_lens[n]));
    }
    if (call_.seq_lens[n] > 0 && num_pages_ < 1) fail("a pool with pages; got none");
  }
  if (pool_rows > limit) {
    fail("pages * num_kv_heads * page_size < 2^31; got " + std::to_string(pool_rows));
  }
  if (tokens() * call_.num_q_heads > limit || int64_t(call_.block_table.size()) > limit) {
    fail("tokens * num_q_heads and the entries of block_table < 2^31; got " +
         std::to_string(tokens() * call_.num_q_heads) + " and " +
         std::to_string(call_.block_table.size()));
  }
  if (call_.window < 0 || call_.softcap < 0) {
    fail("window >= 0 and softcap >= 0; got " + std::to_string(call_.window) + " and " +
         std::to_string(call_.softcap));
  }
}

// Keys that some row of the tile at `row` sees; begin = end where there is none.
KeyRange Planner::visible(int32_t n, int64_t row, int64_t rows_per_tile) const {
  const int64_t kv = call_.seq_lens[n];
  const int64_t shift = kv - queries(n);
  const int64_t first = row / group_;
  const int64_t last = (std::min(row + rows_per_tile, queries(n) * group_) - 1) / group_;
  KeyRange range{0, kv};
  if (call_.causal) range.end = std::min(kv, last + shift + 1);
  if (call_.window > 0) range.begin = std::max<int64_t>(0, first + shift - call_.window + 1);
  return range.begin < range.end ? range : KeyRange{};
}

// Keys that some row of tiles [t0, t1) sees, from a multiple of kSegmentAlign on.
KeyRange Planner::visible_to_tiles(int32_t n, int64_t t0, int64_t t1, int64_t rows_per_tile) const {
  KeyRange all;
  for (int64_t t = t0; t < t1; ++t) {
    const KeyRange range = visible(n, t * rows_per_tile, rows_per_tile);
    if (range.size() == 0) continue;
    all.begin = all.size() ? std::min(all.begin, range.begin) : range.begin;
    all.end = std::max(all.end, range.end);
  }
  all.begin = all.begin / kSegmentAlign * kSegmentAlign;
  return all;
}

// A tile of sequence n, its keys and flags still to be set.
AttentionTile Planner::tile_at(int32_t n, int64_t row, int64_t state) const {
  AttentionTile tile{};
  tile.token = call_.cu_seqlens_q[n];
  tile.rows = int32_t(queries(n) * group_);
  tile.row = int32_t(row);
  tile.shift = int32_t(call_.seq_lens[n] - queries(n));
  tile.table = int32_t(n * max_pages());
  tile.state = int32_t(state);
  return tile;
}

// Length of the segments that `keys` keys are cut into: within both budgets, and about equal.
int64_t Planner::segment_keys(const Reads& reads, double milliseconds_per_key, int64_t keys) const {
  double most = call_.budget.milliseconds / milliseconds_per_key;
  if (reads.gathered()) {
    most = std::min(most, double(call_.budget.gathered_bytes) / double(gathered_key_bytes(reads)));
  }
  const auto longest =
      std::max(kSegmentAlign, int64_t(std::min(most, 1e9)) / kSegmentAlign * kSegmentAlign);
  const int64_t segments = std::max<int64_t>(1, ceil_div(keys, longest));
  return std::max(kSegmentAlign, round_up(ceil_div(keys, segments), kSegmentAlign));
}

// Puts a piece into the last round, or into a new one where it does not fit. A piece never shares a
// launch with the one that it continues.
void Planner::add(Piece piece, const Reads& reads, std::vector<Round>& rounds, int32_t n) {
  const int64_t rows = reads.gathered() ? round_up(piece.keys.size(), 16) : 0;
  if (rounds.empty() || piece.continues ||
      rounds.back().milliseconds + piece.milliseconds > call_.budget.milliseconds ||
      (rounds.back().gathered_rows + rows) * gathered_key_bytes(reads) >
          call_.budget.gathered_bytes) {
    rounds.emplace_back();
  }
  Round& round = rounds.back();
  if (reads.gathered()) {
    for (int64_t key = piece.keys.begin; key < piece.keys.end; key += kGatherSpan) {
      round.spans.push_back(
          GatherSpan{.table = int32_t(n * max_pages()),
                     .key = int32_t(key),
                     .keys = int32_t(std::min(kGatherSpan, piece.keys.end - key)),
                     .row = int32_t(round.gathered_rows + key - piece.keys.begin)});
    }
  }
  for (AttentionTile& tile : piece.tiles) {
    tile.gathered = int32_t(round.gathered_rows - piece.keys.begin);
    round.tiles.push_back(tile);
  }
  round.milliseconds += piece.milliseconds;
  round.gathered_rows += rows;
  round.carries |= piece.carries;
  longest_segment_ = std::max(longest_segment_, piece.keys.size());
}

void Planner::plan_flash(int32_t n) {
  const int64_t rows = queries(n) * group_;
  const int64_t num_tiles = ceil_div(rows, shape_.rows);
  const double tile_ms = double(shape_.rows) * 4 * call_.head_dim * call_.num_kv_heads /
                         call_.budget.flops_per_millisecond;  // per key
  const auto block_tiles =
      std::max<int64_t>(1, int64_t(call_.budget.milliseconds / (tile_ms * double(kLeastSegment))));

  for (int64_t t0 = 0; t0 < num_tiles; t0 += block_tiles) {
    const int64_t t1 = std::min(num_tiles, t0 + block_tiles);
    const KeyRange all = visible_to_tiles(n, t0, t1, shape_.rows);
    const int64_t step = segment_keys(flash_reads_, tile_ms * double(t1 - t0), all.size());
    // A block that carries (m, l, O) may begin in the launch where the last one ends, so they take
    // turns in two regions of the state buffers.
    int64_t state = 0;
    if (all.size() > step) {
      state = carrying_blocks_++ % 2 * block_tiles * shape_.rows;
      state_rows_ = std::max(state_rows_, state + (t1 - t0) * shape_.rows);
    }

    int64_t begin = all.begin;
    do {
      Piece piece;
      piece.keys = {begin, std::min(all.end, begin + step)};
      piece.continues = begin > all.begin;
      for (int64_t t = t0; t < t1; ++t) {
        const KeyRange range = visible(n, t * shape_.rows, shape_.rows);
        const KeyRange keys{std::max(range.begin, piece.keys.begin),
                            std::min(range.end, piece.keys.end)};
        const bool empty = range.size() == 0 && begin == all.begin;
        if (keys.begin >= keys.end && !empty) continue;
        AttentionTile tile = tile_at(n, t * shape_.rows, state + (t - t0) * shape_.rows);
        if (empty) {
          tile.flags = kAttentionTileFirst | kAttentionTileLast;
        } else {
          tile.key_begin = int32_t(keys.begin);
          tile.key_end = int32_t(keys.end);
          tile.flags = (keys.begin == range.begin ? kAttentionTileFirst : 0) |
                       (keys.end == range.end ? kAttentionTileLast : 0);
          piece.carries |= tile.flags != (kAttentionTileFirst | kAttentionTileLast);
          piece.milliseconds += tile_ms * double(keys.size());
        }
        piece.tiles.push_back(tile);
      }
      if (!piece.tiles.empty()) add(std::move(piece), flash_reads_, flash_, n);
      begin += step;
    } while (begin < all.end);
  }
}

void Planner::plan_decode(int32_t n, int64_t target_splits) {
  const int64_t rows = queries(n) * group_;
  const int64_t num_tiles = ceil_div(rows, kDecodeRows);
  const double flop_ms =
      double(kDecodeRows) * 4 * call_.head_dim / call_.budget.flops_per_millisecond;
  const int64_t own = call_.head_dim * size_of(call_.dtype);
  const int64_t row_bytes =
      (decode_reads_.k_gathered ? own : page_row_bytes(call_.k_format, call_.head_dim)) +
      (decode_reads_.v_gathered ? own : page_row_bytes(call_.v_format, call_.head_dim));
  const double byte_ms = double(row_bytes) / call_.budget.bytes_per_millisecond;
  const double tile_ms = std::max(flop_ms, byte_ms) * call_.num_kv_heads;  // per key

  const KeyRange all = visible_to_tiles(n, 0, num_tiles, kDecodeRows);
  const int64_t wanted =
      std::clamp<int64_t>(target_splits, 1, ceil_div(all.size(), kLeastSplit) + 1);
  const int64_t split =
      std::min(segment_keys(decode_reads_, tile_ms * double(num_tiles), all.size()),
               round_up(std::max(ceil_div(all.size(), wanted), kLeastSplit), kSegmentAlign));
  const int64_t splits = std::max<int64_t>(1, ceil_div(all.size(), split));
  const int64_t first_partial = partial_rows_;
  if (splits > 1) {
    partial_rows_ += splits * queries(n);
    for (int64_t i = 0; i < queries(n); ++i) {
      merge_rows_.push_back(MergeRow{.token = int32_t(call_.cu_seqlens_q[n] + i),
                                     .first = int32_t(first_partial + i),
                                     .count = int32_t(splits),
                                     .stride = int32_t(queries(n))});
    }
  }

  for (int64_t s = 0; s < splits; ++s) {
    Piece piece;
    piece.keys = {all.begin + s * split, std::min(all.end, all.begin + (s + 1) * split)};
    for (int64_t t = 0; t < num_tiles; ++t) {
      const KeyRange range = visible(n, t * kDecodeRows, kDecodeRows);
      KeyRange keys{std::max(range.begin, piece.keys.begin), std::min(range.end, piece.keys.end)};
      if (keys.begin >= keys.end) keys = {};  // the partial is written all the same: 0 and -inf
      AttentionTile tile = tile_at(n, t * kDecodeRows, first_partial + s * queries(n));
      tile.key_begin = int32_t(keys.begin);
      tile.key_end = int32_t(keys.end);
      tile.flags = splits == 1 ? kAttentionTileFirst | kAttentionTileLast : kAttentionTileFirst;
      piece.milliseconds += tile_ms * double(keys.size());
      piece.carries |= splits > 1;
      piece.tiles.push_back(tile);
    }
    add(std::move(piece), decode_reads_, decode_, n);
  }
}

Plan Planner::plan() {
  check();
  plan_.op = "paged_attention";
  int64_t decode_tiles = 0;
  for (int32_t n = 0; n < sequences(); ++n) {
    if (queries(n) > kDecodeQueries) plan_flash(n);
    if (queries(n) > 0 && queries(n) <= kDecodeQueries) {
      decode_tiles += ceil_div(queries(n) * group_, kDecodeRows) * call_.num_kv_heads;
    }
  }
  if (decode_tiles > 0) {
    const int64_t target = kDecodeThreadgroupsPerCore * call_.gpu_cores;
    for (int32_t n = 0; n < sequences(); ++n) {
      if (queries(n) > 0 && queries(n) <= kDecodeQueries) {
        plan_decode(n, ceil_div(target, decode_tiles));
      }
    }
  }
  for (const Round& round : flash_) gathered_rows_ = std::max(gathered_rows_, round.gathered_rows);
  for (const Round& round : decode_) gathered_rows_ = std::max(gathered_rows_, round.gathered_rows);
  for (const Round& round : flash_) emit_attention(round, false);
  for (const Round& round : decode_) emit_attention(round, true);
  if (partial_rows_ > 0) emit_merge();

  const auto scratch = [&](const std::string& role, int64_t bytes) {
    if (bytes > 0) plan_.scratch.push_back({role, bytes});
  };
  gathered_rows_ =
      std::max<int64_t>(gathered_rows_, 1);  // bound by every launch, also without keys
  const int64_t gathered_bytes =
      gathered_rows_ * call_.num_kv_heads * call_.head_dim * size_of(call_.dtype);
  const bool any_k = (!flash_.empty() && flash_reads_.k_gathered) ||
                     (!decode_.empty() && decode_reads_.k_gathered);
  const bool any_v = (!flash_.empty() && flash_reads_.v_gathered) ||
                     (!decode_.empty() && decode_reads_.v_gathered);
  scratch("gathered_k", any_k ? gathered_bytes : 0);
  scratch("gathered_v", any_v ? gathered_bytes : 0);
  scratch("state_o", state_rows_ * call_.num_kv_heads * call_.head_dim * 4);
  scratch("state_m", state_rows_ * call_.num_kv_heads * 4);
  scratch("state_l", state_rows_ * call_.num_kv_heads * 4);
  scratch("partial_o", partial_rows_ * call_.num_q_heads * call_.head_dim * 4);
  scratch("partial_lse", partial_rows_ * call_.num_q_heads * 4);
  if (!plan_.launches.empty()) {
    plan_.host_data.push_back(
        {"block_table",
         to_bytes(call_.block_table.empty() ? std::vector<int32_t>{0} : call_.block_table)});
    plan_.host_data.push_back({"tiles", to_bytes(tiles_)});
    if (!spans_.empty()) plan_.host_data.push_back({"spans", to_bytes(spans_)});
    if (!merge_rows_.empty()) plan_.host_data.push_back({"merge_rows", to_bytes(merge_rows_)});
  }
  plan_.why = why();
  return std::move(plan_);
}

}  // namespace paged_attention_plan

Plan plan_paged_attention(const PagedAttentionCall& call) {
  return paged_attention_plan::Planner(call).plan();
}

}  // namespace chunkdelta
