"""Depthwise causal convolution over time with carried state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chunkdelta import _ext


def causal_conv1d(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    initial_state: mx.array | None = None,
    cu_seqlens: Sequence[int] | NDArray[np.integer] | mx.array | None = None,
    mask: mx.array | None = None,
    activation: Literal["silu"] | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Convolve each channel with its own K taps over the rows up to and including its own.

    The short convolution in front of a gated delta layer: ``y[t] = act(bias + sum_k weight[:, k] *
    x[t - K + 1 + k])``. Rows before the first one come from ``initial_state`` (zeros without
    it); the last K-1 rows are returned, for the next chunk to start from. Sums are float32
    whatever the dtype, and their order does not depend on where a chunk is cut: the outputs of
    a sequence run in one call or in many are the same bit for bit.

    Args:
        x: rows ``[B, T, C]``, or ``[1, T, C]`` with ``cu_seqlens``; float32, float16 or
            bfloat16; ``T`` may be 0.
        weight: taps ``[C, K]`` of ``x``'s dtype, ``K`` in 2..8; tap ``K-1`` multiplies the
            newest row. (``nn.Conv1d`` of MLX holds them as ``[C, K, 1]``.)
        bias: ``[C]`` of ``x``'s dtype. Default: ``None``, zeros.
        initial_state: the K-1 rows before the first one, oldest first, ``[N, K-1, C]`` of
            ``x``'s dtype. Default: ``None``, zeros.
        cu_seqlens: offsets ``[N+1]`` of N packed sequences in ``T``, from 0 to ``T``, on the
            host (an ``mx.array`` costs one eval and is refused while tracing). Default:
            ``None``: each of the B rows of the batch is one sequence, N = B.
        mask: bool ``[B, T]`` of a padded batch, padding at either end. Where it is false the
            row does not exist: it is not read (it may hold NaN), the state does not see it, and
            its output is 0. Not together with ``cu_seqlens``. Default: ``None``, all rows.
        activation: ``"silu"`` or ``None``. Default: ``None``.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        ``(y, state)``: ``y`` of ``x``'s shape, ``state`` ``[N, K-1, C]``, both of ``x``'s dtype.
        A sequence of fewer than K-1 rows keeps the newest rows of its initial state; one
        without rows returns it unchanged.

    Raises:
        ValueError: shapes, dtypes, offsets or an activation that do not fit.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> x, weight = mx.random.normal((1, 7, 32)), mx.random.normal((32, 4))
        >>> y, state = chunkdelta.causal_conv1d(x, weight, activation="silu")
        >>> a, carried = chunkdelta.causal_conv1d(x[:, :5], weight, activation="silu")
        >>> b, _ = chunkdelta.causal_conv1d(
        ...     x[:, 5:], weight, initial_state=carried, activation="silu"
        ... )
        >>> mx.array_equal(y, mx.concatenate([a, b], axis=1)).item()
        True
    """
    if activation not in (None, "silu"):
        raise ValueError(
            f"[causal_conv1d] expected activation in {{None, 'silu'}}; got {activation!r}"
        )
    y, state = _ext.causal_conv1d(
        x, weight, bias, initial_state, cu_seqlens, mask, activation == "silu", stream
    )
    return y, state
