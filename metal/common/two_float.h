// Sums carried in two floats, hi + lo.  They rely on the order of additions, which
// MLX's default (MathModeSafe) keeps; the pragmas keep it under other options too.
#pragma once

#include <metal_stdlib>

using namespace metal;

// a + b, renormalised: |lo| is at most half an ulp of hi.
METAL_FUNC float2 two_float_add(float2 a, float2 b) {
#pragma METAL fp math_mode(safe)
  const float s = a.x + b.x;
  const float t = s - a.x;
  const float e = ((a.x - (s - t)) + (b.x - t)) + (a.y + b.y);
  const float hi = s + e;
  return float2(hi, e - (hi - s));
}

// a - b as one float: the large parts cancel before the small ones are added.
METAL_FUNC float two_float_difference(float2 a, float2 b) {
#pragma METAL fp math_mode(safe)
  return (a.x - b.x) + (a.y - b.y);
}
