"""Every op in float64 NumPy, written to be read beside the paper: the oracle of all tests.

The functions are named like the ops and take the same arguments, as NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


def rope(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    dims: int | None = None,
    base: float = 10000.0,
    freqs: ArrayLike | None = None,
    scale: float = 1.0,
    traditional: bool = False,
    mrope_sections: Sequence[int] | None = None,
    mrope_interleaved: bool = True,
) -> F64:
    """Turn pair i of every head by positions * scale / freqs[i] radians (RoFormer, eq. 34)."""
    x = np.array(x, np.float64)
    positions = np.asarray(positions, np.float64)
    dims = x.shape[-1] if dims is None else dims
    if freqs is None:
        freqs = base ** (np.arange(0, dims, 2) / dims)
    # Models are trained with the inverse frequency rounded to float32, so that is its definition.
    inv_freq = (scale / np.asarray(freqs, np.float64)).astype(np.float32).astype(np.float64)
    if mrope_sections is None:
        angles = positions[..., None] * inv_freq
    else:
        angles = positions[0][..., None] * inv_freq
        begin = 0
        for axis, n in enumerate(mrope_sections):
            pairs = slice(axis, 3 * n, 3) if mrope_interleaved else slice(begin, begin + n)
            if axis > 0:
                angles[..., pairs] = (positions[axis][..., None] * inv_freq)[..., pairs]
            begin += n
    cos, sin = np.cos(angles)[..., None, :], np.sin(angles)[..., None, :]
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2))
        if traditional
        else (slice(0, dims // 2), slice(dims // 2, dims))
    )
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * cos - b * sin
    x[..., second] = b * cos + a * sin
    return x


def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    initial_state: ArrayLike | None = None,
    cu_seqlens: Sequence[int] | None = None,
    mask: ArrayLike | None = None,
    activation: str | None = None,
) -> tuple[F64, F64]:
    """Each row: taps times the K rows up to it, the rows before the first one being the state."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    B, T, C = x.shape
    K = weight.shape[1]
    exists = np.ones((B, T), bool) if mask is None else np.asarray(mask, bool)
    if cu_seqlens is None:
        cu_seqlens = range(0, B * T + 1, T) if T else [0] * (B + 1)
    rows, exists = x.reshape(B * T, C), exists.reshape(B * T)
    y = np.zeros_like(rows)
    N = len(cu_seqlens) - 1
    state = (
        np.zeros((N, K - 1, C)) if initial_state is None else np.array(initial_state, np.float64)
    )
    for n in range(N):
        for t in range(cu_seqlens[n], cu_seqlens[n + 1]):
            if not exists[t]:
                continue
            window = np.concatenate([state[n], rows[t : t + 1]])  # [K, C]
            a = np.sum(weight.T * window, axis=0) + (0.0 if bias is None else np.asarray(bias))
            y[t] = a / (1.0 + np.exp(-a)) if activation == "silu" else a
            state[n] = window[1:]
    return y.reshape(B, T, C), state
