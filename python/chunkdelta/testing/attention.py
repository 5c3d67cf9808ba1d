"""Paged batches for tests: scattered pages, poisoned slots, the oracle and the plain computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chunkdelta.cache.pages import KVPages
from chunkdelta.ops import append_kv, naive

F64 = NDArray[np.float64]


def decode_slab(slab: mx.array, head_dim: int) -> F64:
    """The values of a slab ``[pages, Hkv, page_size, D]``, read independently of the extension."""
    if slab.dtype != mx.uint8:
        return np.array(slab.astype(mx.float32), np.float64)
    blocks = np.array(slab).reshape(*slab.shape[:3], -1, 34)  # q8_0
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        values = scale * blocks[..., 2:].view(np.int8)
    return values.reshape(*slab.shape[:3], -1)[..., :head_dim]


@dataclass
class PagedBatch:
    """Random packed sequences in a pool whose unused slots all hold NaN."""

    q_lens: Sequence[int]
    seq_lens: Sequence[int]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: mx.Dtype = mx.float32
    k_format: str = "f32"
    v_format: str = "f32"
    spread: float = 1.0  # of the queries: large values make the softmax sharp
    slabs: int = 1
    seed: int = 0
    pages: KVPages = field(init=False)
    q: mx.array = field(init=False)
    block_table: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        """Fill the pool: NaN everywhere, then the keys of each sequence."""
        rng = np.random.default_rng(self.seed)
        size, heads, D = self.page_size, self.num_kv_heads, self.head_dim
        needed = [-(-n // size) for n in self.seq_lens]
        num_pages = sum(needed) + 2
        per_slab = -(-num_pages // self.slabs)
        self.pages = KVPages(
            per_slab, heads, D, page_size=size, k_format=self.k_format, v_format=self.v_format
        )
        for _ in range(self.slabs - 1):
            self.pages.grow(per_slab)
        poison = mx.full((self.pages.num_slots, heads, D), float("nan"), mx.float32)
        append_kv(self.pages, poison, poison, np.arange(self.pages.num_slots))
        order = rng.permutation(self.pages.num_pages)
        self.block_table = np.full((len(needed), max([*needed, 1])), -1, np.int32)
        for n, length in enumerate(self.seq_lens):
            order, own = order[needed[n] :], order[: needed[n]]
            self.block_table[n, : needed[n]] = own
            k, v = (
                mx.array(rng.standard_normal((length, heads, D)).astype(np.float32)).astype(
                    self.dtype
                )
                for _ in range(2)
            )
            at = np.arange(length)
            append_kv(self.pages, k, v, own[at // size] * size + at % size)
        q = rng.standard_normal((sum(self.q_lens), self.num_q_heads, D)) * self.spread
        self.q = mx.array(q.astype(np.float32)).astype(self.dtype)

    @property
    def cu_seqlens_q(self) -> list[int]:
        """Offsets of the sequences' queries."""
        return [0, *np.cumsum(self.q_lens).tolist()]

    @property
    def metadata(self) -> dict[str, Any]:
        """The host metadata as keyword arguments of the op."""
        return {
            "block_table": self.block_table,
            "seq_lens": list(self.seq_lens),
            "cu_seqlens_q": self.cu_seqlens_q,
        }

    def naive(self, **options: Any) -> tuple[F64, F64]:
        """``(o, lse)`` in float64 on the values that the pool holds."""
        arrays = self.pages.arrays
        k, v = (
            np.concatenate([decode_slab(a, self.head_dim) for a in arrays[i::2]]) for i in (0, 1)
        )
        q = np.array(self.q.astype(mx.float32))
        return naive.paged_attention(q, k, v, **self.metadata, **options)

    def plain(self, **options: Any) -> F64:
        """The unfused computation in MLX ops and in the queries' dtype, softmax in float32."""
        arrays = self.pages.arrays
        k_pages, v_pages = (
            np.concatenate([decode_slab(a, self.head_dim) for a in arrays[i::2]]) for i in (0, 1)
        )
        group = self.num_q_heads // self.num_kv_heads
        causal, window = options.get("causal", True), options.get("window")
        softcap, sinks = options.get("softcap"), options.get("sinks")
        scale = options.get("scale") or self.head_dim**-0.5
        out = []
        for n, length in enumerate(self.seq_lens):
            begin, end = self.cu_seqlens_q[n : n + 2]
            if begin == end:
                continue
            used = self.block_table[n, : -(-length // self.page_size)]
            k, v = (
                mx.array(
                    x[used]
                    .transpose(1, 0, 2, 3)
                    .reshape(self.num_kv_heads, -1, self.head_dim)[:, :length]
                ).astype(self.dtype)
                for x in (k_pages, v_pages)
            )
            k, v = mx.repeat(k, group, axis=0), mx.repeat(v, group, axis=0)
            q = self.q[begin:end].transpose(1, 0, 2)
            s = (q * scale) @ k.transpose(0, 2, 1)
            if softcap is not None:
                s = softcap * mx.tanh(s / softcap)
            position = mx.arange(end - begin)[:, None] + length - (end - begin)
            key = mx.arange(length)
            visible = mx.ones((end - begin, length), mx.bool_)
            if causal:
                visible = visible & (key <= position)
            if window is not None:
                visible = visible & (key > position - window)
            s = mx.where(visible, s, mx.array(-mx.inf, s.dtype))
            if sinks is not None:
                column = mx.broadcast_to(
                    mx.array(sinks).astype(s.dtype)[:, None, None], (*s.shape[:2], 1)
                )
                s = mx.concatenate([s, column], axis=-1)
            p = mx.softmax(s, axis=-1, precise=True)[..., :length]
            p = mx.where(visible.any(axis=-1)[:, None], p, mx.array(0, p.dtype))
            out.append((p @ v).transpose(1, 0, 2))
        shape = (0, self.num_q_heads, self.head_dim)
        whole = mx.concatenate(out) if out else mx.zeros(shape)
        return np.array(whole.astype(mx.float32), np.float64)
