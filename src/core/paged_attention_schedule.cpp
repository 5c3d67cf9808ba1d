#include "core/paged_attention_schedule.h"

#include <algorithm>
#include <sstream>

#include "core/page_codec_kernel.h"
#include "core/paged_attention_kernel.h"

namespace chunkdelta {
namespace {

// Rows that share one decoding of their keys. More would save little and take O in fp32.
constexpr int64_t kUnitRows = 4096;
// Waves are large enough for many cores and leave the transient flat.
constexpr int64_t kWaveBytes = 24 << 20;
constexpr int64_t kSplitKeys = 1024;
constexpr int64_t kSplitBytes = 4 << 20;  // partial results of a unit

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace

int64_t AttentionUnit::capacity() const {
  return split_keys ? 0 : round_up(std::min(keys(), kSegmentKeys), 64);
}

UnitFloats unit_floats(const PagedAttentionOptions& options, const AttentionUnit& unit) {
  const int64_t padded = padded_head_dim(options.head_dim);
  int64_t rows = unit.positions * (options.num_q_heads / options.num_kv_heads);
  if (unit.split_keys) rows *= unit.splits();
  return {unit.capacity() * options.head_dim, unit.capacity() * padded, rows * padded,
          round_up(rows, 16), round_up(rows, 16)};
}

std::vector<AttentionUnit> attention_units(const PagedAttentionOptions& options,
                                           const std::vector<int32_t>& seq_lens,
                                           const std::vector<int32_t>& cu_seqlens_q) {
  const int64_t group = options.num_q_heads / options.num_kv_heads;
  const int64_t step = std::max<int64_t>(1, kUnitRows / group);
  std::vector<AttentionUnit> units, split;
  for (size_t n = 0; n < seq_lens.size(); n++) {
    const int64_t queries = cu_seqlens_q[n + 1] - cu_seqlens_q[n], shift = seq_lens[n] - queries;
    const bool few_rows = queries * group <= kSplitRows;
    for (int64_t position = 0; position < queries; position += step) {
      AttentionUnit unit{static_cast<int>(n), 0, position, std::min(step, queries - position), 0,
                         seq_lens[n],         0};
      if (options.causal) {
        unit.key_end = std::min<int64_t>(seq_lens[n], position + unit.positions + shift);
      }
      if (options.window) {
        unit.key_begin = std::max<int64_t>(0, position + shift - options.window + 1);
        unit.key_begin = unit.key_begin / kPageBlock * kPageBlock;
      }
      if (few_rows) {
        unit.split_keys = kSplitKeys;
        while (unit.splits() > 1 &&
               unit_floats(options, unit).total() * int64_t(sizeof(float)) > kSplitBytes) {
          unit.split_keys *= 2;
        }
      }
      for (unit.kv_head = 0; unit.kv_head < options.num_kv_heads; unit.kv_head++) {
        (few_rows ? split : units).push_back(unit);
      }
    }
  }
  units.insert(units.end(), split.begin(), split.end());
  return units;
}

size_t wave_end(const PagedAttentionOptions& options, const std::vector<AttentionUnit>& units,
                size_t begin, int64_t* bytes) {
  size_t end = begin;
  *bytes = 0;
  for (; end < units.size() && (units[end].split_keys != 0) == (units[begin].split_keys != 0);
       end++) {
    const int64_t more = unit_floats(options, units[end]).total() * int64_t(sizeof(float));
    if (end > begin && *bytes + more > kWaveBytes) break;
    *bytes += more;
  }
  return end;
}

std::pair<std::string, std::string> explain_paged_attention(
    const PagedAttentionOptions& options, const std::vector<int32_t>& seq_lens,
    const std::vector<int32_t>& cu_seqlens_q) {
  const int group = options.num_q_heads / options.num_kv_heads;
  int64_t packed = 0, packed_rows = 0, split = 0, split_rows = 0, tasks = 0;
  for (const auto& unit : attention_units(options, seq_lens, cu_seqlens_q)) {
    const int64_t rows = unit.positions * group;
    if (unit.split_keys) {
      split++;
      split_rows = std::max(split_rows, rows);
      tasks += unit.splits();
    } else {
      packed++;
      packed_rows = std::max(packed_rows, rows);
    }
  }
  std::ostringstream kernel, reason;
  if (packed) {
    kernel << "paged_attention_segments";
    reason << packed << " groups of up to " << packed_rows << " rows (queries x " << group
           << " q heads of a KV head), more than " << kSplitRows
           << ": keys are decoded once per segment of " << kSegmentKeys;
  }
  if (split) {
    kernel << (packed ? " + " : "") << "paged_attention_split_keys";
    reason << (packed ? "; " : "") << split << " groups of up to " << split_rows
           << " rows, at most " << kSplitRows << ": keys are read from the pages by " << tasks
           << " tasks";
  }
  if (!packed && !split) return {"none", "there are no queries"};
  return {kernel.str(), reason.str()};
}

}  // namespace chunkdelta
