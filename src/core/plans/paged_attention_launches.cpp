#include <utility>

#include "core/plans/merge_states.h"
#include "core/plans/paged_attention_planner.h"

namespace chunkdelta::paged_attention_plan {
namespace {

constexpr int32_t kGatherThreads = 128;
constexpr int32_t kDecodeThreads = 128;

}  // namespace

std::vector<FunctionConstant> Planner::constants(bool carries, bool decode) const {
  const Reads& reads = decode ? decode_reads_ : flash_reads_;
  std::vector<FunctionConstant> constants{{ATTENTION_GROUP_SIZE, int32_t(group_)},
                                          {ATTENTION_PAGE_SIZE, call_.page_size},
                                          {ATTENTION_CAUSAL, call_.causal},
                                          {ATTENTION_HAS_WINDOW, call_.window > 0},
                                          {ATTENTION_HAS_SOFTCAP, call_.softcap > 0},
                                          {ATTENTION_HAS_SINKS, call_.sinks},
                                          {ATTENTION_CARRIES, carries},
                                          {ATTENTION_K_GATHERED, reads.k_gathered},
                                          {ATTENTION_V_GATHERED, reads.v_gathered},
                                          {ATTENTION_WRITES_LSE, call_.return_lse}};
  if (decode) {
    constants.push_back({ATTENTION_K_FORMAT, device_format(call_.k_format, reads.k_gathered)});
    constants.push_back({ATTENTION_V_FORMAT, device_format(call_.v_format, reads.v_gathered)});
  }
  return constants;
}

// What the kernel finds where it reads: gathered rows are in the queries' own type.
int32_t Planner::device_format(PageFormat format, bool gathered) const {
  if (gathered || page_format_is(format, call_.dtype)) return kAttentionPageOwn;
  switch (format) {
    case PageFormat::f32:
      return kAttentionPageF32;
    case PageFormat::f16:
      return kAttentionPageF16;
    case PageFormat::bf16:
      return kAttentionPageBF16;
    case PageFormat::q8_0:
      return kAttentionPageQ80;
    case PageFormat::q4_0:
      return kAttentionPageQ40;
    case PageFormat::turbo4:
      return kAttentionPageTurbo4;
  }
  return kAttentionPageOwn;
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
void Planner::emit_gather(const Round& round, const Reads& reads) {
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
  if (reads.k_gathered) emit("k", call_.k_format);
  if (reads.v_gathered) emit("v", call_.v_format);
  spans_.insert(spans_.end(), round.spans.begin(), round.spans.end());
}

void Planner::emit_attention(const Round& round, bool decode) {
  const Reads& reads = decode ? decode_reads_ : flash_reads_;
  if (!round.spans.empty()) emit_gather(round, reads);
  Launch launch;
  launch.source = decode ? "attention/decode_d" + std::to_string(call_.head_dim) : shape_.source();
  launch.kernel = decode ? "decode_" + std::string(dtype_name(call_.dtype)) + "_d" +
                               std::to_string(call_.head_dim)
                         : shape_.kernel();
  launch.constants = constants(round.carries, decode);
  launch.buffers = {{0, "q", Access::Read},
                    {1, reads.k_gathered ? "gathered_k" : "k_pages", Access::Read},
                    {2, reads.v_gathered ? "gathered_v" : "v_pages", Access::Read},
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
  if (!spans_.empty()) {
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

}  // namespace chunkdelta::paged_attention_plan
