// Arguments of the attention kernels, shared by src/core/plans/paged_attention.cpp and the shaders.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

// Function constants.
#define ATTENTION_GROUP_SIZE 300    // int: q heads per KV head
#define ATTENTION_PAGE_SIZE 301     // int: keys per page, a multiple of 16
#define ATTENTION_CAUSAL 302        // bool: bottom-right aligned
#define ATTENTION_HAS_WINDOW 303    // bool
#define ATTENTION_HAS_SOFTCAP 304   // bool
#define ATTENTION_HAS_SINKS 305     // bool: one more logit per q head, without a value
#define ATTENTION_CARRIES 306       // bool: (m, l, O) come from or go to the state buffers
#define ATTENTION_K_GATHERED 307    // bool: K from contiguous scratch instead of pages
#define ATTENTION_V_GATHERED 308    // bool
#define ATTENTION_WRITES_LSE 309    // bool
#define ATTENTION_MERGE_MAPPED 310  // bool: tokens and partials of merge_states by table
#define ATTENTION_K_FORMAT 311      // int: AttentionPageFormat, of pages that decode reads in place
#define ATTENTION_V_FORMAT 312      // int

namespace chunkdelta {

// What a page holds; kAttentionPageOwn is the queries' type.
enum AttentionPageFormat {
  kAttentionPageOwn = 0,
  kAttentionPageF32,
  kAttentionPageF16,
  kAttentionPageBF16,
  kAttentionPageQ80,
  kAttentionPageQ40,
  kAttentionPageTurbo4,
};

// Flags of a tile.
enum AttentionTileFlags {
  kAttentionTileFirst = 1,  // no keys before these: (m, l, O) start empty
  kAttentionTileLast = 2,   // no keys after these: o and lse are written
};

// A row tile of one sequence and the keys that one launch takes for it. A row is a (position, q
// head of one KV head) pair, position * group_size + head.
struct AttentionTile {
  int32_t token;      // the sequence's first row in q and o
  int32_t rows;       // rows of the whole sequence
  int32_t row;        // first row of this tile
  int32_t shift;      // keys minus queries of the sequence: position p sees keys <= p + shift
  int32_t key_begin;  // keys [key_begin, key_end), counted from the sequence's first
  int32_t key_end;
  int32_t table;  // the sequence's first entry in block_table
  int32_t
      gathered;   // scratch row of its key 0, if gathered; may be negative, the rows read are not
  int32_t state;  // flash: the tile's first row in the state buffers; decode: partial of position 0
  int32_t flags;  // AttentionTileFlags
};

struct PagedAttentionParams {
  int32_t num_kv_heads;
  int32_t num_pages;      // page numbers are clamped to the pool: no table leads a read outside it
  int32_t table_length;   // entries of block_table
  int32_t gathered_rows;  // rows of the gathered K and V per KV head
  int32_t first_tile;     // of this launch in tiles
  int32_t window;
  float scale;    // log2(e) * softmax scale, or softmax scale / softcap
  float softcap;  // log2(e) * softcap
};

// Keys that one threadgroup of the gather kernel copies; its first key is a multiple of 16.
struct GatherSpan {
  int32_t table;  // the sequence's first entry in block_table
  int32_t key;
  int32_t keys;
  int32_t row;  // scratch row of the first key
};

struct GatherPagesParams {
  int32_t head_dim;
  int32_t num_kv_heads;
  int32_t first_page;  // of the slab, which holds pages [first_page, first_page + slab_pages)
  int32_t slab_pages;
  int32_t num_pages;  // of all slabs; page numbers are clamped to them
  int32_t table_length;
  int32_t gathered_rows;
  int32_t first_span;  // of this launch in spans
  int32_t page_size;
};

// A token whose partial results are rows first, first + stride, ... of the partials.
struct MergeRow {
  int32_t token;
  int32_t first;
  int32_t count;
  int32_t stride;
};

struct MergeStatesParams {
  int32_t head_dim;
  int32_t count;  // partials per token, and how far apart, unless mapped
  int32_t stride;
  int32_t heads;
  int32_t rows;  // tokens * heads
};

}  // namespace chunkdelta
