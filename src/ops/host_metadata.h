// Host metadata (cu_seqlens, seq_lens, block_table ...): int32 on the host, validated by value when
// the graph node is built.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/checks.h"

namespace chunkdelta {

struct HostInt32 {
  std::vector<int32_t> values;  // row-major
  std::vector<int64_t> shape;
};

// "[0, 3, 7, ...] (12,)": the first values and the shape.
inline std::string describe(const HostInt32& a) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < a.values.size(); i++) {
    if (i == 8) {
      out << ", ...";
      break;
    }
    out << (i ? ", " : "") << a.values[i];
  }
  out << "] (";
  for (size_t i = 0; i < a.shape.size(); i++) out << (i ? ", " : "") << a.shape[i];
  out << (a.shape.size() == 1 ? ",)" : ")");
  return out.str();
}

// Offsets [N+1] of N >= 1 sequences in `rows` packed rows: from 0, never descending, up to `rows`.
inline void check_cu_seqlens(std::string_view op, std::string_view name, const HostInt32& offsets,
                             int64_t rows) {
  bool ok = offsets.shape.size() == 1 && offsets.values.size() >= 2 &&
            offsets.values.front() == 0 && offsets.values.back() == rows;
  for (size_t i = 1; ok && i < offsets.values.size(); i++) {
    ok = offsets.values[i - 1] <= offsets.values[i];
  }
  if (ok) return;
  refuse(op,
         std::string(name) + " [N+1] of N >= 1 sequences, from 0, ascending, ending at " +
             std::to_string(rows) + " rows",
         describe(offsets));
}

}  // namespace chunkdelta
