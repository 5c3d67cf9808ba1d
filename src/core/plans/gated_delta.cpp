#include "core/plans/gated_delta.h"

#include <algorithm>
#include <array>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "gated_delta/params.h"

namespace chunkdelta {

namespace {

constexpr int32_t kChunk = 16;                  // rows; prep.h and scan.h are written for it
constexpr int64_t kTriangleBytes = 3 * 64 * 4;  // A or P of a chunk and value head
constexpr int64_t kFactorBytes = (3 * kChunk + 4) * 4;
constexpr int32_t kPrepThreads = 128;
constexpr std::array<int32_t, 5> kHeadDims = {64, 96, 128, 192, 256};
constexpr int32_t kNoCheckpoint = std::numeric_limits<int32_t>::max();

// Prep and scan run over segments of the prompt. That bounds the scratch (A, P and the row factors
// take 1,744 bytes per chunk and value head) and the time of a dispatch, for which the GPU has a
// watchdog: 1.5e10 FLOP is 10 ms on an M1 at 60 % of its 2.6 TFLOP/s.
constexpr int64_t kSegmentFlop = 15'000'000'000;

struct TileRow {
  int32_t head_k_dim;           // up to
  int32_t simdgroups_per_core;  // of 16 columns, at least
  GatedDeltaTile tile;
};

// Counts: benchmarks/metal_counts.py. Registers a lane, estimated from the live tiles: 96 with 16
// columns at Dk = 128 (16 simdgroups fit a core's 208 KB), 60 with 8 columns (27 fit).
constexpr TileRow kTiles[] = {
    {128, 16, {16, 4, "16 columns: two products per loaded tile, and the GPU is full with them"}},
    {128, 0, {8, 8, "8 columns: too few value heads to fill the GPU with 16"}},
    // 16 columns would take 96 (Dk = 192) or 128 registers for the state alone.
    {256, 0, {8, 4, "8 columns: the state of 16 would not fit the registers"}},
};

struct Sequence {
  int32_t index;  // in the call
  int32_t row;
  int32_t rows;
  int32_t checkpoint;  // index of its first
};

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
  throw std::invalid_argument("[chunk_gated_delta_rule] expected " + expected + "; got " + got);
}

std::string text(int64_t x) {
  return std::to_string(x);
}

std::string kernel_suffix(Dtype dtype) {
  return dtype == Dtype::f32 ? "f32" : dtype == Dtype::f16 ? "f16" : "bf16";
}

void check(const GatedDeltaCall& call) {
  if (call.batch < 0 || call.tokens < 0 || int64_t(call.batch) * call.tokens > kNoCheckpoint)
    refuse("fewer than 2^31 rows", text(call.batch) + " x " + text(call.tokens));
  if (call.num_k_heads < 1 || call.num_v_heads < 1 || call.num_v_heads % call.num_k_heads != 0)
    refuse("value heads in groups of equal size per key head",
           text(call.num_v_heads) + " value heads, " + text(call.num_k_heads) + " key heads");
  for (int32_t dim : {call.head_k_dim, call.head_v_dim})
    if (dim < 1 || dim > kHeadDims.back()) refuse("head dims of 1 to 256", text(dim));
  for (const auto* view : {&call.q, &call.k, &call.v}) {
    if (!*view) continue;
    for (int64_t stride : {(*view)->token, (*view)->head, (*view)->element})
      if (stride < -kNoCheckpoint || stride > kNoCheckpoint)
        refuse("strides of less than 2^31 elements", text(stride));
  }
  const auto& cu = call.cu_seqlens;
  if (!cu.empty()) {
    if (call.batch != 1) refuse("batch 1 with cu_seqlens", "batch " + text(call.batch));
    if (cu.front() != 0 || cu.back() != call.tokens)
      refuse("cu_seqlens from 0 to " + text(call.tokens),
             text(cu.front()) + " to " + text(cu.back()));
    if (!std::is_sorted(cu.begin(), cu.end()))
      refuse("cu_seqlens that do not decrease", "a decrease");
  }
  if (call.pooled) {
    const size_t sequences = cu.empty() ? size_t(call.batch) : cu.size() - 1;
    if (call.initial_state) refuse("no initial_state with a state pool", "both");
    if (call.state_indices.size() != sequences)
      refuse(text(int64_t(sequences)) + " state_indices", text(int64_t(call.state_indices.size())));
    std::vector<int32_t> slots = call.state_indices;
    std::sort(slots.begin(), slots.end());
    if (std::adjacent_find(slots.begin(), slots.end()) != slots.end())
      refuse("a slot of its own for each sequence", "a repeated slot in state_indices");
    if (!slots.empty() && (slots.front() < 0 || slots.back() >= call.num_slots))
      refuse("state_indices in 0.." + text(call.num_slots - 1),
             text(slots.front() < 0 ? slots.front() : slots.back()));
  }
  if (call.checkpoint_every < 0) refuse("a positive checkpoint_every", text(call.checkpoint_every));
}

int32_t padded_head_dim(int32_t dim) {
  return *std::lower_bound(kHeadDims.begin(), kHeadDims.end(), dim);
}

std::vector<Sequence> sequences_of(const GatedDeltaCall& call) {
  const int32_t count = call.cu_seqlens.empty() ? call.batch : int32_t(call.cu_seqlens.size()) - 1;
  std::vector<Sequence> sequences;
  sequences.reserve(size_t(count));
  int32_t checkpoint = 0;
  for (int32_t i = 0; i < count; i++) {
    const int32_t row = call.cu_seqlens.empty() ? i * call.tokens : call.cu_seqlens[size_t(i)];
    const int32_t rows =
        call.cu_seqlens.empty() ? call.tokens : call.cu_seqlens[size_t(i) + 1] - row;
    sequences.push_back({i, row, rows, checkpoint});
    if (call.checkpoint_every > 0) checkpoint += rows / call.checkpoint_every;
  }
  return sequences;
}

GatedDeltaSequence beginning(const GatedDeltaCall& call, const Sequence& s) {
  GatedDeltaSequence entry{};
  entry.row = s.row;
  entry.rows = s.rows;
  entry.source = call.pooled          ? kGatedDeltaState
                 : call.initial_state ? kGatedDeltaInitial
                                      : kGatedDeltaZeros;
  entry.initial = s.index;
  entry.state = call.pooled ? call.state_indices[size_t(s.index)] : s.index;
  entry.checkpoint = s.checkpoint;
  entry.until = call.checkpoint_every > 0 ? call.checkpoint_every : kNoCheckpoint;
  return entry;
}

// Part of the prompt that one prep and one scan launch cover.
struct Segment {
  std::vector<GatedDeltaChunk> chunks;
  std::vector<GatedDeltaSequence> sequences;
};

// Chunks end where the sequence or a checkpoint interval does.
std::vector<Segment> segments_of(const GatedDeltaCall& call, const std::vector<Sequence>& sequences,
                                 int64_t most_chunks) {
  std::vector<Segment> segments;
  for (const Sequence& s : sequences) {
    GatedDeltaSequence next = beginning(call, s);
    int32_t left = s.rows;
    while (left > 0) {
      if (segments.empty() || int64_t(segments.back().chunks.size()) >= most_chunks)
        segments.emplace_back();
      Segment& segment = segments.back();
      GatedDeltaSequence entry = next;
      entry.chunk = int32_t(segment.chunks.size());
      while (left > 0 && int64_t(segment.chunks.size()) < most_chunks) {
        const int32_t rows = std::min({kChunk, left, next.until});
        segment.chunks.push_back({next.row, rows});
        next.row += rows;
        left -= rows;
        if (call.checkpoint_every > 0 && (next.until -= rows) == 0) {
          next.until = call.checkpoint_every;
          next.checkpoint++;
        }
      }
      entry.rows = next.row - entry.row;
      segment.sequences.push_back(entry);
      next.source = kGatedDeltaState;
    }
  }
  return segments;
}

// The 8x8x8 products of a chunk and value head are 1,024 FLOP each.
int64_t chunk_flop(const GatedDeltaCall& call) {
  const int64_t k = padded_head_dim(call.head_k_dim) / 8, v = (call.head_v_dim + 7) / 8;
  const int64_t group = call.num_v_heads / call.num_k_heads;
  return 1024 * (6 * k * v + 6 * v + 6 * k / group);  // K S, Q S, K^T Vd; A W, P Vd; Gram
}

class Builder {
 public:
  explicit Builder(const GatedDeltaCall& call) : call_(call), vectors_(call.aligned) {
    params_.num_v_heads = call.num_v_heads;
    params_.group_size = call.num_v_heads / call.num_k_heads;
    params_.q = strides(call.q, call.num_k_heads, call.head_k_dim);
    params_.k = strides(call.k, call.num_k_heads, call.head_k_dim);
    params_.v = strides(call.v, call.num_v_heads, call.head_v_dim);
    params_.scale = call.scale;
    params_.l2norm_eps = call.l2norm_eps;
    params_.checkpoint_every = call.checkpoint_every;
    checkpoints_ = gated_delta_num_checkpoints(call) > 0;
    type_ = kernel_suffix(call.dtype);
    dim_ = "_d" + std::to_string(padded_head_dim(call.head_k_dim));
  }

  void sequential(const std::vector<Sequence>& sequences) {
    std::vector<GatedDeltaSequence> entries;
    for (const Sequence& s : sequences) entries.push_back(beginning(call_, s));
    // Four simdgroups, 32 value rows: smaller threadgroups would fill a small GPU no better.
    const int32_t simdgroups = std::min((call_.head_v_dim + 7) / 8, 4);
    Launch launch;
    launch.source = "gated_delta/step";
    launch.kernel = "gated_delta_sequential_" + type_ + dim_;
    launch.constants = {
        {GATED_DELTA_SIMDGROUPS, simdgroups},           {GATED_DELTA_HEAD_K_DIM, call_.head_k_dim},
        {GATED_DELTA_HEAD_V_DIM, call_.head_v_dim},     {GATED_DELTA_HAS_MASK, call_.mask},
        {GATED_DELTA_HAS_INITIAL, call_.initial_state}, {GATED_DELTA_CHECKPOINTS, checkpoints_},
        {GATED_DELTA_QK_L2NORM, call_.qk_l2norm},       {GATED_DELTA_VECTORS, vectors_}};
    launch.buffers = {{0, "q", Access::Read},    {1, "k", Access::Read},
                      {2, "v", Access::Read},    {3, "g", Access::Read},
                      {4, "beta", Access::Read}, {6, "step_sequences", Access::Read},
                      {9, "o", Access::Write}};
    if (call_.mask) launch.buffers.push_back({5, "mask", Access::Read});
    states(launch, entries, 7, 8, 10);
    launch.params = {{11, to_bytes(params_)}};
    launch.grid = {blocks(8 * simdgroups), uint32_t(call_.num_v_heads), uint32_t(entries.size())};
    launch.threadgroup = {uint32_t(32 * simdgroups), 1, 1};
    plan.launches.push_back(std::move(launch));
    plan.host_data.push_back({"step_sequences", to_bytes(entries)});
  }

  void chunked(const std::vector<Sequence>& sequences) {
    const int64_t chunk_bytes = call_.num_v_heads * (2 * kTriangleBytes + kFactorBytes);
    const int64_t most_chunks =
        std::max<int64_t>(1, std::min(call_.scratch_bytes / chunk_bytes,
                                      kSegmentFlop / (chunk_flop(call_) * call_.num_v_heads)));
    const GatedDeltaTile tile =
        gated_delta_tile(call_.head_k_dim, call_.head_v_dim,
                         int64_t(call_.num_v_heads) * int64_t(sequences.size()), call_.gpu_cores);
    std::vector<GatedDeltaChunk> chunks;
    std::vector<GatedDeltaSequence> entries;
    int64_t most = 0;
    for (const Segment& segment : segments_of(call_, sequences, most_chunks)) {
      prep(segment, int64_t(chunks.size() * sizeof(GatedDeltaChunk)));
      scan(segment, tile, int64_t(entries.size() * sizeof(GatedDeltaSequence)));
      chunks.insert(chunks.end(), segment.chunks.begin(), segment.chunks.end());
      entries.insert(entries.end(), segment.sequences.begin(), segment.sequences.end());
      most = std::max(most, int64_t(segment.chunks.size()));
    }
    plan.host_data.push_back({"chunks", to_bytes(chunks)});
    plan.host_data.push_back({"scan_sequences", to_bytes(entries)});
    const int64_t slots = most * call_.num_v_heads;
    plan.scratch.push_back({"inverse", slots * kTriangleBytes});
    plan.scratch.push_back({"scores", slots * kTriangleBytes});
    plan.scratch.push_back({"row_factors", slots * kFactorBytes});
    tile_ = tile;
  }

  void explain(size_t chunked, size_t sequential) {
    std::ostringstream why;
    if (chunked > 0)
      why << "chunk-parallel, chunks of " << kChunk << " rows, " << tile_.columns << " columns x "
          << tile_.simdgroups << " simdgroups (" << tile_.reason << ")";
    if (chunked > 0 && sequential > 0) why << "; ";
    if (sequential > 0)
      why << "sequential for " << sequential << " of " << chunked + sequential
          << " sequences, those of at most " << kGatedDeltaSequentialTokens << " tokens";
    if (chunked + sequential == 0)
      why << "nothing to do: no tokens, and states stay where they are";
    plan.why = why.str();
  }

  Plan plan{
      .op = "chunk_gated_delta_rule", .launches = {}, .scratch = {}, .host_data = {}, .why = {}};

 private:
  // Also decides whether rows can be read as vectors of 4 elements.
  GatedDeltaStrides strides(const std::optional<GatedDeltaView>& view, int32_t heads, int32_t dim) {
    GatedDeltaStrides strides{heads * dim, dim, 1};
    if (view) strides = {int32_t(view->token), int32_t(view->head), int32_t(view->element)};
    vectors_ &= strides.element == 1 && strides.row % 4 == 0 && strides.head % 4 == 0;
    return strides;
  }

  uint32_t blocks(int32_t columns) const {
    return uint32_t((call_.head_v_dim + columns - 1) / columns);
  }

  void states(Launch& launch, const std::vector<GatedDeltaSequence>& entries, int initial,
              int state, int checkpoints) const {
    const bool reads = std::any_of(entries.begin(), entries.end(), [](const auto& entry) {
      return entry.source == kGatedDeltaState;
    });
    launch.buffers.push_back({state, "state", reads ? Access::ReadWrite : Access::Write});
    if (call_.initial_state) launch.buffers.push_back({initial, "initial_state", Access::Read});
    if (checkpoints_) launch.buffers.push_back({checkpoints, "checkpoints", Access::Write});
  }

  void prep(const Segment& segment, int64_t chunks_at) {
    Launch launch;
    launch.source = "gated_delta/chunk_" + type_;
    launch.kernel = "gated_delta_prep_" + type_ + dim_;
    launch.constants = {{GATED_DELTA_HEAD_K_DIM, call_.head_k_dim},
                        {GATED_DELTA_HAS_MASK, call_.mask},
                        {GATED_DELTA_QK_L2NORM, call_.qk_l2norm},
                        {GATED_DELTA_VECTORS, vectors_}};
    launch.buffers = {{0, "q", Access::Read},
                      {1, "k", Access::Read},
                      {2, "g", Access::Read},
                      {3, "beta", Access::Read},
                      {5, "chunks", Access::Read, chunks_at},
                      {6, "inverse", Access::Write},
                      {7, "scores", Access::Write},
                      {8, "row_factors", Access::Write}};
    if (call_.mask) launch.buffers.push_back({4, "mask", Access::Read});
    launch.params = {{9, to_bytes(params_)}};
    launch.grid = {uint32_t(segment.chunks.size()), uint32_t(call_.num_k_heads), 1};
    launch.threadgroup = {kPrepThreads, 1, 1};
    plan.launches.push_back(std::move(launch));
  }

  void scan(const Segment& segment, const GatedDeltaTile& tile, int64_t sequences_at) {
    Launch launch;
    launch.source = "gated_delta/chunk_" + type_;
    launch.kernel = "gated_delta_scan_" + type_ + dim_ + "_n" + std::to_string(tile.columns);
    launch.constants = {{GATED_DELTA_SIMDGROUPS, tile.simdgroups},
                        {GATED_DELTA_HEAD_K_DIM, call_.head_k_dim},
                        {GATED_DELTA_HEAD_V_DIM, call_.head_v_dim},
                        {GATED_DELTA_HAS_MASK, call_.mask},
                        {GATED_DELTA_HAS_INITIAL, call_.initial_state},
                        {GATED_DELTA_CHECKPOINTS, checkpoints_},
                        {GATED_DELTA_VECTORS, vectors_}};
    launch.buffers = {
        {0, "q", Access::Read},           {1, "k", Access::Read},
        {2, "v", Access::Read},           {4, "scan_sequences", Access::Read, sequences_at},
        {5, "inverse", Access::Read},     {6, "scores", Access::Read},
        {7, "row_factors", Access::Read}, {10, "o", Access::Write}};
    if (call_.mask) launch.buffers.push_back({3, "mask", Access::Read});
    states(launch, segment.sequences, 8, 9, 11);
    launch.params = {{12, to_bytes(params_)}};
    launch.grid = {blocks(tile.columns * tile.simdgroups), uint32_t(call_.num_v_heads),
                   uint32_t(segment.sequences.size())};
    launch.threadgroup = {uint32_t(32 * tile.simdgroups), 1, 1};
    plan.launches.push_back(std::move(launch));
  }

  const GatedDeltaCall& call_;
  GatedDeltaParams params_{};
  GatedDeltaTile tile_{};
  bool vectors_;
  bool checkpoints_;
  std::string type_;
  std::string dim_;
};

}  // namespace

// Where the chunk kernels begin to win is a count, not a measurement. A token costs the sequential
// kernel about 240 issued instructions per 8 value rows (128 of them the FMAs of 8 x 128 state
// elements), 3,840 per value head at D = 128; a chunk costs prep and scan 1,680 products of 16
// issue cycles per 16 tokens plus about a third for loads, 2,240 per token when it is full. So one
// chunk breaks even at 10 tokens; the second launch and the serial solve in prep put it at a whole
// chunk.
const int32_t kGatedDeltaSequentialTokens = kChunk;

GatedDeltaTile gated_delta_tile(int32_t head_k_dim, int32_t head_v_dim, int64_t heads,
                                int32_t gpu_cores) {
  const int64_t simdgroups = heads * ((head_v_dim + 15) / 16);
  for (const TileRow& row : kTiles) {
    if (head_k_dim > row.head_k_dim) continue;
    if (simdgroups < int64_t(row.simdgroups_per_core) * std::max(gpu_cores, 1)) continue;
    GatedDeltaTile tile = row.tile;
    // No simdgroup without columns: spread them over equal threadgroups.
    const int32_t needed = (head_v_dim + tile.columns - 1) / tile.columns;
    const int32_t groups = (needed + tile.simdgroups - 1) / tile.simdgroups;
    tile.simdgroups = (needed + groups - 1) / groups;
    return tile;
  }
  throw std::logic_error("the last row of the tile table takes everything");
}

int64_t gated_delta_num_checkpoints(const GatedDeltaCall& call) {
  if (call.checkpoint_every <= 0) return 0;
  int64_t count = 0;
  for (const Sequence& s : sequences_of(call)) count += s.rows / call.checkpoint_every;
  return count;
}

Plan plan_gated_delta(const GatedDeltaCall& call) {
  check(call);
  std::vector<Sequence> sequential;
  std::vector<Sequence> chunked;
  for (const Sequence& s : sequences_of(call)) {
    if (s.rows == 0 && call.pooled) continue;  // its slot stays as it is
    (s.rows <= kGatedDeltaSequentialTokens ? sequential : chunked).push_back(s);
  }
  Builder builder(call);
  if (!chunked.empty()) builder.chunked(chunked);
  if (!sequential.empty()) builder.sequential(sequential);
  builder.explain(chunked.size(), sequential.size());
  return std::move(builder.plan);
}

}  // namespace chunkdelta
