#include "bindings/bindings.h"
#include "mlx/version.h"

namespace nb = nanobind;

NB_MODULE(_ext, m) {
  // mx.array, mx.Stream ... must be registered before an argument is converted.
  nb::module_::import_("mlx.core");
  m.attr("MLX_VERSION_NUMERIC") = MLX_VERSION_NUMERIC;
  chunkdelta::bind_attention(m);
  chunkdelta::bind_causal_conv1d(m);
  chunkdelta::bind_compute(m);
  chunkdelta::bind_rope(m);
}
