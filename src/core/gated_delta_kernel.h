// What the driver (gated_delta.cpp) and the kernels (gated_delta_kernel.cpp, one build per
// instruction set) share.
#pragma once

#include "core/gated_delta.h"
#include "core/isa.h"

namespace chunkdelta {

constexpr int GATED_DELTA_MAX_CHUNK = 64;
// Value columns of a state slice: [Dk, 32] floats, 16 KB at Dk = 128, stay in a 32 KB L1 cache.
constexpr int GATED_DELTA_SLICE = 32;

// A vector of rows from one head of one sequence: row t at data + t * row elements.
struct HeadRows {
  const void* data;
  int64_t row, element;
};

// A chunk of one key head, made ready once for all its value heads and their slices.
struct KeyChunk {
  int rows;            // at most C
  int padded;          // rows up to a multiple of 4: identity steps
  int ld;              // row stride of k and q
  float* k;            // [padded, ld], normalised when asked
  float* q;            // [padded, ld], times scale
  float* kk;           // [padded, C] K K^T, lower triangle
  float* qk;           // [padded, C] Q K^T, lower triangle
  const bool* counts;  // [rows] false: identity step; null: all count
};

// The same chunk as one of its value heads sees it.
struct HeadChunk {
  float* l;  // [padded, C] beta_i Gam_ij (K K^T)_ij below the diagonal
  float* p;  // [padded, C] Gam_ij (Q K^T)_ij up to the diagonal
  // exp of log gates as sums of two floats, value and rest. A gate that hardly changes rounds the
  // same way in every chunk: with one float the state drifts, at beta = 2 by 5e-4 in 20,000 rows.
  float *gamma, *gamma_rest;  // [C] exp(G_i)
  float *decay, *decay_rest;  // [C] exp(G_last - G_i)
  float* beta;                // [C]
  float* last;                // [2] exp(G_last)
};

// Row stride of K^T, padded against cache conflicts.
constexpr int GATED_DELTA_TRANSPOSED_LD = GATED_DELTA_MAX_CHUNK + 16;

// Loads k and q of `chunk` and computes its Gram matrices. transposed: scratch for K^T, [Dk,
// GATED_DELTA_TRANSPOSED_LD].
CHUNKDELTA_DECLARE_KERNEL(void gated_delta_chunk(const GatedDeltaOptions& options, HeadRows k,
                                                 HeadRows q, const KeyChunk& chunk,
                                                 float* transposed))

// Gates: fills `head` from the chunk's g and beta.
CHUNKDELTA_DECLARE_KERNEL(void gated_delta_head(const GatedDeltaOptions& options, HeadRows g,
                                                HeadRows beta, const KeyChunk& chunk,
                                                const HeadChunk& head))

// Advances the state slice [Dk, GATED_DELTA_SLICE] of value columns [0, columns) over the chunk.
// v is at the slice's first column; o, dense with rows of o_row elements, too. vd: scratch
// [C, GATED_DELTA_SLICE].
CHUNKDELTA_DECLARE_KERNEL(void gated_delta_advance(const GatedDeltaOptions& options, HeadRows v,
                                                   void* o, int64_t o_row, int columns,
                                                   const KeyChunk& chunk, const HeadChunk& head,
                                                   float* state, float* vd))

// Rows [0, columns) of a [Dv, Dk] state <-> a slice [Dk, GATED_DELTA_SLICE]. from null: zeros.
CHUNKDELTA_DECLARE_KERNEL(void gated_delta_load_slice(int64_t key_dim, int columns,
                                                      const float* from, float* slice))
CHUNKDELTA_DECLARE_KERNEL(void gated_delta_store_slice(int64_t key_dim, int columns,
                                                       const float* slice, float* to))

// Walks `length` rows step by step for value rows [0, rows) of a [Dv, Dk] state in place of the
// chunk form: state_in (null: zeros) -> state_out, which may be the same. scratch: length * (2 Dk +
// 5) floats.
CHUNKDELTA_DECLARE_KERNEL(void gated_delta_steps(const GatedDeltaOptions& options, int64_t length,
                                                 HeadRows q, HeadRows k, HeadRows v, HeadRows g,
                                                 HeadRows beta, const bool* counts, void* o,
                                                 int64_t o_row, int rows, const float* state_in,
                                                 float* state_out, float* scratch))

CHUNKDELTA_DECLARE_KERNEL(void gated_delta_gates_rows(const GatedDeltaGates& options, int64_t rows,
                                                      const void* a, const void* b,
                                                      const float* rate, const float* dt_bias,
                                                      float* g, float* beta))

}  // namespace chunkdelta
