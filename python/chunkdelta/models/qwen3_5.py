"""Qwen3.5 (dense and MoE text models): mlx-lm's layers on chunkdelta's ops."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_5

from chunkdelta.models.steps import GatedDeltaStep


class GatedDeltaNet(qwen3_5.GatedDeltaNet):  # type: ignore[misc]
    """``qwen3_5.GatedDeltaNet`` with the same weights; heads may be a shard's."""

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        step = GatedDeltaStep(self, inputs, mask, cache)
        x = step.x
        rows, length, _ = x.shape
        (qkv,) = step.convolve((self.in_proj_qkv(x), self.conv1d))
        z = self.in_proj_z(x).reshape(rows, length, self.num_v_heads, self.head_v_dim)
        q, k, v = mx.split(qkv, [self.key_dim, 2 * self.key_dim], axis=-1)
        out = step.delta_rule(q, k, v, self.in_proj_a(x), self.in_proj_b(x))
        out = self.out_proj(self.norm(out, z).flatten(2))
        if self.sharding_group is not None:
            out = mx.distributed.all_sum(out, group=self.sharding_group)
        return step.finish(out)
