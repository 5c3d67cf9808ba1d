#include "core/causal_conv1d_kernel.h"

#include "core/simd.h"

namespace chunkdelta::CHUNKDELTA_ISA {

// Output rows computed together: they share the weights and all but one input row with each other.
constexpr int ROWS = 4;

static inline vf silu(vf a) {
  return a / (1.0f + exp(-a));
}

// Taps are added oldest first whatever the block, so that a row's result does not depend on where
// the chunk or the block was cut.
template <typename T, int K, int R>
static inline void conv_rows(const T* const* source, T* const* target, const float* weight,
                             const float* bias, int channels, bool activate) {
  const auto vector = [&](int c, int n) {
    const auto read = [&](const auto* p) { return n == W ? load(p + c) : load_first(p + c, n); };
    vf x[R + K - 1], acc[R];
    CHUNKDELTA_UNROLL for (int i = 0; i < R + K - 1; i++) x[i] = read(source[i]);
    const vf start = read(bias);
    CHUNKDELTA_UNROLL for (int r = 0; r < R; r++) acc[r] = start;
    CHUNKDELTA_UNROLL for (int k = 0; k < K; k++) {
      const vf w = read(weight + ptrdiff_t(k) * channels);
      CHUNKDELTA_UNROLL for (int r = 0; r < R; r++) acc[r] = w * x[r + k] + acc[r];
    }
    CHUNKDELTA_UNROLL for (int r = 0; r < R; r++) {
      const vf y = activate ? silu(acc[r]) : acc[r];
      if (n == W) {
        store(target[r] + c, y);
      } else {
        store_first(target[r] + c, y, n);
      }
    }
  };
  int c = 0;
  for (; c + W <= channels; c += W) vector(c, W);
  if (c < channels) vector(c, channels - c);
}

template <typename T, int K>
static void conv_block(const ConvBlock& block) {
  const int channels = block.channels;
  const ptrdiff_t first = block.first_channel;
  float* weight = block.scratch;  // [K, channels]
  float* bias = weight + K * channels;
  T* zeros = (T*)(bias + channels);
  const T* from = (const T*)block.weight + first * K;
  for (int c = 0; c < channels; c++) {
    for (int k = 0; k < K; k++) weight[k * channels + c] = to_float(from[c * K + k]);
    bias[c] = block.bias ? to_float(((const T*)block.bias)[first + c]) : 0.0f;
    from_float(0.0f, zeros + c);
  }
  const auto source = [&](int i) {
    return block.source[i] ? (const T*)block.source[i] + first : zeros;
  };
  const T* in[ROWS + K - 1];
  T* out[ROWS];
  int r = 0;
  for (; r + ROWS <= block.rows; r += ROWS) {
    for (int i = 0; i < ROWS + K - 1; i++) in[i] = source(r + i);
    for (int i = 0; i < ROWS; i++) out[i] = (T*)block.target[r + i] + first;
    conv_rows<T, K, ROWS>(in, out, weight, bias, channels, block.silu);
  }
  for (; r < block.rows; r++) {
    for (int i = 0; i < K; i++) in[i] = source(r + i);
    out[0] = (T*)block.target[r] + first;
    conv_rows<T, K, 1>(in, out, weight, bias, channels, block.silu);
  }
}

template <typename T>
static void conv_width(const ConvBlock& block) {
  switch (block.width) {
    case 2:
      return conv_block<T, 2>(block);
    case 3:
      return conv_block<T, 3>(block);
    case 4:
      return conv_block<T, 4>(block);
    case 5:
      return conv_block<T, 5>(block);
    case 6:
      return conv_block<T, 6>(block);
    case 7:
      return conv_block<T, 7>(block);
    case 8:
      return conv_block<T, 8>(block);
  }
}

void causal_conv1d_block(const ConvBlock& block) {
  switch (block.dtype) {
    case Dtype::f32:
      return conv_width<float>(block);
    case Dtype::f16:
      return conv_width<f16_t>(block);
    case Dtype::bf16:
      return conv_width<bf16_t>(block);
  }
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
