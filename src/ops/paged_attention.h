// paged_attention: softmax attention of packed queries over the pages of a pool.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/paged_attention.h"
#include "mlx/primitives.h"
#include "ops/checks.h"
#include "ops/host_metadata.h"

namespace chunkdelta {

// Throws unless every page that holds one of a sequence's keys is given.
std::shared_ptr<const AttentionMetadata> make_attention_metadata(const HostInt32& block_table,
                                                                 const HostInt32& seq_lens,
                                                                 const HostInt32& cu_seqlens_q,
                                                                 int page_size);

// The caller's part of PagedAttentionOptions; the rest follows from the arrays.
struct PagedAttentionSettings {
  PageFormat k_format, v_format;
  std::optional<float> scale;
  bool causal;
  std::optional<int> window;
  std::optional<float> softcap;
  bool return_lse;
};

// k, v: the slabs of a pool, slab i from page first_page[i] (one more entry than slabs). Returns o,
// lse if asked for, and a token [1] that stands for this read: a later write must wait for it.
std::vector<mx::array> paged_attention(const mx::array& q, const std::vector<mx::array>& k,
                                       const std::vector<mx::array>& v,
                                       const std::vector<int64_t>& first_page,
                                       std::shared_ptr<const AttentionMetadata> metadata,
                                       const PagedAttentionSettings& settings,
                                       const std::optional<mx::array>& sinks,
                                       mx::StreamOrDevice s = {});

class PagedAttention : public mx::Primitive {
 public:
  PagedAttention(mx::Stream stream, PagedAttentionOptions options,
                 std::shared_ptr<const AttentionMetadata> metadata, std::vector<int64_t> first_page)
      : Primitive(stream),
        options_(options),
        metadata_(std::move(metadata)),
        first_page_(std::move(first_page)) {}
  // inputs: q, sinks if any, the slabs of k, those of v. outputs: o, lse if any, token.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PagedAttention"; }

 private:
  PagedAttentionOptions options_;
  std::shared_ptr<const AttentionMetadata> metadata_;
  std::vector<int64_t> first_page_;
};

}  // namespace chunkdelta
