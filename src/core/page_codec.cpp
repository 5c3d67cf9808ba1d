#include "core/page_codec.h"

namespace chunkdelta {

const std::vector<NamedPageFormat>& page_formats() {
  static const std::vector<NamedPageFormat> formats{
      {"f32", PageFormat::f32},   {"f16", PageFormat::f16},   {"bf16", PageFormat::bf16},
      {"q8_0", PageFormat::q8_0}, {"q4_0", PageFormat::q4_0}, {"turbo4", PageFormat::turbo4}};
  return formats;
}

std::optional<PageFormat> parse_page_format(std::string_view name) {
  for (const auto& known : page_formats()) {
    if (name == known.name) return known.format;
  }
  return std::nullopt;
}

}  // namespace chunkdelta
