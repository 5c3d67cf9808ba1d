// Which instruction set the CPU kernels use in this process.
#pragma once

namespace chunkdelta {

enum class Isa { baseline, avx2, avx512 };

// The best one that this CPU has, or the one that CHUNKDELTA_ISA names (baseline, avx2, avx512).
// Throws std::invalid_argument when that name is unknown or the CPU lacks it.
Isa active_isa();
const char* isa_name(Isa isa);
bool isa_supported(Isa isa);

// Calls the kernel of the active instruction set. A kernel source is compiled once per entry of
// CHUNKDELTA_ISAS (CMakeLists.txt) into namespaces chunkdelta::baseline, ::avx2, ::avx512.
#if defined(__x86_64__)
#define CHUNKDELTA_DISPATCH(function, ...)                    \
  [&] {                                                       \
    switch (::chunkdelta::active_isa()) {                     \
      case ::chunkdelta::Isa::avx512:                         \
        return ::chunkdelta::avx512::function(__VA_ARGS__);   \
      case ::chunkdelta::Isa::avx2:                           \
        return ::chunkdelta::avx2::function(__VA_ARGS__);     \
      default:                                                \
        return ::chunkdelta::baseline::function(__VA_ARGS__); \
    }                                                         \
  }()
// Declares `declaration` in each of those namespaces.
#define CHUNKDELTA_DECLARE_KERNEL(declaration) \
  namespace baseline {                         \
  declaration;                                 \
  }                                            \
  namespace avx2 {                             \
  declaration;                                 \
  }                                            \
  namespace avx512 {                           \
  declaration;                                 \
  }
#else
#define CHUNKDELTA_DISPATCH(function, ...) ::chunkdelta::baseline::function(__VA_ARGS__)
#define CHUNKDELTA_DECLARE_KERNEL(declaration) \
  namespace baseline {                         \
  declaration;                                 \
  }
#endif

}  // namespace chunkdelta
