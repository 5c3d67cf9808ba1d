#include "core/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/compute.h"
#include "core/page_codec_kernel.h"
#include "core/paged_attention_kernel.h"

namespace chunkdelta {
namespace {

constexpr int64_t kSegmentKeys = 4096;
constexpr int64_t kPackKeys = 128;  // of one task
constexpr int64_t kUnitRows = 4096;
// Units run side by side while their scratch fits: enough tasks for many cores, a flat transient.
constexpr int64_t kSharedBytes = 24 << 20;

constexpr double kLog2E = 1.4426950408889634;

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The queries [position, position + positions) of a sequence that share a KV head, and the keys
// [key_begin, key_end) that at least one of them sees.
struct Unit {
  int sequence, kv_head;
  int64_t position, positions;
  int64_t key_begin, key_end;

  int64_t keys() const { return std::max<int64_t>(0, key_end - key_begin); }
  int64_t capacity() const { return round_up(std::min(keys(), kSegmentKeys), 64); }
};

struct Floats {  // of a unit in the shared workspace
  int64_t keys, values, o, m, l;
  int64_t total() const { return keys + values + o + m + l; }
};

Floats floats_of(const PagedAttentionOptions& options, const Unit& unit) {
  const int64_t rows = unit.positions * (options.num_q_heads / options.num_kv_heads);
  const int64_t padded = padded_head_dim(options.head_dim), padded_rows = round_up(rows, 16);
  return {unit.capacity() * options.head_dim, unit.capacity() * padded, rows * padded, padded_rows,
          padded_rows};
}

std::vector<Unit> units_of(const PagedAttentionOptions& options,
                           const std::vector<int32_t>& seq_lens,
                           const std::vector<int32_t>& cu_seqlens_q) {
  const int64_t group = options.num_q_heads / options.num_kv_heads;
  const int64_t step = std::max<int64_t>(1, kUnitRows / group);
  std::vector<Unit> units;
  for (size_t n = 0; n < seq_lens.size(); n++) {
    const int64_t queries = cu_seqlens_q[n + 1] - cu_seqlens_q[n], shift = seq_lens[n] - queries;
    for (int64_t position = 0; position < queries; position += step) {
      Unit unit{static_cast<int>(n), 0, position, std::min(step, queries - position), 0,
                seq_lens[n]};
      if (options.causal) {
        unit.key_end = std::min<int64_t>(seq_lens[n], position + unit.positions + shift);
      }
      if (options.window) {
        unit.key_begin = std::max<int64_t>(0, position + shift - options.window + 1);
        unit.key_begin = unit.key_begin / kPageBlock * kPageBlock;
      }
      for (unit.kv_head = 0; unit.kv_head < options.num_kv_heads; unit.kv_head++) {
        units.push_back(unit);
      }
    }
  }
  return units;
}

// Units [begin, end of the wave) run side by side.
size_t wave_end(const PagedAttentionOptions& options, const std::vector<Unit>& units, size_t begin,
                int64_t* bytes) {
  size_t end = begin;
  *bytes = 0;
  for (; end < units.size(); end++) {
    const int64_t more = floats_of(options, units[end]).total() * sizeof(float);
    if (end > begin && *bytes + more > kSharedBytes) break;
    *bytes += more;
  }
  return end;
}

constexpr int64_t kWorkerBytes = kTileScratchFloats * sizeof(float);

class Call {
 public:
  Call(const PagedAttentionOptions& options, const AttentionMetadata& metadata,
       const PageSlabs& pages, const void* q, const float* sinks, void* o, float* lse)
      : options_(options),
        metadata_(metadata),
        pages_(pages),
        q_(static_cast<const char*>(q)),
        sinks_(sinks),
        o_(static_cast<char*>(o)),
        lse_(lse),
        group_(options.num_q_heads / options.num_kv_heads) {}

  void run() {
    const auto units = units_of(options_, metadata_.seq_lens, metadata_.cu_seqlens_q);
    for (int worker = 0; worker < num_threads(); worker++) {
      scratch_.push_back(static_cast<float*>(compute_.worker_workspace(worker, kWorkerBytes)));
    }
    for (size_t begin = 0; begin < units.size();) {
      int64_t bytes = 0;
      const size_t end = wave_end(options_, units, begin, &bytes);
      run_wave(units, begin, end, static_cast<float*>(compute_.shared_workspace(bytes)));
      begin = end;
    }
  }

 private:
  struct Active {
    const Unit* unit;
    PackedSegment packed;
    float *m, *l, *o;
    int64_t key_begin = 0;  // of the current segment
    int count = 0;
    std::vector<const void*> k_blocks, v_blocks;
  };
  struct Task {
    Active* active;
    int64_t begin;
  };

  int64_t rows_of(const Unit& unit) const { return unit.positions * group_; }

  void run_wave(const std::vector<Unit>& units, size_t begin, size_t end, float* workspace) {
    std::vector<Active> active(end - begin);
    int64_t segments = 1;
    for (size_t i = begin; i < end; i++) {
      const Unit& unit = units[i];
      const Floats floats = floats_of(options_, unit);
      Active& a = active[i - begin];
      a.unit = &unit;
      a.packed.capacity = static_cast<int>(unit.capacity());
      const auto take = [&](int64_t n) {
        float* p = workspace;
        workspace += n;
        return p;
      };
      a.packed.keys = take(floats.keys);
      a.packed.values = take(floats.values);
      a.o = take(floats.o);
      a.m = take(floats.m);
      a.l = take(floats.l);
      segments = std::max(segments, (unit.keys() + kSegmentKeys - 1) / kSegmentKeys);
    }
    for (int64_t segment = 0; segment < segments; segment++) {
      std::vector<Task> packs, tiles;
      for (Active& a : active) {
        a.key_begin = a.unit->key_begin + segment * kSegmentKeys;
        a.count =
            static_cast<int>(std::clamp<int64_t>(a.unit->key_end - a.key_begin, 0, kSegmentKeys));
        if (segment > 0 && a.count == 0) continue;
        locate(a);
        for (int64_t key = 0; key < a.count; key += kPackKeys) packs.push_back({&a, key});
        for (int64_t row = 0; row < rows_of(*a.unit); row += kTileRows) tiles.push_back({&a, row});
      }
      compute_.parallel_for(static_cast<int64_t>(packs.size()), [&](int64_t task, int) {
        const Active& a = *packs[task].active;
        const PackArguments arguments{options_.k_format, options_.v_format, options_.head_dim,
                                      a.count,           a.k_blocks.data(), a.v_blocks.data(),
                                      a.packed};
        const int first = static_cast<int>(packs[task].begin);
        CHUNKDELTA_DISPATCH(pack_segment, arguments, first,
                            static_cast<int>(std::min<int64_t>(a.count, first + kPackKeys)));
      });
      compute_.parallel_for(static_cast<int64_t>(tiles.size()), [&](int64_t task, int worker) {
        attend(*tiles[task].active, tiles[task].begin, segment == 0, scratch_[worker]);
      });
    }
  }

  // The memory of each 16-key block of the current segment. Page ids are valid (metadata), and
  // clamped all the same: whatever the table says, no read leaves the pool.
  void locate(Active& a) {
    const int page_size = options_.page_size;
    const int64_t k_row = page_row_bytes(options_.k_format, options_.head_dim);
    const int64_t v_row = page_row_bytes(options_.v_format, options_.head_dim);
    const int32_t* table =
        metadata_.block_table.data() + int64_t(a.unit->sequence) * metadata_.max_pages;
    a.k_blocks.clear();
    a.v_blocks.clear();
    size_t slab = 0;
    for (int64_t key = a.key_begin; key < a.key_begin + a.count; key += kPageBlock) {
      const int64_t entry = std::min<int64_t>(key / page_size, metadata_.max_pages - 1);
      const int64_t page = std::clamp<int64_t>(table[entry], 0, pages_.first_page.back() - 1);
      while (page < pages_.first_page[slab]) slab--;
      while (page >= pages_.first_page[slab + 1]) slab++;
      const int64_t row =
          ((page - pages_.first_page[slab]) * options_.num_kv_heads + a.unit->kv_head) * page_size +
          key % page_size;
      a.k_blocks.push_back(static_cast<const char*>(pages_.k[slab]) + row * k_row);
      a.v_blocks.push_back(static_cast<const char*>(pages_.v[slab]) + row * v_row);
    }
  }

  void attend(const Active& a, int64_t row, bool first_segment, float* scratch) {
    const Unit& unit = *a.unit;
    const int head_dim = options_.head_dim, padded = padded_head_dim(head_dim);
    // Element (token, q head) of q, o and lse where the sequence's position 0 and this KV head are.
    const int64_t origin = int64_t(metadata_.cu_seqlens_q[unit.sequence]) * options_.num_q_heads +
                           int64_t(unit.kv_head) * group_;
    const int64_t origin_bytes = origin * head_dim * size_of(options_.dtype);
    TileArguments t;
    t.dtype = options_.dtype;
    t.num_q_heads = options_.num_q_heads;
    t.group = static_cast<int>(group_);
    t.head_dim = head_dim;
    t.q = q_ + origin_bytes;
    t.row_begin = unit.position * group_ + row;
    t.rows = static_cast<int>(std::min<int64_t>(kTileRows, rows_of(unit) - row));
    t.key_begin = a.key_begin;
    t.count = a.count;
    t.shift = int64_t(metadata_.seq_lens[unit.sequence]) -
              (metadata_.cu_seqlens_q[unit.sequence + 1] - metadata_.cu_seqlens_q[unit.sequence]);
    t.causal = options_.causal;
    t.window = options_.window;
    const bool capped = options_.softcap != 0;
    t.q_scale = static_cast<float>(capped ? double(options_.scale) / options_.softcap
                                          : options_.scale * kLog2E);
    t.softcap = static_cast<float>(options_.softcap * kLog2E);
    t.segment = a.packed;
    t.m = a.m + row;
    t.l = a.l + row;
    t.o = a.o + row * padded;
    t.scratch = scratch;
    if (first_segment) {
      for (int i = 0; i < t.rows; i++) {
        // A sink is one more key with this logit and no value.
        const int64_t head = unit.kv_head * group_ + (t.row_begin + i) % group_;
        t.m[i] = sinks_ ? static_cast<float>(sinks_[head] * kLog2E)
                        : -std::numeric_limits<float>::infinity();
        t.l[i] = sinks_ && t.m[i] != -std::numeric_limits<float>::infinity() ? 1.0f : 0.0f;
      }
      std::fill_n(t.o, int64_t(t.rows) * padded, 0.0f);
    }
    if (a.count > 0) CHUNKDELTA_DISPATCH(attend_tile, t);
    if (a.key_begin + a.count >= unit.key_end) {
      CHUNKDELTA_DISPATCH(finish_tile, t, o_ + origin_bytes, lse_ ? lse_ + origin : nullptr);
    }
  }

  const PagedAttentionOptions& options_;
  const AttentionMetadata& metadata_;
  const PageSlabs& pages_;
  const char* q_;
  const float* sinks_;
  char* o_;
  float* lse_;
  const int64_t group_;
  Compute compute_;
  std::vector<float*> scratch_;
};

}  // namespace

void paged_attention(const PagedAttentionOptions& options, const AttentionMetadata& metadata,
                     const PageSlabs& pages, const void* q, const float* sinks, void* o,
                     float* lse) {
  Call(options, metadata, pages, q, sinks, o, lse).run();
}

int64_t paged_attention_workspace(const PagedAttentionOptions& options,
                                  const std::vector<int32_t>& seq_lens,
                                  const std::vector<int32_t>& cu_seqlens_q, int threads) {
  const auto units = units_of(options, seq_lens, cu_seqlens_q);
  int64_t most = 0;
  for (size_t begin = 0; begin < units.size();) {
    int64_t bytes = 0;
    begin = wave_end(options, units, begin, &bytes);
    most = std::max(most, bytes);
  }
  if (units.empty()) return 0;
  return round_up(most, 4096) + threads * round_up(kWorkerBytes, 4096);
}

}  // namespace chunkdelta
