"""Rotations that spread outliers over a head before it is quantised.

An orthogonal R leaves scores alone, (R q)(R k) = q k, and commutes with the weighted sum of values,
so pages hold R k and R v, a call rotates its queries once and its outputs back once, and no kernel
knows of it (TurboQuant, arXiv 2504.19874, section 3; QuaRot, arXiv 2404.00456).
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

Rotation = Literal["hadamard", "turbo"]

# Signs before and after the transform in blocks of 128, as llama.cpp's turbo formats have them: bit
# i set means -1, least significant first.
_TURBO_SIGNS = 0x49F250A9A4C63BBB42F85949E46A0359, 0xBEA56562B7A5357A3F628FDC16ACEE90
BLOCK = 128


def _signs(bits: int) -> mx.array:
    return mx.array([-1.0 if bits >> i & 1 else 1.0 for i in range(BLOCK)], mx.float32)


def rotation_block(head_dim: int) -> int:
    """Values that a Hadamard rotation mixes: the largest power of two in head_dim, at most 128."""
    return min(BLOCK, head_dim & -head_dim)


def rotate(
    x: mx.array,
    rotation: Rotation | None,
    *,
    inverse: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """R x, or R^T x, on blocks of the last axis, in float32.

    Args:
        x: ``[..., D]``, floating.
        rotation: ``"hadamard"``, the orthonormal Walsh-Hadamard transform H of blocks of
            :func:`rotation_block` values; ``"turbo"``, ``diag(s2) H diag(s1)`` of blocks of 128
            (``D`` a multiple of 128); None returns ``x``.
        inverse: apply the transpose. Default: ``False``.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        float32 ``[..., D]``; ``x`` itself without a rotation.

    Example:
        >>> import mlx.core as mx
        >>> x = mx.random.normal((3, 256))
        >>> back = rotate(rotate(x, "turbo"), "turbo", inverse=True)
        >>> bool(mx.abs(back - x).max() < 1e-5)
        True
    """
    if rotation is None or not mx.issubdtype(x.dtype, mx.floating):
        return x  # a dtype that is no number is the op's to refuse
    shape = x.shape
    block = BLOCK if rotation == "turbo" else rotation_block(shape[-1])
    y = mx.unflatten(x.astype(mx.float32, stream=stream), -1, (-1, block), stream=stream)
    if rotation == "turbo":
        # Made per call: an array of another thread's stream would be refused there.
        before, after = (_signs(bits) for bits in _TURBO_SIGNS)
        if inverse:
            before, after = after, before
        y = mx.multiply(y, before, stream=stream)
        y = mx.hadamard_transform(y, stream=stream)
        y = mx.multiply(y, after, stream=stream)
    else:
        y = mx.hadamard_transform(y, stream=stream)
    return mx.reshape(y, shape, stream=stream)


def pad_heads(
    x: mx.array, head_dim: int, *, stream: mx.Stream | mx.Device | None = None
) -> mx.array:
    """Zeros up to ``head_dim`` values; they change no score and no output."""
    missing = head_dim - x.shape[-1]
    if missing == 0:
        return x
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], stream=stream)
