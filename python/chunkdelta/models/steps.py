"""What the layers of all families share: one call of a mixer, from padded inputs to outputs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from chunkdelta.cache.gated_delta_cache import GatedDeltaCache
from chunkdelta.cache.kv_cache import PagedKVCache
from chunkdelta.cache.packing import packing
from chunkdelta.ops import (
    causal_conv1d,
    chunk_gated_delta_rule,
    gated_delta_gates,
    gated_delta_step,
)


def _check(layer: nn.Module, mask: Any, cache: Any, expected: type, masks: tuple[Any, ...]) -> None:
    if cache is not None and not isinstance(cache, expected):
        raise ValueError(
            f"[accelerate] expected a {expected.__name__} for {type(layer).__name__}, as "
            f"chunkdelta.make_cache and model.make_cache() make; got {type(cache).__name__}"
        )
    if not any(mask is m or (isinstance(m, str) and mask == m) for m in masks):
        got = f"{mask.dtype} {mask.shape}" if isinstance(mask, mx.array) else repr(mask)
        raise ValueError(
            "[accelerate] expected no mask array, padding announced by the caches' prepare(...) "
            f"instead; got {got}"
        )


class GatedDeltaStep:
    """One call of a gated delta-rule layer.

    The cache advances in :meth:`finish`, so a refusal on the way leaves it as it was.

    Args:
        layer: The mlx-lm layer, for its gate parameters and head counts.
        inputs: ``[B, S, hidden]``.
        mask: Must be None: padding is known to the cache.
        cache: A :class:`~chunkdelta.cache.gated_delta_cache.GatedDeltaCache`, or None to start
            from zeros and keep nothing.

    Attributes:
        x: The inputs' tokens: the inputs themselves, or ``[1, T, hidden]`` packed if some columns
            are padding.
    """

    def __init__(self, layer: nn.Module, inputs: mx.array, mask: Any, cache: Any):
        _check(layer, mask, cache, GatedDeltaCache, (None,))
        self.layer, self.cache = layer, cache
        self.columns = inputs.shape[1]
        spans = None if cache is None else cache.spans(*inputs.shape[:2])
        self.packing = None if spans is None else packing(self.columns, spans)
        self.x = inputs if self.packing is None else self.packing.pack(inputs)
        self.cu_seqlens = None if self.packing is None else self.packing.cu_seqlens
        self.entries: list[mx.array] = []

    def convolve(self, *parts: tuple[mx.array, nn.Conv1d]) -> list[mx.array]:
        """SiLU of each part's short convolution; tails go to the first cache entries."""
        outs = []
        for x, conv in parts:
            dtype = mx.result_type(x, conv.weight)
            tail = None if self.cache is None else self.cache[len(self.entries)]
            y, tail = causal_conv1d(
                x.astype(dtype),
                conv.weight.squeeze(-1).astype(dtype),
                initial_state=None if tail is None else tail.astype(dtype),
                cu_seqlens=self.cu_seqlens,
                activation="silu",
            )
            outs.append(y)
            self.entries.append(tail)
        return outs

    def delta_rule(
        self, q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array
    ) -> mx.array:
        """The recurrence over ``q, k [.., Hk*Dk]``, ``v [.., Hv*Dv]``: ``[.., Hv, Dv]``."""
        layer = self.layer
        shape = q.shape[:2]
        g, beta = gated_delta_gates(
            a,
            b,
            layer.A_log,
            layer.dt_bias,
            allow_neg_eigval=getattr(layer, "allow_neg_eigval", False),
        )
        state = None if self.cache is None else self.cache[len(self.entries)]
        q = q.reshape(*shape, layer.num_k_heads, layer.head_k_dim)
        k = k.reshape(*shape, layer.num_k_heads, layer.head_k_dim)
        v = v.reshape(*shape, layer.num_v_heads, layer.head_v_dim)
        # mlx-lm normalises q and k with the same epsilon, on the sum of squares.
        if self.packing is None and self.columns == 1:
            out, state = gated_delta_step(
                *(x[:, 0] for x in (q, k, v, g, beta)), initial_state=state, qk_l2norm=True
            )
            out = out[:, None]
        else:
            out, state = chunk_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                initial_state=state,
                cu_seqlens=self.cu_seqlens,
                qk_l2norm=True,
            )
        self.entries.append(state)
        return out

    def finish(self, out: mx.array) -> mx.array:
        """Advance the cache; ``[B, S, hidden]`` with zeros at padding."""
        if self.cache is not None:
            for slot, entry in enumerate(self.entries):
                self.cache[slot] = entry
            self.cache.advance(self.columns)
        return out if self.packing is None else self.packing.unpack(out)


class AttentionStep:
    """One call of a softmax-attention layer.

    Args:
        layer: The mlx-lm layer, for its scale and rotary embedding.
        inputs: ``[B, S, hidden]``.
        mask: None or ``"causal"``, which mean the same: attention is causal over pages.
        cache: A :class:`~chunkdelta.cache.kv_cache.PagedKVCache`, or None to attend within the
            inputs and keep nothing.

    Attributes:
        x: As in :class:`GatedDeltaStep`.
    """

    def __init__(self, layer: nn.Module, inputs: mx.array, mask: Any, cache: Any):
        _check(layer, mask, cache, PagedKVCache, (None, "causal"))
        self.layer = layer
        self.rows, self.columns = inputs.shape[:2]
        if cache is None:
            cache = PagedKVCache.for_one_call(
                self.rows, self.columns, layer.num_key_value_heads, layer.head_dim, inputs.dtype
            )
        self.cache = cache
        spans = cache.spans(self.rows, self.columns)
        self.packing = None if spans is None else packing(self.columns, spans)
        self.x = inputs if self.packing is None else self.packing.pack(inputs)

    def attend(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Rotate, append to the pages, attend: ``[.., H, D]`` each, to ``[.., Hq, D]``."""
        rope = self.layer.rope
        if rope is not None:
            q, k = self._rotate(rope, q, k)
        shape = q.shape
        out = self.cache.update_and_attend(
            *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
            scale=self.layer.scale,
            rows=self.rows,
            columns=self.columns,
        )
        return out.reshape(shape)

    def _rotate(self, rope: nn.Module, *heads: mx.array) -> list[mx.array]:
        # The model's own rotary module, with whatever scaling it has. It counts positions along
        # axis -2 from one offset a row, so packed tokens become rows of one position each.
        if self.packing is None:
            offset = self.cache.offset
            return [rope(x.swapaxes(1, 2), offset=offset).swapaxes(1, 2) for x in heads]
        positions = self.cache.positions(self.columns)
        return [rope(x[0][:, :, None], offset=positions)[:, :, 0][None] for x in heads]

    def finish(self, out: mx.array) -> mx.array:
        """``[B, S, hidden]`` with zeros at padding."""
        return out if self.packing is None else self.packing.unpack(out)
