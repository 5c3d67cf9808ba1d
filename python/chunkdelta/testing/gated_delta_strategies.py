"""Hypothesis strategies of gated delta calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from chunkdelta.ops import naive
from chunkdelta.testing.compare import F64, to_float64


@dataclass
class GatedDeltaCall:
    """Arguments of ``chunk_gated_delta_rule`` from a seed; masked rows hold NaN.

    Attributes:
        batch: rows of the batch; 1 with ``lengths``.
        tokens: rows of a sequence, without ``lengths``.
        lengths: rows of each packed sequence, or ``None``.
        ratio: value heads of a key head.
        beta_max: betas are uniform in ``[0, beta_max]``.
        repeated: all keys close to one key.
        masked: share of masked rows.
        strided: q, k and v are views of one wide array, as a fused projection leaves them.
    """

    batch: int = 1
    tokens: int = 40
    lengths: list[int] | None = None
    num_k_heads: int = 1
    ratio: int = 1
    head_k_dim: int = 16
    head_v_dim: int = 16
    dtype: mx.Dtype = mx.float32
    beta_max: float = 1.0
    repeated: bool = False
    masked: float = 0.0
    strided: bool = False
    initial_state: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the op."""
        rng = np.random.default_rng(self.seed)
        T = self.tokens if self.lengths is None else sum(self.lengths)
        B, Hk, Hv = self.batch, self.num_k_heads, self.num_k_heads * self.ratio
        Dk, Dv = self.head_k_dim, self.head_v_dim

        def unit(x: F64) -> F64:
            return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), np.float64)

        q, k = unit(rng.standard_normal((B, T, Hk, Dk))), unit(rng.standard_normal((B, T, Hk, Dk)))
        if self.repeated:
            k = unit(unit(rng.standard_normal((1, 1, Hk, Dk))) + 0.01 * k)
        arrays = {
            "q": q,
            "k": k,
            "v": rng.standard_normal((B, T, Hv, Dv)),
            "g": -(10.0 ** rng.uniform(-5, 1.5, (B, T, Hv))),  # half-lives of 0.02 to 70,000 rows
            "beta": rng.uniform(0, self.beta_max, (B, T, Hv)),
        }
        arguments: dict[str, Any] = dict(self.options)
        if self.masked:
            mask = rng.uniform(size=(B, T)) >= self.masked
            arguments["mask"] = mx.array(mask)
            for a in arrays.values():
                a[~mask] = np.nan
        for name, a in arrays.items():
            dtype = self.dtype if name in "qkv" else mx.float32
            arguments[name] = mx.array(a.astype(np.float32)).astype(dtype)
        if self.strided and T:
            parts = [arguments[name].reshape(B, T, -1) for name in "qkv"]
            wide = mx.concatenate(parts, axis=-1)
            cuts = np.cumsum([p.shape[-1] for p in parts])[:-1].tolist()
            for name, part in zip("qkv", mx.split(wide, cuts, axis=-1), strict=True):
                arguments[name] = part.reshape(arguments[name].shape)
        if self.lengths is not None:
            arguments["cu_seqlens"] = [0, *np.cumsum(self.lengths).tolist()]
        if self.initial_state:
            N = B if self.lengths is None else len(self.lengths)
            state = rng.standard_normal((N, Hv, Dv, Dk)).astype(np.float32)
            arguments["initial_state"] = mx.array(state)
        return arguments

    @staticmethod
    def oracle(arguments: dict[str, Any]) -> tuple[F64, ...]:
        """The same call in float64, from the rounded inputs."""
        call: dict[str, Any] = {
            name: to_float64(a) if isinstance(a, mx.array) else a
            for name, a in arguments.items()
            if name != "chunk_size"
        }
        return naive.chunk_gated_delta_rule(**call)


@st.composite
def gated_delta_calls(draw: st.DrawFn) -> GatedDeltaCall:
    """Calls of all shapes, dtypes and options; lengths from 0 over chunk edges to a few chunks."""
    length = st.integers(0, 6) | st.integers(0, 70) | st.sampled_from([15, 16, 17, 63, 64, 65])
    ragged = draw(st.booleans())
    dim = st.integers(1, 10).map(lambda n: 4 * n) | st.sampled_from([64, 128, 256])
    options: dict[str, Any] = {
        "chunk_size": draw(st.sampled_from([None, 16, 32, 64])),
        "qk_l2norm": draw(st.booleans()),
        "scale": draw(st.none() | st.just(1.0)),
    }
    if draw(st.booleans()):
        options["checkpoint_every"] = draw(st.integers(1, 40))
    return GatedDeltaCall(
        batch=1 if ragged else draw(st.integers(1, 3)),
        tokens=draw(length),
        lengths=draw(st.lists(length, min_size=1, max_size=4)) if ragged else None,
        num_k_heads=draw(st.integers(1, 3)),
        ratio=draw(st.integers(1, 3)),
        head_k_dim=draw(dim),
        head_v_dim=draw(dim),
        dtype=draw(st.sampled_from([mx.float32, mx.float16, mx.bfloat16])),
        repeated=draw(st.booleans()),
        masked=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        strided=draw(st.booleans()),
        initial_state=draw(st.booleans()),
        options=options,
        seed=draw(st.integers(0, 2**32 - 1)),
    )
