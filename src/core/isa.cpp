#include "core/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace chunkdelta {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

bool isa_supported(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    default:
      return true;
  }
#else
  return isa == Isa::baseline;
#endif
}

static Isa choose_isa() {
  if (const char* wanted = std::getenv("CHUNKDELTA_ISA"); wanted && *wanted) {
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (isa_name(isa) != std::string(wanted)) continue;
      if (isa_supported(isa)) return isa;
      throw std::invalid_argument(
          std::string("[isa] expected CHUNKDELTA_ISA to name an instruction "
                      "set of this CPU; got ") +
          wanted);
    }
    throw std::invalid_argument(
        std::string("[isa] expected CHUNKDELTA_ISA in {baseline, avx2, avx512}; got ") + wanted);
  }
  if (isa_supported(Isa::avx512)) return Isa::avx512;
  if (isa_supported(Isa::avx2)) return Isa::avx2;
  return Isa::baseline;
}

Isa active_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

}  // namespace chunkdelta
