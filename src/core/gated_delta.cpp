// Who computes what: sequences x key heads over the workers, chunk after chunk.
#include "core/gated_delta.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>

#include "core/compute.h"
#include "core/gated_delta_kernel.h"

namespace chunkdelta {
namespace {

constexpr int SLICE = GATED_DELTA_SLICE;

// Sequences up to this length walk step by step: the chunk form has to turn the state around twice.
// Microseconds on one core (Zen 4, AVX-512; Hk 16, Hv 32, float32), steps against chunks:
//   T          2         3         4         6         8        16
//   D 128  185/304   260/310   316/322   459/480   768/448  1739/1250
//   D 64    68/102    95/107   114/108   170/136   203/144   378/302
constexpr int64_t MAX_STEPS = 4;

// Workspace for chunks prepared ahead when several workers share a head, and chunks at most.
constexpr int64_t MAX_PREPARED_FLOATS = (24 << 20) / sizeof(float);
constexpr int64_t MAX_AHEAD = 16;

// One key head of one sequence: its chunks follow each other, units are independent.
struct Unit {
  const StateSequence* sequence;
  int64_t key_head;
};

class Call {
 public:
  Call(Compute& compute, const GatedDeltaOptions& options, const GatedDeltaArrays& arrays)
      : compute_(compute), options_(options), arrays_(arrays) {
    group_ = options.value_heads / options.key_heads;
    slices_ = (options.value_dim + SLICE - 1) / SLICE;
    ld_ = (options.key_dim + 15) / 16 * 16 + 16;  // rows of 2^n bytes would share cache sets
    C_ = options.chunk_size;
    chunk_floats_ = 2 * C_ * ld_ + 2 * C_ * C_;
    head_floats_ = 2 * C_ * C_ + 5 * C_ + 16;
    slice_floats_ = options.key_dim * SLICE;
    const int64_t transposed = options.key_dim * GATED_DELTA_TRANSPOSED_LD;
    scratch_floats_ = std::max<int64_t>(transposed, C_ * SLICE);
  }

  void run(const std::vector<StateSequence>& sequences) {
    const auto [short_ones, units] = split(sequences);
    run_steps(short_ones);
    if (balanced(units)) {
      compute_.parallel_for(units.size(),
                            [&](int64_t i, int worker) { run_unit(units[i], worker); });
    } else {
      run_together(units);
    }
  }

  // What run takes of the workspace.
  GatedDeltaWorkspace workspace(const std::vector<StateSequence>& sequences) const {
    const auto [short_ones, units] = split(sequences);
    size_t shared = 0, worker = short_ones.empty() ? 0 : steps_bytes();
    if (!units.empty() && balanced(units)) {
      worker = std::max<size_t>(worker, unit_floats() * sizeof(float));
    } else if (!units.empty()) {
      const int64_t n = std::min<int64_t>(units_together(), units.size());
      shared = group_floats(n) * sizeof(float);
      worker = std::max<size_t>(worker, scratch_floats_ * sizeof(float));
    }
    return {static_cast<int64_t>(shared), static_cast<int64_t>(worker)};
  }

  GatedDeltaChoice choice(const std::vector<StateSequence>& sequences) const {
    const auto [short_ones, units] = split(sequences);
    const std::string threads = std::to_string(num_threads()) + " threads over ";
    GatedDeltaChoice choice;
    const auto add = [](std::string& text, const std::string& more, const char* between) {
      text += (text.empty() ? "" : between) + more;
    };
    if (!short_ones.empty()) {
      add(choice.kernels, "gated_delta_steps", " + ");
      add(choice.why,
          std::to_string(short_ones.size()) + " sequences of at most " + std::to_string(MAX_STEPS) +
              " rows step by step, " + threads +
              "value heads: the chunk form would turn their states around twice",
          "; ");
    }
    if (!units.empty()) {
      add(choice.kernels, "gated_delta_chunk", " + ");
      add(choice.why,
          "chunks of " + std::to_string(C_) + " rows as dense products, " + threads +
              (balanced(units)
                   ? std::to_string(units.size()) + " key heads, whole"
                   : "prepared chunks, then over value heads and slices of " +
                         std::to_string(SLICE) + " value columns: whole key heads would be uneven"),
          "; ");
    }
    if (choice.kernels.empty()) return {"none", "no sequences"};
    return choice;
  }

 private:
  struct Split {
    std::vector<const StateSequence*> short_ones;  // step by step
    std::vector<Unit> units;                       // in chunks, longest first
  };
  Split split(const std::vector<StateSequence>& sequences) const {
    Split result;
    for (const auto& sequence : sequences) {
      if (sequence.length <= MAX_STEPS && checkpoints(sequence.length) == 0) {
        result.short_ones.push_back(&sequence);
        continue;
      }
      for (int64_t h = 0; h < options_.key_heads; h++) result.units.push_back({&sequence, h});
    }
    std::stable_sort(result.units.begin(), result.units.end(), [](const Unit& a, const Unit& b) {
      return a.sequence->length > b.sequence->length;
    });
    return result;
  }

  size_t steps_bytes() const { return MAX_STEPS * (2 * options_.key_dim + 5) * sizeof(float); }
  int64_t unit_floats() const {
    return group_ * slices_ * slice_floats_ + chunk_floats_ + head_floats_ + scratch_floats_;
  }
  int64_t prepared_floats() const { return chunk_floats_ + group_ * head_floats_; }
  // Units that run_group takes at a time, and the chunks of each that it prepares ahead.
  int64_t units_together() const {
    const int64_t per_unit = group_ * slices_ * slice_floats_ + prepared_floats();
    return std::clamp<int64_t>(MAX_PREPARED_FLOATS / per_unit, 1, num_threads());
  }
  int64_t chunks_ahead(int64_t units) const {
    const int64_t state_floats = units * group_ * slices_ * slice_floats_;
    return std::clamp<int64_t>((MAX_PREPARED_FLOATS - state_floats) / (units * prepared_floats()),
                               1, MAX_AHEAD);
  }
  int64_t group_floats(int64_t units) const {
    return units * (group_ * slices_ * slice_floats_ + chunks_ahead(units) * prepared_floats());
  }

  int64_t checkpoints(int64_t length) const {
    return options_.checkpoint_every ? length / options_.checkpoint_every : 0;
  }

  // Where the chunk that starts at row t ends: chunks are cut at checkpoints.
  int64_t chunk_end(const Unit& unit, int64_t t) const {
    int64_t end = std::min<int64_t>(t + C_, unit.sequence->length);
    if (const int64_t every = options_.checkpoint_every) {
      end = std::min(end, (t / every + 1) * every);
    }
    return end;
  }

  HeadRows rows(const Rows& a, size_t itemsize, const StateSequence& sequence, int64_t t,
                int64_t head, int64_t column = 0) const {
    const int64_t row = sequence.row + t, T = std::max<int64_t>(1, arrays_.rows_per_batch);
    const int64_t at = row / T * a.batch + row % T * a.token + head * a.head + column * a.element;
    return {static_cast<const char*>(a.data) + at * static_cast<int64_t>(itemsize), a.token,
            a.element};
  }
  HeadRows activations(const Rows& a, const StateSequence& sequence, int64_t t, int64_t head,
                       int64_t column = 0) const {
    return rows(a, size_of(options_.dtype), sequence, t, head, column);
  }
  HeadRows g(const StateSequence& sequence, int64_t t, int64_t head) const {
    return rows(arrays_.g, sizeof(float), sequence, t, head);
  }
  HeadRows beta(const StateSequence& sequence, int64_t t, int64_t head) const {
    return rows(arrays_.beta, size_of(options_.beta_dtype), sequence, t, head);
  }
  int64_t o_row() const { return options_.value_heads * options_.value_dim; }
  void* o(const StateSequence& sequence, int64_t t, int64_t head, int64_t column) const {
    const int64_t at = (sequence.row + t) * o_row() + head * options_.value_dim + column;
    return static_cast<char*>(arrays_.o) + at * size_of(options_.dtype);
  }
  // Row `column` of the [Dv, Dk] state of a value head.
  int64_t state_at(int64_t index, int64_t head, int64_t column) const {
    return ((index * options_.value_heads + head) * options_.value_dim + column) * options_.key_dim;
  }
  int columns(int64_t slice) const {
    return static_cast<int>(std::min<int64_t>(SLICE, options_.value_dim - slice * SLICE));
  }
  // Which of `n` rows count; null when all do.
  const bool* counts(const StateSequence& sequence, int64_t t, int64_t n, bool* buffer) const {
    if (!arrays_.mask.data) return nullptr;
    const HeadRows mask = rows(arrays_.mask, 1, sequence, t, 0);
    bool all = true;
    for (int64_t i = 0; i < n; i++) {
      buffer[i] = static_cast<const uint8_t*>(mask.data)[i * mask.row] != 0;
      all = all && buffer[i];
    }
    return all ? nullptr : buffer;
  }

  struct Prepared {  // views of a block of chunk_floats_
    KeyChunk chunk;
    bool mask[GATED_DELTA_MAX_CHUNK];
  };

  Prepared* view(float* floats, Prepared* prepared, const Unit& unit, int64_t t) const {
    const int rows = static_cast<int>(chunk_end(unit, t) - t);
    float* q = floats + C_ * ld_;
    float* kk = q + C_ * ld_;
    prepared->chunk = {rows,
                       (rows + 3) / 4 * 4,
                       static_cast<int>(ld_),
                       floats,
                       q,
                       kk,
                       kk + C_ * C_,
                       counts(*unit.sequence, t, rows, prepared->mask)};
    return prepared;
  }
  HeadChunk head_view(float* floats) const {
    float* gates = floats + 2 * C_ * C_;
    return {floats,         floats + C_ * C_, gates,          gates + C_,
            gates + 2 * C_, gates + 3 * C_,   gates + 4 * C_, gates + 5 * C_};
  }

  void prepare_chunk(const Unit& unit, int64_t t, const KeyChunk& chunk, float* scratch) {
    CHUNKDELTA_DISPATCH(gated_delta_chunk, options_,
                        activations(arrays_.k, *unit.sequence, t, unit.key_head),
                        activations(arrays_.q, *unit.sequence, t, unit.key_head), chunk, scratch);
  }
  void prepare_head(const Unit& unit, int64_t t, int64_t head, const KeyChunk& chunk,
                    const HeadChunk& gates) {
    CHUNKDELTA_DISPATCH(gated_delta_head, options_, g(*unit.sequence, t, head),
                        beta(*unit.sequence, t, head), chunk, gates);
  }
  void advance(const Unit& unit, int64_t t, int64_t head, int64_t slice, const KeyChunk& chunk,
               const HeadChunk& gates, float* state, float* scratch) {
    const int64_t column = slice * SLICE;
    const auto v = activations(arrays_.v, *unit.sequence, t, head, column);
    CHUNKDELTA_DISPATCH(gated_delta_advance, options_, v, o(*unit.sequence, t, head, column),
                        o_row(), columns(slice), chunk, gates, state, scratch);
    const int64_t end = t + chunk.rows;
    if (options_.checkpoint_every && end % options_.checkpoint_every == 0) {
      const int64_t index = unit.sequence->checkpoint + end / options_.checkpoint_every - 1;
      store(head, slice, state, arrays_.checkpoints, index);
    }
  }
  void load(const Unit& unit, int64_t head, int64_t slice, float* state) {
    const int64_t index = unit.sequence->state_in;
    const float* from =
        index < 0 ? nullptr : arrays_.states_in + state_at(index, head, slice * SLICE);
    CHUNKDELTA_DISPATCH(gated_delta_load_slice, options_.key_dim, columns(slice), from, state);
  }
  void store(int64_t head, int64_t slice, const float* state, float* states, int64_t index) {
    CHUNKDELTA_DISPATCH(gated_delta_store_slice, options_.key_dim, columns(slice), state,
                        states + state_at(index, head, slice * SLICE));
  }

  void run_steps(const std::vector<const StateSequence*>& sequences) {
    constexpr int64_t ROWS = 64;  // state rows of a task
    const int64_t blocks = (options_.value_dim + ROWS - 1) / ROWS;
    const int64_t per_sequence = options_.value_heads * blocks;
    const size_t scratch_bytes = steps_bytes();
    const auto task = [&](int64_t i, int worker) {
      const StateSequence& s = *sequences[i / per_sequence];
      const int64_t head = i % per_sequence / blocks, row = i % blocks * ROWS;
      bool mask[MAX_STEPS];
      const float* from =
          s.state_in < 0 ? nullptr : arrays_.states_in + state_at(s.state_in, head, row);
      CHUNKDELTA_DISPATCH(
          gated_delta_steps, options_, s.length, activations(arrays_.q, s, 0, head / group_),
          activations(arrays_.k, s, 0, head / group_), activations(arrays_.v, s, 0, head, row),
          g(s, 0, head), beta(s, 0, head), counts(s, 0, s.length, mask), o(s, 0, head, row),
          o_row(), static_cast<int>(std::min(ROWS, options_.value_dim - row)), from,
          arrays_.states_out + state_at(s.state_out, head, row),
          static_cast<float*>(compute_.worker_workspace(worker, scratch_bytes)));
    };
    compute_.parallel_for(static_cast<int64_t>(sequences.size()) * per_sequence, task);
  }

  // Whether handing out whole units (longest first) keeps the workers busy.
  bool balanced(const std::vector<Unit>& units) const {
    std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> loads;
    for (int i = 0; i < num_threads(); i++) loads.push(0);
    int64_t total = 0, longest = 0;
    for (const Unit& unit : units) {
      const int64_t load = loads.top() + unit.sequence->length;
      loads.pop();
      loads.push(load);
      total += unit.sequence->length;
      longest = std::max(longest, load);
    }
    return longest * num_threads() <= total + total / 8;
  }

  // All of a unit by one worker: everything it touches stays in its cache.
  void run_unit(const Unit& unit, int worker) {
    const int64_t state_floats = group_ * slices_ * slice_floats_;
    auto* states =
        static_cast<float*>(compute_.worker_workspace(worker, unit_floats() * sizeof(float)));
    float* chunk_block = states + state_floats;
    const HeadChunk gates = head_view(chunk_block + chunk_floats_);
    float* scratch = chunk_block + chunk_floats_ + head_floats_;
    const int64_t first = unit.key_head * group_;
    const auto state = [&](int64_t h, int64_t slice) {
      return states + (h * slices_ + slice) * slice_floats_;
    };
    for (int64_t h = 0; h < group_; h++) {
      for (int64_t s = 0; s < slices_; s++) load(unit, first + h, s, state(h, s));
    }
    for (int64_t t = 0; t < unit.sequence->length; t = chunk_end(unit, t)) {
      Prepared prepared;
      const KeyChunk& chunk = view(chunk_block, &prepared, unit, t)->chunk;
      prepare_chunk(unit, t, chunk, scratch);
      for (int64_t h = 0; h < group_; h++) {
        prepare_head(unit, t, first + h, chunk, gates);
        for (int64_t s = 0; s < slices_; s++) {
          advance(unit, t, first + h, s, chunk, gates, state(h, s), scratch);
        }
      }
    }
    for (int64_t h = 0; h < group_; h++) {
      for (int64_t s = 0; s < slices_; s++) {
        store(first + h, s, state(h, s), arrays_.states_out, unit.sequence->state_out);
      }
    }
  }

  // Fewer units than workers, or of uneven length: chunks are prepared ahead in parallel, then the
  // value heads' slices advance in parallel over what was prepared. Same kernels on the same chunks
  // as run_unit, so the same bits.
  void run_together(const std::vector<Unit>& units) {
    const int64_t together = units_together();
    for (size_t i = 0; i < units.size(); i += together) {
      const int64_t n = std::min<int64_t>(together, units.size() - i);
      run_group(std::vector<Unit>(units.begin() + i, units.begin() + i + n));
    }
  }

  void run_group(const std::vector<Unit>& units) {
    const int64_t n = units.size(), per_head = slices_, per_unit = group_ * slices_;
    const int64_t state_floats = n * per_unit * slice_floats_;
    const int64_t prepared_floats = this->prepared_floats();
    const int64_t ahead = chunks_ahead(n);
    const size_t bytes = group_floats(n) * sizeof(float);
    auto* states = static_cast<float*>(compute_.shared_workspace(bytes));
    float* blocks = states + state_floats;
    const auto scratch = [&](int worker) {
      const size_t scratch_bytes = scratch_floats_ * sizeof(float);
      return static_cast<float*>(compute_.worker_workspace(worker, scratch_bytes));
    };
    const auto unit_state = [&](int64_t i) { return states + i * slice_floats_; };
    const auto each_slice = [&](const auto& fn) {
      compute_.parallel_for(n * per_unit, [&](int64_t i, int worker) {
        const Unit& unit = units[i / per_unit];
        const int64_t h = i % per_unit / per_head;
        fn(i, unit, h, unit.key_head * group_ + h, i % per_head, worker);
      });
    };

    each_slice([&](int64_t i, const Unit& unit, int64_t, int64_t head, int64_t slice, int) {
      load(unit, head, slice, unit_state(i));
    });
    std::vector<int64_t> starts(n * ahead);  // first row of each prepared chunk, -1: none
    std::vector<Prepared> prepared(n * ahead);
    std::vector<int64_t> next(n, 0);
    while (true) {
      bool any = false;
      for (int64_t u = 0; u < n; u++) {
        for (int64_t a = 0; a < ahead; a++) {
          const bool more = next[u] < units[u].sequence->length;
          starts[u * ahead + a] = more ? next[u] : -1;
          if (more) next[u] = chunk_end(units[u], next[u]);
          any = any || more;
        }
      }
      if (!any) break;
      compute_.parallel_for(n * ahead, [&](int64_t i, int worker) {
        if (starts[i] < 0) return;
        const Unit& unit = units[i / ahead];
        float* block = blocks + i * prepared_floats;
        const auto& chunk = view(block, &prepared[i], unit, starts[i])->chunk;
        prepare_chunk(unit, starts[i], chunk, scratch(worker));
        for (int64_t h = 0; h < group_; h++) {
          prepare_head(unit, starts[i], unit.key_head * group_ + h, chunk,
                       head_view(block + chunk_floats_ + h * head_floats_));
        }
      });
      each_slice(
          [&](int64_t i, const Unit& unit, int64_t h, int64_t head, int64_t slice, int worker) {
            for (int64_t a = 0; a < ahead; a++) {
              const int64_t c = i / per_unit * ahead + a;
              if (starts[c] < 0) break;
              float* block = blocks + c * prepared_floats + chunk_floats_;
              advance(unit, starts[c], head, slice, prepared[c].chunk,
                      head_view(block + h * head_floats_), unit_state(i), scratch(worker));
            }
          });
    }
    each_slice([&](int64_t i, const Unit& unit, int64_t, int64_t head, int64_t slice, int) {
      store(head, slice, unit_state(i), arrays_.states_out, unit.sequence->state_out);
    });
  }

  Compute& compute_;
  const GatedDeltaOptions& options_;
  const GatedDeltaArrays& arrays_;
  int64_t group_, slices_, ld_, C_;  // value heads of a key head, value slices, row stride, rows
  int64_t chunk_floats_, head_floats_, slice_floats_, scratch_floats_;
};

}  // namespace

void gated_delta(const GatedDeltaOptions& options, const GatedDeltaArrays& arrays,
                 const std::vector<StateSequence>& sequences) {
  Compute compute;
  Call(compute, options, arrays).run(sequences);
}

GatedDeltaWorkspace gated_delta_workspace(const GatedDeltaOptions& options,
                                          const std::vector<StateSequence>& sequences) {
  Compute compute;
  const GatedDeltaArrays none{};
  return Call(compute, options, none).workspace(sequences);
}

GatedDeltaChoice gated_delta_choice(const GatedDeltaOptions& options,
                                    const std::vector<StateSequence>& sequences) {
  Compute compute;
  const GatedDeltaArrays none{};
  return Call(compute, options, none).choice(sequences);
}

void gated_delta_gates(const GatedDeltaGates& options, const void* a, const void* b,
                       const float* a_log, const float* dt_bias, float* g, float* beta) {
  std::vector<float> rate(options.heads);
  for (int64_t h = 0; h < options.heads; h++) rate[h] = std::exp(a_log[h]);
  constexpr int64_t VALUES = 16384;  // of a task
  const int64_t rows = std::max<int64_t>(1, VALUES / std::max<int64_t>(1, options.heads));
  Compute compute;
  compute.parallel_for((options.rows + rows - 1) / rows, [&](int64_t task, int) {
    const int64_t first = task * rows, at = first * options.heads;
    const int64_t bytes = at * size_of(options.dtype);
    CHUNKDELTA_DISPATCH(gated_delta_gates_rows, options, std::min(rows, options.rows - first),
                        static_cast<const char*>(a) + bytes, static_cast<const char*>(b) + bytes,
                        rate.data(), dt_bias, g + at, beta + at);
  });
}

}  // namespace chunkdelta
