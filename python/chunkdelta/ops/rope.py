"""Rotary position embedding with a position per token."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike

from chunkdelta import _ext


def rope(
    x: mx.array,
    positions: mx.array,
    *,
    dims: int | None = None,
    base: float = 10000.0,
    freqs: ArrayLike | None = None,
    scale: float = 1.0,
    traditional: bool = False,
    mrope_sections: Sequence[int] | None = None,
    mrope_interleaved: bool = True,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Rotate the heads of each token by the angle of its own position.

    ``mx.fast.rope`` takes one offset a sequence; packed (ragged) batches need a position per
    token, and vision-language prompts three of them (M-RoPE). Pair ``i`` of a head turns by
    ``position * scale / freqs[i]`` radians (RoFormer, arXiv 2104.09864, eq. 34). The inverse
    frequency is a float32, as models are trained with; its product with the position is exact
    (rounded to float32, it is off by 4e-3 radians at position 131,072).

    Args:
        x: queries or keys ``[T, H, D]`` or ``[B, T, H, D]``; float32, float16 or bfloat16.
        positions: int32 ``[T]`` or ``[B, T]``; with ``mrope_sections`` ``[3, T]`` or
            ``[3, B, T]`` (temporal, height, width).
        dims: leading columns of a head that rotate, even, at most ``D``; the rest is copied.
            Default: ``D``.
        base: wavelength base; ``freqs[i] = base ** (2 i / dims)``. Default: ``10000.0``.
        freqs: wavelengths ``[dims / 2]`` in positions per radian instead of ``base``, read on
            the host. Default: ``None``.
        scale: factor on the positions. Default: ``1.0``.
        traditional: rotate pairs ``(2 i, 2 i + 1)`` instead of ``(i, i + dims / 2)``.
            Default: ``False``.
        mrope_sections: pairs that follow the temporal, height and width position; they add up
            to ``dims / 2``. Default: ``None``, one position per token.
        mrope_interleaved: sections interleave (Qwen3-VL, Qwen3.5) instead of following each
            other (Qwen2-VL). Default: ``True``.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        An array of ``x``'s shape and dtype.

    Raises:
        ValueError: shapes, dtypes or sections that do not fit.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> q = mx.random.normal((5, 2, 64))
        >>> packed = mx.array([0, 1, 2, 0, 1], mx.int32)  # two sequences, packed
        >>> chunkdelta.rope(q, packed, dims=16).shape
        (5, 2, 64)
    """
    dims = x.shape[-1] if dims is None else dims
    if dims % 2 or not 0 < dims <= x.shape[-1]:
        raise ValueError(f"[rope] expected an even dims in 2..D = {x.shape[-1]}; got {dims}")
    wavelengths = (
        float(base) ** (np.arange(0, dims, 2) / dims)
        if freqs is None
        else np.asarray(freqs, np.float64)
    )
    if wavelengths.shape != (dims // 2,):
        raise ValueError(
            f"[rope] expected freqs [dims/2] = ({dims // 2},); got {wavelengths.shape}"
        )
    inv_freq = (scale / wavelengths).astype(np.float32).tolist()
    sections = None if mrope_sections is None else list(mrope_sections)
    return _ext.rope(x, positions, inv_freq, traditional, sections, mrope_interleaved, stream)
