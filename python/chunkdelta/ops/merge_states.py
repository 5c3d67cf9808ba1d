"""Partial attention results over disjoint key sets into one."""

from __future__ import annotations

import mlx.core as mx

from chunkdelta import _ext


def merge_states(
    outs: mx.array,
    lses: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Merge attention over disjoint key sets into attention over their union.

    ``lse = log(sum_s exp(lse_s))`` and ``o = sum_s exp(lse_s - lse) o_s``, which is associative
    and commutative (FlashInfer, arXiv 2501.01005, section 3.1.2; its LSE is base 2, ours is
    natural). So a shared prefix can be attended once for many sequences, or keys be split over
    calls. With ``sinks``, give them to one of the calls only: they count into its LSE. Weights
    and sums are float32 inside.

    Args:
        outs: outputs over each key set ``[S, T, Hq, D]``; float32, float16 or bfloat16,
            ``S >= 1``.
        lses: their log-sum-exps ``[S, T, Hq]``, float32, natural log; -inf where a query saw no
            key, whose output is then not read.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        ``(o, lse)``: ``o [T, Hq, D]`` in the dtype of ``outs``, ``lse [T, Hq]`` float32. Rows
        that saw no key in any set are 0 with LSE -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> outs, lses = mx.random.normal((2, 5, 4, 64)), mx.zeros((2, 5, 4))
        >>> o, lse = chunkdelta.merge_states(outs, lses)
        >>> mx.allclose(o, outs.mean(axis=0), atol=1e-6).item(), round(lse[0, 0].item(), 4)
        (True, 0.6931)
    """
    o, lse = _ext.merge_states(outs, lses, stream)
    return o, lse
