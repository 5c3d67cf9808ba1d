// Rotary position embedding with one position per token, and per axis for M-RoPE.
//
// Angles are exact. At position 131,072 a float product of position and frequency is off by 4e-3
// radians; here it is an integer product in units of 2^-64 turns, whose overflow drops whole turns.
#include "rope/params.h"

#include <metal_stdlib>

using namespace metal;
using namespace chunkdelta;

constant bool traditional [[function_constant(ROPE_TRADITIONAL)]];

// cos and sin of position times a pair's turn.
METAL_FUNC float2 rotation(int position, ulong turn) {
  const ulong turned = ulong(long(position)) * turn;
  // The nearest quarter turn, and what is left: at most an eighth of a turn, so that the argument
  // of cos and sin keeps all its bits.
  const ulong quarter = (turned + (ulong(1) << 61)) >> 62;
  const int left = int(long(turned - (quarter << 62)) >> 32);
  const float angle = float(left) * 1.46291807926715968e-9f;  // 2 pi / 2^32
  const float c = precise::cos(angle);
  const float s = precise::sin(angle);
  const float2 within = (quarter & 1) != 0 ? float2(-s, c) : float2(c, s);
  return (quarter & 2) != 0 ? -within : within;
}

// Threadgroup: (128, 1, 1), a simdgroup per token. Grid: (ceil(tokens / 4), groups of heads, 1)
// threadgroups. x and out may be the same memory: what a thread writes only it has read.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void rope(
    const device T* x [[buffer(0)]],            // [tokens, heads, D]
    const device int* positions [[buffer(1)]],  // [axes, tokens]
    const device RopePair* pairs [[buffer(2)]],
    constant RopeParams& params [[buffer(3)]],
    device T* out [[buffer(4)]],  // [tokens, heads, D]
    uint3 tg [[threadgroup_position_in_grid]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int token = int(tg.x) * 4 + int(sg);
  if (token >= params.tokens) return;
  const int head_dim = params.head_dim;
  const int count = params.pairs;
  const int first = int(tg.y) * ROPE_GROUP_HEADS;
  const int heads = min(ROPE_GROUP_HEADS, params.heads - first);
  const size_t at = (size_t(token) * params.heads + first) * head_dim;

  for (int i = int(lane); i < count; i += 32) {
    const device RopePair* pair = pairs + i;
    const float2 turn = rotation(
        positions[size_t(pair->axis) * params.tokens + token],
        ulong(pair->turn_high) << 32 | ulong(pair->turn_low));
    const int column = traditional ? 2 * i : i;
    const int other = traditional ? 1 : count;
    for (int h = 0; h < heads; h++) {
      const size_t e = at + h * head_dim + column;
      const float a = float(x[e]);
      const float b = float(x[e + other]);
      out[e] = T(a * turn.x - b * turn.y);
      out[e + other] = T(b * turn.x + a * turn.y);
    }
  }
  const int rest = head_dim - 2 * count;
  for (int h = 0; h < heads; h++) {
    for (int d = int(lane); d < rest; d += 32) {
      const size_t e = at + h * head_dim + 2 * count + d;
      out[e] = x[e];
    }
  }
}

#define ROPE(NAME, T) template [[host_name(NAME)]] [[kernel]] decltype(rope<T>) rope<T>;

ROPE("rope_float32", float)
ROPE("rope_float16", half)
ROPE("rope_bfloat16", bfloat)
