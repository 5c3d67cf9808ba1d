// Depthwise causal convolution over time with carried rows: y[t] = act(b + sum_k w[k] x[t-K+1+k]).
//
// A thread owns V neighbouring channels of a block of rows. It keeps the last K-1 rows in registers
// while it walks down, so that of 16 rows each is read 19 / 16 times at K = 4.
#include "conv/params.h"

#include <metal_stdlib>

using namespace metal;
using namespace chunkdelta;

#define UNROLL _Pragma("clang loop unroll(full)")

constant int width [[function_constant(CONV_WIDTH)]];
constant bool has_bias [[function_constant(CONV_HAS_BIAS)]];
constant bool has_initial [[function_constant(CONV_HAS_INITIAL)]];
constant bool has_mask [[function_constant(CONV_HAS_MASK)]];
constant bool applies_silu [[function_constant(CONV_SILU)]];

// V neighbouring channels as fp32.
template <typename T, int V>
struct Channels;

template <typename T>
struct Channels<T, 4> {
  typedef float4 Wide;
  static METAL_FUNC float4 load(const device T* p) { return float4(*(const device vec<T, 4>*)p); }
  static METAL_FUNC void store(device T* p, float4 x) { *(device vec<T, 4>*)p = vec<T, 4>(x); }
  // Tap k of each channel; p points at the first channel's taps.
  static METAL_FUNC float4 tap(const device T* p, int k) {
    return float4(
        float(p[k]), float(p[k + width]), float(p[k + 2 * width]), float(p[k + 3 * width]));
  }
};

template <typename T>
struct Channels<T, 1> {
  typedef float Wide;
  static METAL_FUNC float load(const device T* p) { return float(*p); }
  static METAL_FUNC void store(device T* p, float x) { *p = T(x); }
  static METAL_FUNC float tap(const device T* p, int k) { return float(p[k]); }
};

METAL_FUNC float silu(float x) {
  return x / (1.0f + precise::exp(-x));
}
METAL_FUNC float4 silu(float4 x) {
  return x / (1.0f + precise::exp(-x));
}

// Threadgroup: (threads, 1, 1) by channels. Grid: (channels, blocks of this launch, 1)
// threadgroups.
template <typename T, int V>
[[kernel, max_total_threads_per_threadgroup(256)]] void causal_conv1d(
    const device T* x [[buffer(0)]],                                              // [rows, C]
    const device T* weight [[buffer(1)]],                                         // [C, K]
    const device T* bias [[buffer(2), function_constant(has_bias)]],              // [C]
    const device T* initial_state [[buffer(3), function_constant(has_initial)]],  // [N, K-1, C]
    const device bool* mask [[buffer(4), function_constant(has_mask)]],           // [rows]
    const device ConvBlock* blocks [[buffer(5)]],
    constant CausalConv1dParams& params [[buffer(6)]],
    device T* y [[buffer(7)]],      // [rows, C]
    device T* state [[buffer(8)]],  // [N, K-1, C]
    uint3 tg [[threadgroup_position_in_grid]],
    uint3 at [[thread_position_in_grid]]) {
  typedef Channels<T, V> Lane;
  typedef typename Lane::Wide Wide;
  const int channels = params.channels;
  const int c = int(at.x) * V;
  if (c >= channels) return;
  const device ConvBlock* block = blocks + params.first_block + int(tg.y);
  const int begin = block->begin;
  const int first = block->row;
  const int rows = block->rows;
  const size_t carried = size_t(block->sequence) * (width - 1) * channels + c;

  Wide taps[CONV_MAX_TAPS];
  UNROLL for (int k = 0; k < CONV_MAX_TAPS; k++) {
    if (k < width) taps[k] = Lane::tap(weight + size_t(c) * width, k);
  }
  const Wide start = has_bias ? Lane::load(bias + c) : Wide(0.0f);

  // window[i] is the row K-1-i steps back among those that exist, oldest first.
  Wide window[CONV_MAX_TAPS];
  int before = first - 1;
  UNROLL for (int i = CONV_MAX_TAPS - 2; i >= 0; i--) {
    if (i < width - 1) {
      if (has_mask) {
        while (before >= begin && !mask[before]) before--;
      }
      window[i] = Wide(0.0f);
      if (before >= begin) {
        window[i] = Lane::load(x + size_t(before) * channels + c);
        before--;
      } else if (has_initial) {
        // The sequence's first rows see the newest rows of the initial state: `before` goes on
        // counting below the sequence's begin.
        const int slot = width - 1 - (begin - before);
        window[i] = Lane::load(initial_state + carried + size_t(slot) * channels);
        before--;
      }
    }
  }

  for (int r = 0; r < rows; r++) {
    const size_t row = size_t(first + r);
    device T* out = y + row * channels + c;
    if (has_mask) {
      if (!mask[row]) {  // the row does not exist
        Lane::store(out, Wide(0.0f));
        continue;
      }
    }
    const Wide newest = Lane::load(x + row * channels + c);
    Wide sum = start;
    UNROLL for (int k = 0; k < CONV_MAX_TAPS - 1; k++) {
      if (k < width - 1) sum = fma(taps[k], window[k], sum);
    }
    sum = fma(taps[width - 1], newest, sum);
    Lane::store(out, applies_silu ? silu(sum) : sum);
    UNROLL for (int i = 0; i < CONV_MAX_TAPS - 2; i++) {
      if (i < width - 2) window[i] = window[i + 1];
    }
    window[width - 2] = newest;
  }

  if (block->last) {
    UNROLL for (int i = 0; i < CONV_MAX_TAPS - 1; i++) {
      if (i < width - 1) Lane::store(state + carried + size_t(i) * channels, window[i]);
    }
  }
}

#define CAUSAL_CONV1D(NAME, ...) \
  template [[host_name(          \
      NAME)]] [[kernel]] decltype(causal_conv1d<__VA_ARGS__>) causal_conv1d<__VA_ARGS__>;

CAUSAL_CONV1D("causal_conv1d_float32_v4", float, 4)
CAUSAL_CONV1D("causal_conv1d_float16_v4", half, 4)
CAUSAL_CONV1D("causal_conv1d_bfloat16_v4", bfloat, 4)
CAUSAL_CONV1D("causal_conv1d_float32_v1", float, 1)
CAUSAL_CONV1D("causal_conv1d_float16_v1", half, 1)
CAUSAL_CONV1D("causal_conv1d_bfloat16_v1", bfloat, 1)
