// Helpers of the plan bindings.
#pragma once

#include <string>
#include <string_view>

#include "ops/checks.h"

namespace chunkdelta {

// "float32", "float16", "bfloat16".
inline Dtype parse_dtype(std::string_view op, const std::string& name) {
  for (Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  refuse(op, "a dtype in {float32, float16, bfloat16}", "'" + name + "'");
}

}  // namespace chunkdelta
