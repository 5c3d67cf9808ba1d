// The names of page formats; how pages look is in page_format.h.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "core/page_format.h"

namespace chunkdelta {

// The formats and the names that users give them ("bf16", "q8_0").
struct NamedPageFormat {
  const char* name;
  PageFormat format;
};
const std::vector<NamedPageFormat>& page_formats();
std::optional<PageFormat> parse_page_format(std::string_view name);

}  // namespace chunkdelta
