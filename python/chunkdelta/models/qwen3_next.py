"""Qwen3-Next: mlx-lm's layers on chunkdelta's ops. Its attention is Qwen3.5's too."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_next

from chunkdelta.models.steps import AttentionStep, GatedDeltaStep


class Attention(qwen3_next.Qwen3NextAttention):  # type: ignore[misc]
    """``qwen3_next.Qwen3NextAttention``: gated output, normalised heads, partial RoPE."""

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None
    ) -> mx.array:
        step = AttentionStep(self, x, mask, cache)
        x = step.x
        rows, length, _ = x.shape
        heads, kv_heads, dim = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        q, gate = mx.split(self.q_proj(x).reshape(rows, length, heads, 2 * dim), 2, axis=-1)
        q = self.q_norm(q)
        k = self.k_norm(self.k_proj(x).reshape(rows, length, kv_heads, dim))
        v = self.v_proj(x).reshape(rows, length, kv_heads, dim)
        out = step.attend(q, k, v) * mx.sigmoid(gate)
        return step.finish(self.o_proj(out.flatten(2)))


class GatedDeltaNet(qwen3_next.Qwen3NextGatedDeltaNet):  # type: ignore[misc]
    """``qwen3_next.Qwen3NextGatedDeltaNet``: q, k, v, z grouped by key head in one projection."""

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        step = GatedDeltaStep(self, inputs, mask, cache)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(step.x), self.in_proj_ba(step.x)
        )
        qkv = mx.concatenate([t.flatten(2) for t in (q, k, v)], axis=-1)
        (qkv,) = step.convolve((qkv, self.conv1d))
        q, k, v = mx.split(qkv, [self.key_dim, 2 * self.key_dim], axis=-1)
        out = step.delta_rule(q, k, v, a, b)
        out = self.out_proj(self.norm(out, z).flatten(2))
        return step.finish(out)
