"""Every op in float64 NumPy, written to be read beside the paper: the oracle of all tests.

The functions are named like the ops and take the same arguments, as NumPy arrays.
"""

from __future__ import annotations

import itertools
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


def chunk_gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: Sequence[int] | None = None,
    mask: ArrayLike | None = None,
    checkpoint_every: int | None = None,
    qk_l2norm: bool = False,
) -> tuple[F64, ...]:
    """The recurrence itself, token by token (Gated Delta Networks, arXiv 2412.06464, eq. 10)."""
    q, k, v = np.array(q, np.float64), np.array(k, np.float64), np.array(v, np.float64)
    g, beta = np.array(g, np.float64), np.array(beta, np.float64)
    if qk_l2norm:
        q /= np.sqrt(np.sum(q * q, -1, keepdims=True) + 1e-6)
        k /= np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    scale = Dk**-0.5 if scale is None else scale
    q, k = np.repeat(q, Hv // Hk, axis=2), np.repeat(k, Hv // Hk, axis=2)
    if cu_seqlens is None:
        sequences = [(b, 0, T) for b in range(B)]
    else:
        sequences = [(0, begin, end) for begin, end in itertools.pairwise(cu_seqlens)]
    counts = np.ones((B, T), bool) if mask is None else np.array(mask, bool)
    states = np.zeros((len(sequences), Hv, Dv, Dk))
    if initial_state is not None:
        states[:] = np.array(initial_state, np.float64)
    o, checkpoints = np.zeros((B, T, Hv, Dv)), []
    for S, (b, begin, end) in zip(states, sequences, strict=True):
        for t in range(begin, end):
            if counts[b, t]:
                S *= np.exp(g[b, t])[:, None, None]
                error = v[b, t] - np.einsum("hvk,hk->hv", S, k[b, t])
                S += (beta[b, t][:, None] * error)[:, :, None] * k[b, t][:, None, :]
                o[b, t] = scale * np.einsum("hvk,hk->hv", S, q[b, t])
            if checkpoint_every and (t + 1 - begin) % checkpoint_every == 0:
                checkpoints.append(S.copy())
    if checkpoint_every:
        return o, states, np.array(checkpoints).reshape(-1, Hv, Dv, Dk)
    return o, states


def gated_delta_step(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    qk_l2norm: bool = False,
) -> tuple[F64, F64]:
    """One token of each sequence: the rule above without its row axis."""
    o, state = chunk_gated_delta_rule(
        *(np.array(a, np.float64)[:, None] for a in (q, k, v, g, beta)),
        scale=scale,
        initial_state=initial_state,
        mask=None if mask is None else np.array(mask)[:, None],
        qk_l2norm=qk_l2norm,
    )
    return o[:, 0], state


def gated_delta_gates(
    a: ArrayLike,
    b: ArrayLike,
    A_log: ArrayLike,
    dt_bias: ArrayLike,
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[F64, F64]:
    """Log gates and betas, as mlx-lm's gated_delta.py defines them, before rounding."""
    x = np.array(a, np.float64) + np.array(dt_bias, np.float64)
    rate = np.exp(np.array(A_log, np.float64))

    def sigmoid(x: F64) -> F64:
        return np.exp(-np.logaddexp(0, -x))

    g = -rate * np.logaddexp(0, x) if lower_bound is None else lower_bound * sigmoid(rate * x)
    beta = sigmoid(np.array(b, np.float64))
    return g, 2 * beta if allow_neg_eigval else beta
