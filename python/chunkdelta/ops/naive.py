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


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    *,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    cu_seqlens_q: ArrayLike,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
) -> tuple[F64, F64]:
    """o = softmax(scale q K^T) V and its log-sum-exp; pages are [pages, Hkv, page_size, D]."""
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (q, k_pages, v_pages))
    block_table, seq_lens, cu_q = (
        np.asarray(x, np.int64) for x in (block_table, seq_lens, cu_seqlens_q)
    )
    T, Hq, D = q.shape
    Hkv = k_pages.shape[1]
    scale = D**-0.5 if scale is None else scale
    o, lse = np.zeros((T, Hq, D)), np.full((T, Hq), -np.inf)
    for n, length in enumerate(seq_lens):
        rows = slice(cu_q[n], cu_q[n + 1])
        queries = cu_q[n + 1] - cu_q[n]
        used = block_table[n, : -(-length // k_pages.shape[2])]
        # [keys, Hkv, D] in order of the block table
        k, v = (
            x[used].transpose(0, 2, 1, 3).reshape(-1, Hkv, D)[:length] for x in (k_pages, v_pages)
        )
        position, key = np.arange(queries)[:, None] + length - queries, np.arange(length)
        visible = np.ones((queries, length), bool)
        if causal:
            visible &= key <= position
        if window is not None:
            visible &= key > position - window
        for h in range(Hq):
            kv = h // (Hq // Hkv)
            s = scale * q[rows, h] @ k[:, kv].T
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            s[~visible] = -np.inf
            if sinks is not None:  # one more key, without a value
                s = np.concatenate([s, np.full((queries, 1), np.asarray(sinks)[h])], axis=1)
            m = s.max(axis=1, keepdims=True, initial=-np.inf)
            p = np.exp(s - np.where(m == -np.inf, 0, m))
            total = p.sum(axis=1)
            with np.errstate(divide="ignore"):
                lse[rows, h] = m[:, 0] + np.log(total)
            o[rows, h] = p[:, :length] @ v[:, kv] / np.where(total == 0, 1, total)[:, None]
    return o, lse


def merge_states(outs: ArrayLike, lses: ArrayLike) -> tuple[F64, F64]:
    """Attention over the union of disjoint key sets from the results over each of them."""
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    m = lses.max(axis=0)
    weights = np.exp(lses - np.where(m == -np.inf, 0, m))
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = m + np.log(total)
    weights /= np.where(total == 0, 1, total)
    return (weights[..., None] * outs).sum(axis=0), lse
