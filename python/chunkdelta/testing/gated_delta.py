"""The textbook chunk form of the gated delta rule, and inputs that are hard for chunk forms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def textbook_chunk_form(
    q: Any, k: Any, v: Any, g: Any, beta: Any, *, initial_state: Any = None, chunk_size: int = 64
) -> tuple[F32, F32]:
    """The published chunk form (arXiv 2412.06464, section 3.3) in plain float32.

    Forms W and U, cumulates the log gates in one float and solves with a triangular solver, as
    public implementations do: what a float32 kernel is compared with.

    Args:
        q: ``[B, T, Hk, Dk]``, scaled by ``Dk ** -0.5`` here.
        k: ``[B, T, Hk, Dk]``.
        v: ``[B, T, Hv, Dv]``.
        g: log gates ``[B, T, Hv]``.
        beta: ``[B, T, Hv]``.
        initial_state: ``[B, Hv, Dv, Dk]``. Default: ``None``, zeros.
        chunk_size: rows of a chunk. Default: ``64``.

    Returns:
        ``o`` ``[B, T, Hv, Dv]`` and the state ``[B, Hv, Dv, Dk]``, float32.
    """
    f32 = np.float32
    q, k, v, g, beta = (np.asarray(a, f32) for a in (q, k, v, g, beta))
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    q, k = np.repeat(q, Hv // Hk, axis=2) * f32(Dk**-0.5), np.repeat(k, Hv // Hk, axis=2)
    q, k, v, g, beta = (np.moveaxis(a, 2, 1) for a in (q, k, v, g, beta))  # heads before rows
    S = np.zeros((B, Hv, Dk, Dv), f32)
    if initial_state is not None:
        S = np.swapaxes(np.asarray(initial_state, f32), -1, -2).copy()
    o = np.zeros((B, Hv, T, Dv), f32)
    for t in range(0, T, chunk_size):
        rows = slice(t, min(t + chunk_size, T))
        qc, kc, vc, bc = q[:, :, rows], k[:, :, rows], v[:, :, rows], beta[:, :, rows, None]
        G = np.cumsum(np.maximum(g[:, :, rows], f32(-128)), axis=-1, dtype=f32)
        n = G.shape[-1]
        lower = np.tril(np.ones((n, n), bool))
        difference = np.where(lower, G[..., :, None] - G[..., None, :], f32(-np.inf))
        gates, gamma = np.exp(difference), np.exp(G)[..., None]
        A = np.tril(bc * gates * (kc @ np.swapaxes(kc, -1, -2)), -1) + np.eye(n, dtype=f32)
        right = np.concatenate([bc * gamma * kc, bc * vc], axis=-1)
        solved = np.linalg.solve(A, right)
        W, U = solved[..., :Dk], solved[..., Dk:]
        Vd = U - W @ S
        o[:, :, rows] = gamma * (qc @ S) + (gates * (qc @ np.swapaxes(kc, -1, -2))) @ Vd
        decay = np.exp(G[..., -1:] - G)[..., None]
        S = gamma[..., -1:, :] * S + np.swapaxes(kc, -1, -2) @ (decay * Vd)
    return np.moveaxis(o, 1, 2), np.swapaxes(S, -1, -2)


def recurrence(
    q: Any, k: Any, v: Any, g: Any, beta: Any, dtype: Any = np.float64
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rule token by token for long sequences: the oracle's formulas, all heads in one product.

    Takes what :func:`textbook_chunk_form` takes, from a zero state, with Hk = Hv.
    """
    q, k, v, g, beta = (np.asarray(a, dtype) for a in (q, k, v, g, beta))
    B, T, H, Dk = q.shape
    Dv = v.shape[-1]
    S = np.zeros((B, H, Dv, Dk), dtype)
    o = np.zeros((B, T, H, Dv), dtype)
    decay = np.exp(g)[..., None, None]
    scale = dtype(Dk**-0.5)
    for t in range(T):
        S *= decay[:, t]
        d = beta[:, t, :, None] * (v[:, t] - (S @ k[:, t, :, :, None])[..., 0])
        S += d[..., None] * k[:, t, :, None, :]
        o[:, t] = scale * (S @ q[:, t, :, :, None])[..., 0]
    return o, S
