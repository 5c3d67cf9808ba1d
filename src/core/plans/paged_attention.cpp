#include "core/plans/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "attention/params.h"
#include "core/plans/attention_tiles.h"
#include "core/plans/merge_states.h"

namespace chunkdelta {
namespace {

// Segments are cut at multiples of this, so that every kernel's key tiles are whole in all of them.
constexpr int64_t kSegmentAlign = 64;
// Rows are planned in blocks for which a segment at least this long fits the time budget; shorter
// ones would spend their time on carrying (m, l, O).
constexpr int64_t kLeastSegment = 1024;
// Keys of one threadgroup of the gather kernel.
constexpr int64_t kGatherSpan = 64;
constexpr int32_t kGatherThreads = 128;
// Decode splits keys until this many threadgroups per core are busy, but not below kLeastSplit
// keys.
constexpr int64_t kDecodeThreadgroupsPerCore = 4;
constexpr int64_t kLeastSplit = 256;
constexpr int32_t kDecodeRows = 8;
constexpr int32_t kDecodeThreads = 128;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
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
  void add(Piece piece, std::vector<Round>& rounds, int32_t sequence);
  KeyRange visible(int32_t sequence, int64_t row, int64_t rows_per_tile) const;
  KeyRange visible_to_tiles(int32_t sequence, int64_t t0, int64_t t1, int64_t rows_per_tile) const;
  AttentionTile tile_at(int32_t sequence, int64_t row, int64_t state) const;
  int64_t segment_keys(double milliseconds_per_key, int64_t keys) const;
  void emit_gather(const Round& round);
  void emit_attention(const Round& round, bool decode);
  void emit_merge();
  std::vector<FunctionConstant> constants(bool carries) const;
  PagedAttentionParams params() const;
  std::string why() const;

  int64_t queries(int32_t n) const { return call_.cu_seqlens_q[n + 1] - call_.cu_seqlens_q[n]; }
  int64_t tokens() const { return call_.cu_seqlens_q.back(); }
  int32_t sequences() const { return int32_t(call_.seq_lens.size()); }
  int64_t max_pages() const {
    return sequences() ? int64_t(call_.block_table.size()) / sequences() : 0;
  }
  bool gathered() const { return k_gathered_ || v_gathered_; }
  // Scratch bytes of one gathered key, all KV heads.
  int64_t gathered_key_bytes() const {
    return (int64_t(k_gathered_) + v_gathered_) * call_.num_kv_heads * call_.head_dim *
           size_of(call_.dtype);
  }

  const PagedAttentionCall& call_;
  const AttentionTileShape& shape_;
  const int64_t group_;
  int64_t num_pages_ = 0;
  bool k_gathered_;
  bool v_gathered_;

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

Planner::Planner(const PagedAttentionCall& call)
    : call_(call),
      shape_(attention_tile(call.dtype, call.head_dim)),
      group_(call.num_kv_heads > 0 ? call.num_q_heads / call.num_kv_heads : 0) {
  for (int32_t pages : call.slab_pages) num_pages_ += pages;
  // Pages of one slab in the activations' own type are read in place.
  const bool slabs = call.slab_pages.size() > 1;
  k_gathered_ = slabs || !page_format_is(call.k_format, call.dtype);
  v_gathered_ = slabs || !page_format_is(call.v_format, call.dtype);
}

[[noreturn]] void fail(const std::string& what) {
  throw std::invalid_argument("[paged_attention] expected " + what);
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
int64_t Planner::segment_keys(double milliseconds_per_key, int64_t keys) const {
  double most = call_.budget.milliseconds / milliseconds_per_key;
  if (gathered()) {
    most = std::min(most, double(call_.budget.gathered_bytes) / double(gathered_key_bytes()));
  }
  const auto longest =
      std::max(kSegmentAlign, int64_t(std::min(most, 1e9)) / kSegmentAlign * kSegmentAlign);
  const int64_t segments = std::max<int64_t>(1, ceil_div(keys, longest));
  return std::max(kSegmentAlign, round_up(ceil_div(keys, segments), kSegmentAlign));
}

// Puts a piece into the last round, or into a new one where it does not fit. A piece never shares a
// launch with the one that it continues.
void Planner::add(Piece piece, std::vector<Round>& rounds, int32_t n) {
  const int64_t rows = gathered() ? round_up(piece.keys.size(), 16) : 0;
  if (rounds.empty() || piece.continues ||
      rounds.back().milliseconds + piece.milliseconds > call_.budget.milliseconds ||
      (rounds.back().gathered_rows + rows) * gathered_key_bytes() > call_.budget.gathered_bytes) {
    rounds.emplace_back();
  }
  Round& round = rounds.back();
  if (gathered()) {
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
    const int64_t step = segment_keys(tile_ms * double(t1 - t0), all.size());
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
      if (!piece.tiles.empty()) add(std::move(piece), flash_, n);
      begin += step;
    } while (begin < all.end);
  }
}

void Planner::plan_decode(int32_t n, int64_t target_splits) {
  const int64_t rows = queries(n) * group_;
  const int64_t num_tiles = ceil_div(rows, kDecodeRows);
  const double flop_ms =
      double(kDecodeRows) * 4 * call_.head_dim / call_.budget.flops_per_millisecond;
  const double byte_ms =
      2.0 * call_.head_dim * double(size_of(call_.dtype)) / call_.budget.bytes_per_millisecond;
  const double tile_ms = std::max(flop_ms, byte_ms) * call_.num_kv_heads;  // per key

  const KeyRange all = visible_to_tiles(n, 0, num_tiles, kDecodeRows);
  const int64_t wanted =
      std::clamp<int64_t>(target_splits, 1, ceil_div(all.size(), kLeastSplit) + 1);
  const int64_t split =
      std::min(segment_keys(tile_ms * double(num_tiles), all.size()),
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
    add(std::move(piece), decode_, n);
  }
}

std::vector<FunctionConstant> Planner::constants(bool carries) const {
  return {{ATTENTION_GROUP_SIZE, int32_t(group_)},
          {ATTENTION_PAGE_SIZE, call_.page_size},
          {ATTENTION_CAUSAL, call_.causal},
          {ATTENTION_HAS_WINDOW, call_.window > 0},
          {ATTENTION_HAS_SOFTCAP, call_.softcap > 0},
          {ATTENTION_HAS_SINKS, call_.sinks},
          {ATTENTION_CARRIES, carries},
          {ATTENTION_K_GATHERED, k_gathered_},
          {ATTENTION_V_GATHERED, v_gathered_},
          {ATTENTION_WRITES_LSE, call_.return_lse}};
}

PagedAttentionParams Planner::params() const {
  constexpr float kLog2E = 1.44269504089f;
  PagedAttentionParams p{};
  p.num_kv_heads = call_.num_kv_heads;
  p.num_pages = int32_t(num_pages_);
  p.table_length = int32_t(call_.block_table.size());
  p.gathered_rows = int32_t(gathered_rows_);
  p.first_tile = int32_t(tiles_.size());
  p.window = call_.window;
  p.scale = call_.softcap > 0 ? call_.scale / call_.softcap : call_.scale * kLog2E;
  p.softcap = call_.softcap * kLog2E;
  return p;
}

// One launch per slab and pool: each writes the keys that its slab holds.
void Planner::emit_gather(const Round& round) {
  const auto format_name = [](PageFormat format) { return std::string(page_format_name(format)); };
  const auto emit = [&](const char* role, PageFormat format) {
    int32_t first_page = 0;
    for (size_t slab = 0; slab < call_.slab_pages.size(); ++slab) {
      GatherPagesParams p{};
      p.head_dim = call_.head_dim;
      p.num_kv_heads = call_.num_kv_heads;
      p.first_page = first_page;
      p.slab_pages = call_.slab_pages[slab];
      p.num_pages = int32_t(num_pages_);
      p.table_length = int32_t(call_.block_table.size());
      p.gathered_rows = int32_t(gathered_rows_);
      p.first_span = int32_t(spans_.size());
      p.page_size = call_.page_size;
      const std::string pool =
          std::string(role) + "_pages" + (slab ? "." + std::to_string(slab) : std::string());
      Launch launch;
      launch.source = "attention/gather_pages";
      launch.kernel = "gather_pages_" + format_name(format) + "_to_" + dtype_name(call_.dtype);
      launch.buffers = {{0, pool, Access::Read},
                        {1, "block_table", Access::Read},
                        {2, "spans", Access::Read},
                        {4, std::string("gathered_") + role, Access::Write}};
      launch.params = {{3, to_bytes(p)}};
      launch.grid = {uint32_t(round.spans.size()), uint32_t(call_.num_kv_heads), 1};
      launch.threadgroup = {uint32_t(kGatherThreads), 1, 1};
      plan_.launches.push_back(std::move(launch));
      first_page += call_.slab_pages[slab];
    }
  };
  if (k_gathered_) emit("k", call_.k_format);
  if (v_gathered_) emit("v", call_.v_format);
  spans_.insert(spans_.end(), round.spans.begin(), round.spans.end());
}

void Planner::emit_attention(const Round& round, bool decode) {
  if (gathered() && !round.spans.empty()) emit_gather(round);
  Launch launch;
  launch.source = decode ? "attention/decode_d" + std::to_string(call_.head_dim) : shape_.source();
  launch.kernel = decode ? "decode_" + std::string(dtype_name(call_.dtype)) + "_d" +
                               std::to_string(call_.head_dim)
                         : shape_.kernel();
  launch.constants = constants(round.carries);
  launch.buffers = {{0, "q", Access::Read},
                    {1, k_gathered_ ? "gathered_k" : "k_pages", Access::Read},
                    {2, v_gathered_ ? "gathered_v" : "v_pages", Access::Read},
                    {3, "block_table", Access::Read},
                    {4, "tiles", Access::Read},
                    {7, "o", Access::Write}};
  launch.params = {{5, to_bytes(params())}};
  if (call_.sinks) launch.buffers.push_back({6, "sinks", Access::Read});
  if (call_.return_lse) launch.buffers.push_back({8, "lse", Access::Write});
  if (round.carries && decode) {
    launch.buffers.push_back({9, "partial_o", Access::Write});
    launch.buffers.push_back({10, "partial_lse", Access::Write});
  } else if (round.carries) {
    launch.buffers.push_back({9, "state_o", Access::ReadWrite});
    launch.buffers.push_back({10, "state_m", Access::ReadWrite});
    launch.buffers.push_back({11, "state_l", Access::ReadWrite});
  }
  launch.grid = {uint32_t(round.tiles.size()), uint32_t(call_.num_kv_heads), 1};
  launch.threadgroup = {uint32_t(decode ? kDecodeThreads : shape_.threads()), 1, 1};
  plan_.launches.push_back(std::move(launch));
  tiles_.insert(tiles_.end(), round.tiles.begin(), round.tiles.end());
}

void Planner::emit_merge() {
  MergeStatesParams p{};
  p.head_dim = call_.head_dim;
  p.heads = call_.num_q_heads;
  p.rows = int32_t(merge_rows_.size()) * call_.num_q_heads;
  Launch launch =
      merge_states_launch(Dtype::f32, call_.dtype, p, true, call_.sinks, call_.return_lse);
  launch.buffers = {{0, "partial_o", Access::Read},
                    {1, "partial_lse", Access::Read},
                    {2, "merge_rows", Access::Read},
                    {5, "o", Access::Write}};
  if (call_.sinks) launch.buffers.push_back({4, "sinks", Access::Read});
  if (call_.return_lse) launch.buffers.push_back({6, "lse", Access::Write});
  plan_.launches.push_back(std::move(launch));
}

std::string Planner::why() const {
  std::string text;
  const auto say = [&](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
  if (!flash_.empty()) say(shape_.kernel() + ": " + shape_.reason);
  if (!decode_.empty()) {
    say("decode for sequences of up to " + std::to_string(kDecodeQueries) + " queries" +
        (partial_rows_ ? ", keys split and merged to fill the GPU" : ""));
  }
  if (gathered()) {
    say("pages are gathered into scratch first, once per segment: " +
        std::string(call_.slab_pages.size() > 1
                        ? "they lie in several slabs"
                        : std::string("K is ") + page_format_name(call_.k_format) + ", V is " +
                              page_format_name(call_.v_format) + ", queries are " +
                              dtype_name(call_.dtype)));
  }
  say("at most " + std::to_string(longest_segment_) + " keys per launch, for " +
      std::to_string(int(call_.budget.milliseconds)) + " ms on an M1");
  return text;
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
  scratch("gathered_k", k_gathered_ && !plan_.launches.empty() ? gathered_bytes : 0);
  scratch("gathered_v", v_gathered_ && !plan_.launches.empty() ? gathered_bytes : 0);
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

}  // namespace

Plan plan_paged_attention(const PagedAttentionCall& call) {
  return Planner(call).plan();
}

}  // namespace chunkdelta
