#include "core/compute.h"

#include "bindings/bindings.h"
#include "core/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkdelta {

void bind_compute(nb::module_& m) {
  m.def("active_isa", [] { return isa_name(active_isa()); });
  m.def("supported_isas", [] {
    nb::list names;
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512}) {
      if (isa_supported(isa)) names.append(isa_name(isa));
    }
    return names;
  });
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, "n"_a);
  m.def("workspace_bytes", &workspace_bytes);
  m.def("workspace_peak_bytes", &workspace_peak_bytes);
  m.def("reset_workspace_peak", &reset_workspace_peak);
  m.def("release_workspace", &release_workspace);
}

}  // namespace chunkdelta
