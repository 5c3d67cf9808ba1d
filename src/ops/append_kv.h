// append_kv: new keys or values into the pages of one slab, in place.
#pragma once

#include <memory>
#include <vector>

#include "core/append_kv.h"
#include "mlx/primitives.h"
#include "ops/checks.h"
#include "ops/host_metadata.h"

namespace chunkdelta {

// Slots of new tokens, checked once and shared by the layers.
struct SlotMapping {
  std::vector<int32_t> slots;  // -1 skips
  int32_t min_slot, max_slot;  // of those that are written; max_slot -1: none
};

std::shared_ptr<const SlotMapping> make_slot_mapping(const HostInt32& slots);

// Pages [first_page, first_page + slab.shape(0)) of a pool. `reads` are the tokens of reads that
// the write must not overtake. The result aliases `slab`, which is not to be used any more.
mx::array append_kv(const mx::array& slab, const mx::array& x,
                    std::shared_ptr<const SlotMapping> slots, int64_t first_page, PageFormat format,
                    int head_dim, const std::vector<mx::array>& reads, mx::StreamOrDevice s = {});

// Copies whole pages, source[i] to target[i], as bytes. `slabs` are all those of the pool's keys
// (or values), slabs[slab] the one that is written; the result aliases it.
mx::array copy_pages(const std::vector<mx::array>& slabs, size_t slab,
                     const std::vector<int64_t>& first_page, const std::vector<int32_t>& source,
                     const std::vector<int32_t>& target, const std::vector<mx::array>& reads,
                     mx::StreamOrDevice s = {});

// The shape and dtype of a slab.
mx::Shape slab_shape(PageFormat format, int num_pages, int num_kv_heads, int page_size,
                     int head_dim);
mx::Dtype slab_dtype(PageFormat format);

class AppendKV : public mx::Primitive {
 public:
  AppendKV(mx::Stream stream, AppendOptions options, std::shared_ptr<const SlotMapping> slots)
      : Primitive(stream), options_(options), slots_(std::move(slots)) {}
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "AppendKV"; }
  // is_equivalent stays false: two equal writes are two writes.

 private:
  AppendOptions options_;
  std::shared_ptr<const SlotMapping> slots_;
};

class CopyPages : public mx::Primitive {
 public:
  CopyPages(mx::Stream stream, size_t slab, std::vector<int64_t> first_page,
            std::vector<int32_t> source, std::vector<int32_t> target)
      : Primitive(stream),
        slab_(slab),
        first_page_(std::move(first_page)),
        source_(std::move(source)),
        target_(std::move(target)) {}
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "CopyPages"; }

 private:
  size_t slab_;
  std::vector<int64_t> first_page_;
  std::vector<int32_t> source_, target_;
};

}  // namespace chunkdelta
