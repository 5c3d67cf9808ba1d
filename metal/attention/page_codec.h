// How a key or value row [head_dim] is read from a page: src/core/page_format.h on the device.
//
// A codec has the bytes of a row, which holds as many runs of eight values as it has, and decodes
// one run. A new format is a further specialisation and its name in gather_pages.metal.
#pragma once

#include <metal_stdlib>

using namespace metal;

// Eight decoded values.
struct Run8 {
  float4 lo;
  float4 hi;
};

// A row of plain values of type T.
template <typename T>
struct PlainCodec {
  static METAL_FUNC int row_bytes(int head_dim) { return head_dim * int(sizeof(T)); }

  static METAL_FUNC Run8 decode(const device uchar* row, int run) {
    const device vec<T, 4>* p = (const device vec<T, 4>*)(row + run * 8 * int(sizeof(T)));
    Run8 x;
    x.lo = float4(p[0]);
    x.hi = float4(p[1]);
    return x;
  }
};

// ggml's q8_0: blocks of an fp16 scale and 32 int8, 34 bytes each and so aligned to 2.
struct Q80Codec {
  static METAL_FUNC int row_bytes(int head_dim) { return (head_dim + 31) / 32 * 34; }

  static METAL_FUNC Run8 decode(const device uchar* row, int run) {
    const device uchar* block = row + run / 4 * 34;
    const float scale = float(*(const device half*)block);
    const device char2* p = (const device char2*)(block + 2 + run % 4 * 8);
    const char2 a = p[0];
    const char2 b = p[1];
    const char2 c = p[2];
    const char2 d = p[3];
    Run8 x;
    x.lo = float4(float(a.x), float(a.y), float(b.x), float(b.y)) * scale;
    x.hi = float4(float(c.x), float(c.y), float(d.x), float(d.y)) * scale;
    return x;
  }
};
