// Argument checks of the ops: every refusal reads "[op] expected X; got Y".
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/dtype.h"
#include "mlx/array.h"
#include "mlx/ops.h"
#include "mlx/utils.h"

namespace chunkdelta {

namespace mx = mlx::core;

// "float32 (2, 3, 4)"
inline std::string describe(const mx::array& a) {
  std::ostringstream out;
  out << a.dtype() << " (";
  for (size_t i = 0; i < a.ndim(); i++) out << (i ? ", " : "") << a.shape(static_cast<int>(i));
  out << ")";
  return out.str();
}

[[noreturn]] inline void refuse(std::string_view op, const std::string& expected,
                                const std::string& got) {
  throw std::invalid_argument("[" + std::string(op) + "] expected " + expected + "; got " + got);
}

// The message parts are only built on failure: pass lambdas or cheap strings.
inline void expect(bool ok, std::string_view op, const std::string& expected,
                   const std::string& got) {
  if (!ok) refuse(op, expected, got);
}

inline void expect_shape(std::string_view op, std::string_view name, const mx::array& a,
                         const mx::Shape& shape, std::string_view symbols) {
  if (a.shape() == shape) return;
  std::ostringstream out;
  out << name << " " << symbols << " = (";
  for (size_t i = 0; i < shape.size(); i++) out << (i ? ", " : "") << shape[i];
  out << ")";
  refuse(op, out.str(), describe(a));
}

inline Dtype core_dtype(std::string_view op, std::string_view name, const mx::array& a) {
  if (a.dtype() == mx::float32) return Dtype::f32;
  if (a.dtype() == mx::float16) return Dtype::f16;
  if (a.dtype() == mx::bfloat16) return Dtype::bf16;
  refuse(op, std::string(name) + " in {float32, float16, bfloat16}", describe(a));
}

inline mx::Dtype mlx_dtype(Dtype dtype) {
  return dtype == Dtype::f32 ? mx::float32 : dtype == Dtype::f16 ? mx::float16 : mx::bfloat16;
}

// Kernels read dense rows. MLX exports no contiguous copy, so it is a graph op, free where the
// array is row contiguous already.
inline mx::array dense(const mx::array& a, mx::Stream s) {
  return mx::contiguous(a, false, s);
}

}  // namespace chunkdelta
