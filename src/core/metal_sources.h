// The Metal sources, flattened and embedded at build time (cmake/flatten_metal.py): MLX compiles
// them on the user's machine at first use, which needs neither Xcode nor an include path.
#pragma once

#include <map>
#include <string>

namespace chunkdelta {

// Text by path below metal/ without suffix, the `source` of a Launch.
const std::map<std::string, std::string>& metal_sources();

}  // namespace chunkdelta
