// How a key or value row [head_dim] is read from a page: src/core/page_format.h on the device.
//
// A codec has the bytes of a row, which holds as many runs of eight values as it has, and decodes
// one run. A new format is a further specialisation and its name in gather_pages.metal.
#pragma once

#include <metal_stdlib>

#include "attention/turbo4.h"

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

// ggml's q4_0: blocks of an fp16 scale and 16 bytes, nibbles + 8; byte i holds values i and i + 16.
struct Q40Codec {
  static METAL_FUNC int row_bytes(int head_dim) { return (head_dim + 31) / 32 * 18; }

  static METAL_FUNC Run8 decode(const device uchar* row, int run) {
    const device uchar* block = row + run / 4 * 18;
    const float scale = float(*(const device half*)block);
    const device uchar* p = block + 2 + (run & 1) * 8;
    const int shift = (run & 2) * 2;
    Run8 x;
    x.lo =
        float4(nibble(p[0], shift), nibble(p[1], shift), nibble(p[2], shift), nibble(p[3], shift));
    x.hi =
        float4(nibble(p[4], shift), nibble(p[5], shift), nibble(p[6], shift), nibble(p[7], shift));
    x.lo *= scale;
    x.hi *= scale;
    return x;
  }

  static METAL_FUNC float nibble(uchar byte, int shift) {
    return float((int(byte) >> shift & 15) - 8);
  }
};

constant constexpr float kTurbo4Levels[8] = {CHUNKDELTA_TURBO4_CENTROIDS};

// turbo4: blocks of 128 values, an fp16 norm, two unused bytes, and nibbles that index centroids of
// a unit vector; byte i holds values 2 i and 2 i + 1. The values stay rotated.
struct Turbo4Codec {
  static METAL_FUNC int row_bytes(int head_dim) { return (head_dim + 127) / 128 * 68; }

  static METAL_FUNC Run8 decode(const device uchar* row, int run) {
    const device uchar* block = row + run / 16 * 68;
    const float norm = float(*(const device half*)block);
    const device uchar* p = block + 4 + run % 16 * 4;
    Run8 x;
    x.lo = float4(level(p[0] & 15), level(p[0] >> 4), level(p[1] & 15), level(p[1] >> 4)) * norm;
    x.hi = float4(level(p[2] & 15), level(p[2] >> 4), level(p[3] & 15), level(p[3] >> 4)) * norm;
    return x;
  }

  static METAL_FUNC float level(int index) {
    return index < 8 ? -kTurbo4Levels[7 - index] : kTurbo4Levels[index - 8];
  }
};
