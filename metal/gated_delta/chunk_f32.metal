// Chunk-parallel gated delta rule, f32 activations (host side: core/plans/gated_delta).
#include <metal_stdlib>

#include "gated_delta/scan.h"

using namespace metal;

#define INSTANTIATE_PREP(D)                                      \
  template [[host_name("gated_delta_prep_f32_d" #D)]] [[kernel]] \
  decltype(gated_delta_prep<float, D>) gated_delta_prep<float, D>;

// COLUMNS of the values per simdgroup: 8 NV.
#define INSTANTIATE_SCAN(D, COLUMNS, NV)                                       \
  template [[host_name("gated_delta_scan_f32_d" #D "_n" #COLUMNS)]] [[kernel]] \
  decltype(gated_delta_scan<float, D, NV>) gated_delta_scan<float, D, NV>;

INSTANTIATE_PREP(64)
INSTANTIATE_PREP(96)
INSTANTIATE_PREP(128)
INSTANTIATE_PREP(192)
INSTANTIATE_PREP(256)

// 16 columns of 192 or 256 keys would take 96 or 128 registers a lane for the state alone.
INSTANTIATE_SCAN(64, 8, 1)
INSTANTIATE_SCAN(64, 16, 2)
INSTANTIATE_SCAN(96, 8, 1)
INSTANTIATE_SCAN(96, 16, 2)
INSTANTIATE_SCAN(128, 8, 1)
INSTANTIATE_SCAN(128, 16, 2)
INSTANTIATE_SCAN(192, 8, 1)
INSTANTIATE_SCAN(256, 8, 1)
