"""Olmo-Hybrid: mlx-lm's layers on chunkdelta's ops."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import olmo_hybrid

from chunkdelta.models.steps import AttentionStep, GatedDeltaStep


class Attention(olmo_hybrid.Attention):  # type: ignore[misc]
    """``olmo_hybrid.Attention``: q and k normalised over all heads, RoPE optional."""

    def __call__(
        self, x: mx.array, mask: mx.array | str | None = None, cache: Any = None
    ) -> mx.array:
        step = AttentionStep(self, x, mask, cache)
        x = step.x
        rows, length, _ = x.shape
        heads, kv_heads, dim = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        q = self.q_norm(self.q_proj(x)).reshape(rows, length, heads, dim)
        k = self.k_norm(self.k_proj(x)).reshape(rows, length, kv_heads, dim)
        v = self.v_proj(x).reshape(rows, length, kv_heads, dim)
        out = step.attend(q, k, v)
        return step.finish(self.o_proj(out.flatten(2)))


class GatedDeltaNet(olmo_hybrid.GatedDeltaNet):  # type: ignore[misc]
    """``olmo_hybrid.GatedDeltaNet``: a convolution each for q, k and v; beta up to 2."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        step = GatedDeltaStep(self, x, mask, cache)
        x = step.x
        rows, length, _ = x.shape
        q, k, v = step.convolve(
            (self.q_proj(x), self.q_conv1d),
            (self.k_proj(x), self.k_conv1d),
            (self.v_proj(x), self.v_conv1d),
        )
        out = step.delta_rule(q, k, v, self.a_proj(x), self.b_proj(x))
        gate = self.g_proj(x).reshape(rows, length, self.num_v_heads, self.head_v_dim)
        out = self.o_proj(self.o_norm(out, gate).flatten(2))
        return step.finish(out)
