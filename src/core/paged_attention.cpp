#include "core/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/compute.h"
#include "core/page_codec_kernel.h"
#include "core/paged_attention_kernel.h"
#include "core/paged_attention_schedule.h"

namespace chunkdelta {
namespace {

constexpr int64_t kPackKeys = 128;  // of one task
constexpr int64_t kWorkerBytes = kTileScratchFloats * sizeof(float);
constexpr double kLog2E = 1.4426950408889634;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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
        group_(options.num_q_heads / options.num_kv_heads),
        padded_(padded_head_dim(options.head_dim)) {}

  void run() {
    const auto units = attention_units(options_, metadata_.seq_lens, metadata_.cu_seqlens_q);
    if (units.empty()) return;
    for (int worker = 0; worker < num_threads(); worker++) {
      scratch_.push_back(static_cast<float*>(compute_.worker_workspace(worker, kWorkerBytes)));
    }
    for (size_t begin = 0; begin < units.size();) {
      int64_t bytes = 0;
      const size_t end = wave_end(options_, units, begin, &bytes);
      std::vector<Active> wave =
          activate(units, begin, end, static_cast<float*>(compute_.shared_workspace(bytes)));
      if (units[begin].split_keys) {
        split_keys(wave);
      } else {
        segment_loop(wave);
      }
      begin = end;
    }
  }

 private:
  struct Active {
    const AttentionUnit* unit;
    float *packed_keys, *packed_values, *o, *m, *l;
    // The keys at hand: of a segment, or all of the unit's.
    SegmentKeys keys;
    std::vector<const void*> k_blocks, v_blocks;
  };
  struct Task {
    Active* active;
    int64_t begin;
  };

  int64_t rows_of(const AttentionUnit& unit) const { return unit.positions * group_; }

  std::vector<Active> activate(const std::vector<AttentionUnit>& units, size_t begin, size_t end,
                               float* workspace) {
    std::vector<Active> wave(end - begin);
    for (size_t i = begin; i < end; i++) {
      const UnitFloats floats = unit_floats(options_, units[i]);
      Active& a = wave[i - begin];
      a.unit = &units[i];
      a.packed_keys = workspace;
      a.packed_values = a.packed_keys + floats.keys;
      a.o = a.packed_values + floats.values;
      a.m = a.o + floats.o;
      a.l = a.m + floats.m;
      workspace = a.l + floats.l;
    }
    return wave;
  }

  // Many rows: each segment is decoded once into panels, then all row tiles go over it.
  void segment_loop(std::vector<Active>& wave) {
    int64_t segments = 1;
    for (const Active& a : wave) {
      segments = std::max(segments, (a.unit->keys() + kSegmentKeys - 1) / kSegmentKeys);
    }
    for (int64_t segment = 0; segment < segments; segment++) {
      std::vector<Task> packs, tiles;
      for (Active& a : wave) {
        const int64_t begin = a.unit->key_begin + segment * kSegmentKeys;
        const int64_t count = std::clamp<int64_t>(a.unit->key_end - begin, 0, kSegmentKeys);
        if (segment > 0 && count == 0) continue;
        locate(a, begin, count);
        for (int64_t key = 0; key < count; key += kPackKeys) packs.push_back({&a, key});
        for (int64_t row = 0; row < rows_of(*a.unit); row += kTileRows) tiles.push_back({&a, row});
      }
      compute_.parallel_for(static_cast<int64_t>(packs.size()), [&](int64_t task, int) {
        const SegmentKeys& keys = packs[task].active->keys;
        const int begin = static_cast<int>(packs[task].begin);
        const int end = static_cast<int>(std::min<int64_t>(keys.count, begin + kPackKeys));
        CHUNKDELTA_DISPATCH(pack_segment, keys, begin, end);
      });
      compute_.parallel_for(static_cast<int64_t>(tiles.size()), [&](int64_t task, int worker) {
        const Active& a = *tiles[task].active;
        const RowTile tile = row_tile(a, tiles[task].begin, 0, scratch_[worker]);
        if (segment == 0) start(a, tile, true);
        if (a.keys.count > 0) CHUNKDELTA_DISPATCH(attend_packed, tile, a.keys);
        if (a.keys.begin + a.keys.count >= a.unit->key_end) finish(a, tile);
      });
    }
  }

  // Few rows (decode): tasks take keys each, straight from the pages, and are merged in order.
  void split_keys(std::vector<Active>& wave) {
    std::vector<Task> tasks;
    for (Active& a : wave) {
      locate(a, a.unit->key_begin, a.unit->keys());
      for (int64_t split = 0; split < a.unit->splits(); split++) tasks.push_back({&a, split});
    }
    compute_.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t task, int worker) {
      const Active& a = *tasks[task].active;
      const int64_t split = tasks[task].begin;
      const RowTile tile = row_tile(a, 0, split, scratch_[worker]);
      start(a, tile, split == 0);
      SegmentKeys keys = a.keys;
      const int64_t begin = split * a.unit->split_keys;
      keys.begin += begin;
      keys.count = static_cast<int>(std::min(a.unit->keys() - begin, a.unit->split_keys));
      keys.k_blocks += begin / kPageBlock;
      keys.v_blocks += begin / kPageBlock;
      if (keys.count > 0) CHUNKDELTA_DISPATCH(attend_pages, tile, keys);
    });
    compute_.parallel_for(static_cast<int64_t>(wave.size()), [&](int64_t task, int worker) {
      const Active& a = wave[task];
      const RowTile tile = row_tile(a, 0, 0, scratch_[worker]);
      if (a.unit->splits() > 1) CHUNKDELTA_DISPATCH(merge_splits, tile, a.unit->splits());
      finish(a, tile);
    });
  }

  // The memory of each 16-key block. Page ids are valid (metadata), and clamped all the same:
  // whatever the table says, no read leaves the pool.
  void locate(Active& a, int64_t begin, int64_t count) {
    const int page_size = options_.page_size;
    const int64_t k_row = page_row_bytes(options_.k_format, options_.head_dim);
    const int64_t v_row = page_row_bytes(options_.v_format, options_.head_dim);
    const int32_t* table =
        metadata_.block_table.data() + int64_t(a.unit->sequence) * metadata_.max_pages;
    a.k_blocks.clear();
    a.v_blocks.clear();
    size_t slab = 0;
    for (int64_t key = begin; key < begin + count; key += kPageBlock) {
      const int64_t entry = std::min<int64_t>(key / page_size, metadata_.max_pages - 1);
      const int64_t page = std::clamp<int64_t>(table[entry], 0, pages_.first_page.back() - 1);
      while (page < pages_.first_page[slab]) slab--;
      while (page >= pages_.first_page[slab + 1]) slab++;
      const int64_t head =
          (page - pages_.first_page[slab]) * options_.num_kv_heads + a.unit->kv_head;
      const int64_t row = head * page_size + key % page_size;
      a.k_blocks.push_back(static_cast<const char*>(pages_.k[slab]) + row * k_row);
      a.v_blocks.push_back(static_cast<const char*>(pages_.v[slab]) + row * v_row);
    }
    a.keys = {options_.k_format,       options_.v_format,
              options_.head_dim,       begin,
              static_cast<int>(count), a.k_blocks.data(),
              a.v_blocks.data(),       a.packed_keys,
              a.packed_values,         static_cast<int>(a.unit->capacity())};
  }

  // Element (token, q head) of q, o and lse where the unit's sequence and KV head begin.
  int64_t origin(const AttentionUnit& unit) const {
    return int64_t(metadata_.cu_seqlens_q[unit.sequence]) * options_.num_q_heads +
           int64_t(unit.kv_head) * group_;
  }

  RowTile row_tile(const Active& a, int64_t row, int64_t split, float* scratch) const {
    const AttentionUnit& unit = *a.unit;
    const int32_t* offsets = metadata_.cu_seqlens_q.data() + unit.sequence;
    const bool capped = options_.softcap != 0;
    RowTile t;
    t.dtype = options_.dtype;
    t.num_q_heads = options_.num_q_heads;
    t.group = static_cast<int>(group_);
    t.head_dim = options_.head_dim;
    t.q = q_ + origin(unit) * options_.head_dim * size_of(options_.dtype);
    t.row_begin = unit.position * group_ + row;
    t.rows = static_cast<int>(std::min<int64_t>(kTileRows, rows_of(unit) - row));
    t.shift = int64_t(metadata_.seq_lens[unit.sequence]) - (offsets[1] - offsets[0]);
    t.causal = options_.causal;
    t.window = options_.window;
    t.q_scale = static_cast<float>(capped ? double(options_.scale) / options_.softcap
                                          : options_.scale * kLog2E);
    t.softcap = static_cast<float>(options_.softcap * kLog2E);
    const int64_t at = split * rows_of(unit) + row;
    t.m = a.m + at;
    t.l = a.l + at;
    t.o = a.o + at * padded_;
    t.scratch = scratch;
    return t;
  }

  // A sink is one more key with this logit and no value; it is counted once.
  void start(const Active& a, const RowTile& t, bool with_sinks) const {
    for (int i = 0; i < t.rows; i++) {
      const int64_t head = a.unit->kv_head * group_ + (t.row_begin + i) % group_;
      t.m[i] = sinks_ && with_sinks ? static_cast<float>(sinks_[head] * kLog2E) : -kInfinity;
      t.l[i] = t.m[i] == -kInfinity ? 0.0f : 1.0f;
    }
    std::fill_n(t.o, t.rows * padded_, 0.0f);
  }

  void finish(const Active& a, const RowTile& tile) const {
    const int64_t at = origin(*a.unit);
    CHUNKDELTA_DISPATCH(finish_tile, tile, o_ + at * options_.head_dim * size_of(options_.dtype),
                        lse_ ? lse_ + at : nullptr);
  }

  const PagedAttentionOptions& options_;
  const AttentionMetadata& metadata_;
  const PageSlabs& pages_;
  const char* q_;
  const float* sinks_;
  char* o_;
  float* lse_;
  const int64_t group_, padded_;
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
  const auto units = attention_units(options, seq_lens, cu_seqlens_q);
  if (units.empty()) return 0;
  int64_t most = 0;
  for (size_t begin = 0; begin < units.size();) {
    int64_t bytes = 0;
    begin = wave_end(options, units, begin, &bytes);
    most = std::max(most, bytes);
  }
  const auto whole_pages = [](int64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  return whole_pages(most) + threads * whole_pages(kWorkerBytes);
}

}  // namespace chunkdelta
