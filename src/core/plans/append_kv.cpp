#include "core/plans/append_kv.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention/append_params.h"

namespace chunkdelta {
namespace {

constexpr uint32_t kThreads = 128;
constexpr int32_t kRowsPerGroup = 4;  // a simdgroup each
// Values of one launch, read and written once: 10 ms at 54 GB/s (80 % of an M1) in 16 bits.
constexpr int64_t kLaunchValues = int64_t(1) << 27;
constexpr int64_t kLaunchBytes = int64_t(1) << 28;

[[noreturn]] void refuse(const std::string& op, const std::string& expected,
                         const std::string& got) {
  throw std::invalid_argument("[" + op + "] expected " + expected + "; got " + got);
}

void expect_int32(const std::string& op, const std::string& what, int64_t value) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
    refuse(op, what + " below 2^31", std::to_string(value));
  }
}

std::string kernel_of(const AppendOptions& options, int vector) {
  std::string name = "append_kv_" + std::string(dtype_name(options.dtype)) + "_to_" +
                     page_format_name(options.format);
  switch (options.format) {
    case PageFormat::f32:
    case PageFormat::f16:
    case PageFormat::bf16:
      return name + "_v" + std::to_string(vector);
    case PageFormat::q8_0:
    case PageFormat::q4_0:
    case PageFormat::turbo4:
      return name;
  }
  return name;
}

}  // namespace

Plan plan_append_kv(const AppendOptions& options, const std::vector<int32_t>& slots, bool aligned) {
  const std::string op = "append_kv";
  if (options.num_kv_heads < 1 || options.head_dim < 1 || options.page_size < 1) {
    refuse(op, "positive heads, head_dim and page_size",
           std::to_string(options.num_kv_heads) + ", " + std::to_string(options.head_dim) + ", " +
               std::to_string(options.page_size));
  }
  const int64_t rows = static_cast<int64_t>(slots.size()) * options.num_kv_heads;
  expect_int32(op, "tokens * heads", rows);
  expect_int32(op, "first_page", options.first_page);
  expect_int32(op, "num_pages", options.num_pages);

  Plan plan;
  plan.op = op;
  plan.host_data.push_back({"slot_mapping", to_bytes(slots)});
  const int vector = aligned && options.head_dim % 4 == 0 ? 4 : 1;
  const int64_t groups = (rows + kRowsPerGroup - 1) / kRowsPerGroup;
  const int64_t most =
      std::max<int64_t>(1, kLaunchValues / (int64_t(kRowsPerGroup) * options.head_dim));
  for (int64_t first = 0; first < groups; first += most) {
    const AppendKVParams params{static_cast<int32_t>(rows),
                                options.num_kv_heads,
                                options.head_dim,
                                options.page_size,
                                static_cast<int32_t>(options.first_page),
                                static_cast<int32_t>(options.num_pages),
                                static_cast<int32_t>(first)};
    Launch launch;
    launch.source = "attention/append_kv";
    launch.kernel = kernel_of(options, vector);
    launch.buffers = {
        {0, "x", Access::Read}, {1, "slot_mapping", Access::Read}, {3, "pages", Access::Write}};
    launch.params = {{2, to_bytes(params)}};
    launch.grid = {static_cast<uint32_t>(std::min(most, groups - first)), 1, 1};
    launch.threadgroup = {kThreads, 1, 1};
    plan.launches.push_back(std::move(launch));
  }
  plan.why = "a simdgroup per token and KV head encodes its row into the page";
  return plan;
}

Plan plan_copy_pages(const CopyPagesCall& call) {
  const std::string op = "copy_pages";
  const auto& bounds = call.first_page;
  if (bounds.size() < 2 || bounds.front() != 0 || !std::is_sorted(bounds.begin(), bounds.end())) {
    refuse(op, "first_page of each slab, ascending from 0, and the pages of them all",
           std::to_string(bounds.size()) + " values");
  }
  const auto slabs = static_cast<int32_t>(bounds.size()) - 1;
  if (call.slab < 0 || call.slab >= slabs) {
    refuse(op, "a slab in 0.." + std::to_string(slabs - 1), std::to_string(call.slab));
  }
  if (call.page_bytes < 16 || call.page_bytes % 16 != 0) {
    refuse(op, "page_bytes in multiples of 16", std::to_string(call.page_bytes));
  }
  expect_int32(op, "pages", bounds.back());
  expect_int32(op, "page_bytes / 16", call.page_bytes / 16);
  if (call.source.size() != call.target.size()) {
    refuse(op, "a source per target",
           std::to_string(call.source.size()) + " and " + std::to_string(call.target.size()));
  }
  std::vector<int32_t> sources = call.source, targets = call.target, both;
  for (auto* pages : {&sources, &targets}) {
    std::sort(pages->begin(), pages->end());
    if (!pages->empty() && (pages->front() < 0 || pages->back() >= bounds.back())) {
      refuse(op, "pages in 0.." + std::to_string(bounds.back() - 1),
             std::to_string(pages->front() < 0 ? pages->front() : pages->back()));
    }
  }
  std::set_intersection(sources.begin(), sources.end(), targets.begin(), targets.end(),
                        std::back_inserter(both));
  if (!both.empty() || std::adjacent_find(targets.begin(), targets.end()) != targets.end()) {
    refuse(op, "distinct targets that are no sources", "a page twice");
  }

  Plan plan;
  plan.op = op;
  std::vector<PageCopy> copies;
  const auto target_role = "pages." + std::to_string(call.slab);
  for (int32_t from_slab = 0; from_slab < slabs; from_slab++) {
    const auto begin = static_cast<int64_t>(copies.size());
    for (size_t i = 0; i < call.source.size(); i++) {
      const auto within = [&](int32_t page, int32_t slab) {
        return page >= bounds[slab] && page < bounds[slab + 1];
      };
      if (!within(call.source[i], from_slab) || !within(call.target[i], call.slab)) continue;
      copies.push_back({static_cast<int32_t>(call.source[i] - bounds[from_slab]),
                        static_cast<int32_t>(call.target[i] - bounds[call.slab])});
    }
    const auto end = static_cast<int64_t>(copies.size());
    const int64_t most = std::clamp<int64_t>(kLaunchBytes / call.page_bytes, 1, 65535);
    for (int64_t first = begin; first < end; first += most) {
      Launch launch;
      launch.source = "attention/copy_pages";
      launch.kernel = "copy_pages";
      // Within one slab both bind the same memory; the pages are different ones.
      launch.buffers = {{0, "pages." + std::to_string(from_slab), Access::Read},
                        {1, "copies", Access::Read},
                        {3, target_role, Access::Write}};
      launch.params = {{2, to_bytes(CopyPagesParams{static_cast<int32_t>(call.page_bytes / 16),
                                                    static_cast<int32_t>(first)})}};
      launch.grid = {8, static_cast<uint32_t>(std::min(most, end - first)), 1};
      launch.threadgroup = {kThreads, 1, 1};
      plan.launches.push_back(std::move(launch));
    }
  }
  plan.host_data.push_back({"copies", to_bytes(copies)});
  plan.why = "8 threadgroups a page, 16 bytes a thread and step";
  return plan;
}

}  // namespace chunkdelta
