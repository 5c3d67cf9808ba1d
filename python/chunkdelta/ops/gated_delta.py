"""The gated delta rule: whole prompts in chunks, single tokens, and the gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chunkdelta import _ext

if TYPE_CHECKING:
    from chunkdelta.cache.state_pool import StatePool

HostInts = Sequence[int] | NDArray[np.integer[Any]] | mx.array


def chunk_gated_delta_rule(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    *,
    scale: float | None = None,
    initial_state: mx.array | None = None,
    cu_seqlens: HostInts | None = None,
    mask: mx.array | None = None,
    state_pool: StatePool | None = None,
    state_indices: HostInts | None = None,
    checkpoint_every: int | None = None,
    qk_l2norm: bool = False,
    chunk_size: int | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[Any, ...]:
    """Run the gated delta rule over whole sequences, a chunk of rows at a time.

    Per value head, with the state ``S`` ``[Dk, Dv]`` of its sequence (Gated Delta Networks, arXiv
    2412.06464, eq. 10)::

        S = exp(g[t]) * S
        S = S + beta[t] * outer(k[t], v[t] - S.T @ k[t])
        o[t] = scale * S.T @ q[t]

    computed chunk-parallel: of 64 rows at a time all products are matrix products. Everything
    inside is float32 whatever the dtype of the activations, the log gates are summed in two
    floats, and the triangular systems are solved by substitution, so that near-repeated keys and
    gates of -30 among gates of -0.01 cost no digits. The chunk size changes speed, never meaning;
    results are the same bits for any number of threads. There is no backward pass.

    Args:
        q: queries ``[B, T, Hk, Dk]``, or ``[1, T, Hk, Dk]`` with ``cu_seqlens``; float32, float16
            or bfloat16; any strides; ``Dk`` a multiple of 4 up to 256; ``T`` may be 0.
        k: keys of ``q``'s shape and dtype. Normalised by the caller, or by ``qk_l2norm``.
        v: values ``[B, T, Hv, Dv]`` of ``q``'s dtype; ``Dv`` a multiple of 4 up to 256; ``Hv`` a
            multiple of ``Hk``: value head ``h`` reads key head ``h // (Hv // Hk)``.
        g: float32 ``[B, T, Hv]``, the LOG of the decay, at most 0 (from
            :func:`gated_delta_gates`); below -128, also at ``-inf``, the (finite) state is
            forgotten.
        beta: writing strength ``[B, T, Hv]`` in ``[0, 1]``, or ``[0, 2]`` with negative
            eigenvalues; float32 or of ``q``'s dtype.
        scale: factor on the queries. Default: ``None``, ``Dk ** -0.5``.
        initial_state: float32 ``[N, Hv, Dv, Dk]``, the state of each of the N sequences before
            its first row. Default: ``None``, zeros.
        cu_seqlens: offsets ``[N+1]`` of N packed sequences in ``T``, from 0 to ``T``, on the host
            (an ``mx.array`` costs one eval and is refused while tracing). Default: ``None``: each
            of the B rows of the batch is one sequence, N = B.
        mask: bool ``[B, T]``; where it is false the row is an identity step: it is not read (it
            may hold NaN), the state does not see it, and its output is 0. Default: ``None``, all
            rows count.
        state_pool: a :class:`chunkdelta.StatePool` whose slots hold the states instead of
            ``initial_state``; it is written in place. Default: ``None``.
        state_indices: the slot ``[N]`` of each sequence, all different, on the host, with
            ``state_pool``. Default: ``None``.
        checkpoint_every: also return a copy of the state after every so many rows of each
            sequence, counted from its first row in this call, masked rows included. Chunks are
            cut there. Default: ``None``, no copies.
        qk_l2norm: divide each row of ``q`` and ``k`` by ``sqrt(sum of squares + 1e-6)``, in
            float32. Default: ``False``.
        chunk_size: rows of a chunk: 16, 32 or 64. Default: ``None``, the fastest.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        ``(o, state)``, with ``checkpoint_every`` ``(o, state, checkpoints)``: ``o`` ``[B, T, Hv,
        Dv]`` of ``q``'s dtype; ``state`` float32 ``[N, Hv, Dv, Dk]`` after each sequence's last
        row, or ``None`` with a pool; ``checkpoints`` float32 ``[n, Hv, Dv, Dk]``, those of the
        first sequence in order, then those of the second ...

    Raises:
        ValueError: shapes, dtypes, offsets or slots that do not fit, or a use of the pool that
            :class:`chunkdelta.StatePool` refuses. Nothing has been allocated or changed then.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> q, k = mx.random.normal((2, 1, 100, 2, 64))
        >>> v = mx.random.normal((1, 100, 4, 64))
        >>> g, beta = -mx.random.uniform(shape=(1, 100, 4)), mx.random.uniform(shape=(1, 100, 4))
        >>> o, state = chunkdelta.chunk_gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)
        >>> o.shape, state.shape
        ((1, 100, 4, 64), (1, 4, 64, 64))
    """
    arguments = (scale, initial_state, cu_seqlens, mask)
    options = (checkpoint_every, qk_l2norm, chunk_size, stream)
    if state_pool is None:
        return tuple(
            _ext.chunk_gated_delta_rule(q, k, v, g, beta, *arguments, None, state_indices, *options)
        )

    def build(pool: mx.array) -> tuple[mx.array, ...]:
        o, written, *checkpoints = _ext.chunk_gated_delta_rule(
            q, k, v, g, beta, *arguments, pool, state_indices, *options
        )
        return written, o, *checkpoints

    o, *checkpoints = state_pool.update("chunk_gated_delta_rule", build)
    return o, None, *checkpoints


def gated_delta_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    *,
    scale: float | None = None,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    state_pool: StatePool | None = None,
    state_indices: HostInts | None = None,
    qk_l2norm: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[Any, ...]:
    """Advance each sequence of a batch by one token.

    The recurrence of :func:`chunk_gated_delta_rule` with T = 1 and no row axis, for decoding: one
    pass over the states, at the speed of memory.

    Args:
        q: queries ``[B, Hk, Dk]``; float32, float16 or bfloat16; any strides; ``Dk`` a multiple
            of 4 up to 256.
        k: keys of ``q``'s shape and dtype.
        v: values ``[B, Hv, Dv]`` of ``q``'s dtype; ``Dv`` a multiple of 4 up to 256; ``Hv`` a
            multiple of ``Hk``.
        g: float32 ``[B, Hv]``, the LOG of the decay, at most 0.
        beta: writing strength ``[B, Hv]`` in ``[0, 1]`` or ``[0, 2]``; float32 or of ``q``'s
            dtype.
        scale: factor on the queries. Default: ``None``, ``Dk ** -0.5``.
        initial_state: float32 ``[B, Hv, Dv, Dk]``. Default: ``None``, zeros.
        mask: bool ``[B]``; where it is false the state stays and the output is 0. Default:
            ``None``.
        state_pool: a :class:`chunkdelta.StatePool` written in place instead. Default: ``None``.
        state_indices: the slot ``[B]`` of each sequence, all different, on the host, with
            ``state_pool``. Default: ``None``.
        qk_l2norm: divide ``q`` and ``k`` by ``sqrt(sum of squares + 1e-6)``. Default: ``False``.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        ``(o, state)``: ``o`` ``[B, Hv, Dv]`` of ``q``'s dtype; ``state`` float32 ``[B, Hv, Dv,
        Dk]``, or ``None`` with a pool.

    Raises:
        ValueError: shapes, dtypes or slots that do not fit, or a use of the pool that
            :class:`chunkdelta.StatePool` refuses.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> q, k, v = mx.random.normal((3, 1, 2, 64))
        >>> pool = chunkdelta.StatePool(8, num_v_heads=2, head_v_dim=64, head_k_dim=64)
        >>> g, beta = mx.array([[-0.1, -0.2]]), mx.array([[0.5, 0.9]])
        >>> o, _ = chunkdelta.gated_delta_step(
        ...     q, k, v, g, beta, state_pool=pool, state_indices=[3], qk_l2norm=True
        ... )
        >>> o.shape
        (1, 2, 64)
    """
    if state_pool is None:
        return tuple(
            _ext.gated_delta_step(
                q, k, v, g, beta, scale, initial_state, mask, None, state_indices, qk_l2norm, stream
            )
        )

    def build(pool: mx.array) -> tuple[mx.array, ...]:
        o, written = _ext.gated_delta_step(
            q, k, v, g, beta, scale, initial_state, mask, pool, state_indices, qk_l2norm, stream
        )
        return written, o

    (o,) = state_pool.update("gated_delta_step", build)
    return o, None


def gated_delta_gates(
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute the log gates and writing strengths of a gated delta layer, in float32.

    ``g = -exp(A_log) * softplus(a + dt_bias)``, with ``lower_bound`` instead ``g = lower_bound *
    sigmoid(exp(A_log) * (a + dt_bias))``; ``beta = sigmoid(b)``, doubled with
    ``allow_neg_eigval``. The gates stay logs and stay float32: a decay of 0.999 rounded to
    bfloat16 is 1.

    Args:
        a: ``[..., Hv]``; float32, float16 or bfloat16.
        b: of ``a``'s shape and dtype.
        A_log: ``[Hv]``, of any of these dtypes.
        dt_bias: ``[Hv]``, of any of these dtypes.
        lower_bound: least log gate, finite and negative (Kimi-Linear). Default: ``None``.
        allow_neg_eigval: betas in ``[0, 2]`` instead of ``[0, 1]``. Default: ``False``.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        ``(g, beta)``, float32 of ``a``'s shape.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> a, b = mx.random.normal((2, 1, 5, 4))
        >>> g, beta = chunkdelta.gated_delta_gates(a, b, mx.zeros(4), mx.ones(4))
        >>> g.dtype, beta.shape
        (mlx.core.float32, (1, 5, 4))
    """
    g, beta = _ext.gated_delta_gates(a, b, A_log, dt_bias, lower_bound, allow_neg_eigval, stream)
    return g, beta


def _explain(
    *,
    tokens: int = 1,
    batch: int = 1,
    cu_seqlens: Sequence[int] | None = None,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    chunk_size: int | None = None,
    checkpoint_every: int | None = None,
    **_: Any,
) -> tuple[str, str, int]:
    """Kernels that run on the CPU for such a call, the reason, and the workspace in bytes."""
    lengths = [tokens] * batch if cu_seqlens is None else np.diff(cu_seqlens).tolist()
    kernels, why, workspace = _ext.explain_gated_delta(
        num_k_heads,
        num_v_heads,
        head_k_dim,
        head_v_dim,
        lengths,
        chunk_size or _ext.GATED_DELTA_DEFAULT_CHUNK,
        checkpoint_every or 0,
    )
    return kernels, why, workspace
