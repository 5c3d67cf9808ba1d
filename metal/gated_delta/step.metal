// Sequential gated delta rule: decode and short prompts (host side: core/plans/gated_delta).
#include <metal_stdlib>

#include "gated_delta/sequential.h"

using namespace metal;

#define INSTANTIATE_SEQUENTIAL(NAME, T, D)                                  \
  template [[host_name("gated_delta_sequential_" NAME "_d" #D)]] [[kernel]] \
  decltype(gated_delta_sequential<T, D>) gated_delta_sequential<T, D>;

#define INSTANTIATE_DIMS(NAME, T)      \
  INSTANTIATE_SEQUENTIAL(NAME, T, 64)  \
  INSTANTIATE_SEQUENTIAL(NAME, T, 96)  \
  INSTANTIATE_SEQUENTIAL(NAME, T, 128) \
  INSTANTIATE_SEQUENTIAL(NAME, T, 192) \
  INSTANTIATE_SEQUENTIAL(NAME, T, 256)

INSTANTIATE_DIMS("f32", float)
INSTANTIATE_DIMS("f16", half)
INSTANTIATE_DIMS("bf16", bfloat)
