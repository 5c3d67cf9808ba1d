"""The storage formats of KV pages in NumPy, written from their definitions: the oracle of the codecs.

A row ``[..., D]`` is encoded to bytes ``[..., row_bytes]`` as ggml stores it, so that pages can be
compared bit for bit. Formats: ``q8_0`` and ``q4_0`` (ggml), ``turbo4`` (blocks of 128 of TheTom's
llama.cpp fork, after TurboQuant, arXiv 2504.19874).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Lloyd-Max centroids of N(0, 1/128), the density of a coordinate of a random unit vector in R^128,
# and the midpoints between them.
TURBO4_CENTROIDS = np.array(
    [0.006938, 0.020989, 0.035597, 0.051262, 0.068756, 0.089527, 0.117195, 0.173926], np.float32
)
TURBO4_CENTROIDS = np.concatenate([-TURBO4_CENTROIDS[::-1], TURBO4_CENTROIDS])
_MIDPOINTS = np.array(
    [0.013963, 0.028293, 0.043430, 0.060009, 0.079142, 0.103361, 0.145560], np.float32
)
TURBO4_MIDPOINTS = np.concatenate([-_MIDPOINTS[::-1], np.zeros(1, np.float32), _MIDPOINTS])
# Signs before and after the Walsh-Hadamard transform: bit i set means -1, least significant first.
_SIGNS1 = 0x49F250A9A4C63BBB42F85949E46A0359
_SIGNS2 = 0xBEA56562B7A5357A3F628FDC16ACEE90


def _signs(bits: int) -> F32:
    return np.array([-1.0 if bits >> i & 1 else 1.0 for i in range(128)], np.float32)


TURBO4_SIGNS = _signs(_SIGNS1), _signs(_SIGNS2)


def hadamard(x: ArrayLike) -> NDArray[np.float64]:
    """Orthonormal Walsh-Hadamard transform of the last axis (a power of two), natural order."""
    y = np.array(x, np.float64)
    n = y.shape[-1]
    if n & (n - 1):
        raise ValueError(f"[hadamard] expected a power of two; got {n}")
    step = 1
    while step < n:
        pairs = y.reshape(*y.shape[:-1], n // (2 * step), 2, step)
        a, b = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = a + b, a - b
        step *= 2
    return y / np.sqrt(n)


def turbo_rotate(x: ArrayLike, *, inverse: bool = False) -> NDArray[np.float64]:
    """R x = s2 * H (s1 * x) on blocks of 128 of the last axis; R is orthogonal."""
    blocks = np.asarray(x, np.float64)
    shape = blocks.shape
    first, second = TURBO4_SIGNS[::-1] if inverse else TURBO4_SIGNS
    return (second * hadamard(first * blocks.reshape(*shape[:-1], -1, 128))).reshape(shape)


def _blocks(x: ArrayLike, n: int) -> F32:
    rows = np.asarray(x, np.float32)
    pad = -rows.shape[-1] % n
    rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], pad), np.float32)], -1)
    return rows.reshape(*rows.shape[:-1], -1, n)


def _pack(blocks: list[Bytes]) -> Bytes:
    joined = np.concatenate(blocks, -1)
    return joined.reshape(*joined.shape[:-2], -1)


def _half(x: Any) -> Bytes:
    return np.ascontiguousarray(x, np.float16)[..., None].view(np.uint8)


def encode(name: str, x: ArrayLike) -> Bytes:
    """Rows ``[..., D]`` to bytes ``[..., row_bytes]``."""
    if name == "q8_0":
        block = _blocks(x, 32)
        scale = np.abs(block).max(-1) / np.float32(127)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        y = block * inverse[..., None]
        rounded = np.trunc(y + np.copysign(np.float32(0.5), y)).astype(np.int8)  # C's roundf
        return _pack([_half(scale), rounded.view(np.uint8)])
    if name == "q4_0":
        block = _blocks(x, 32)
        extreme = np.take_along_axis(block, np.abs(block).argmax(-1)[..., None], -1)[..., 0]
        scale = extreme / np.float32(-8)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        steps = (block * inverse[..., None] + np.float32(8.5)).astype(np.int32)
        q: Bytes = np.minimum(15, steps).astype(np.uint8)
        packed: Bytes = (q[..., :16] | q[..., 16:] << 4).astype(np.uint8)
        return _pack([_half(scale), packed])
    if name == "turbo4":
        block = _blocks(x, 128)
        norm = np.linalg.norm(block.astype(np.float64), axis=-1)
        unit = np.divide(
            block, norm[..., None], where=norm[..., None] > 1e-10, out=np.zeros_like(block)
        )
        index = np.searchsorted(TURBO4_MIDPOINTS, turbo_rotate(unit), side="right").astype(np.uint8)
        index[norm <= 1e-10] = np.searchsorted(TURBO4_MIDPOINTS, 0.0, side="right")
        # The stored norm makes the reconstruction as long as the row was.
        norm = norm / np.linalg.norm(TURBO4_CENTROIDS[index].astype(np.float64), axis=-1)
        nibbles: Bytes = (index[..., 0::2] | index[..., 1::2] << 4).astype(np.uint8)
        return _pack([_half(norm), _half(np.zeros_like(norm)), nibbles])
    raise ValueError(f"[encode] expected one of q8_0, q4_0, turbo4; got {name}")


def decode(name: str, data: Bytes, head_dim: int) -> F32:
    """Bytes ``[..., row_bytes]`` to rows ``[..., head_dim]``; turbo4 rows stay rotated, as stored."""
    size = {"q8_0": 34, "q4_0": 18, "turbo4": 68}[name]
    block = np.ascontiguousarray(data).reshape(*data.shape[:-1], -1, size)
    scale = block[..., :2].copy().view(np.float16).astype(np.float32)
    if name == "q8_0":
        values = block[..., 2:].view(np.int8).astype(np.float32) * scale
    elif name == "q4_0":
        q = block[..., 2:]
        values = (np.concatenate([q & 15, q >> 4], -1).astype(np.float32) - 8) * scale
    else:
        q = block[..., 4:]
        index = np.stack([q & 15, q >> 4], -1).reshape(*q.shape[:-1], 128)
        values = TURBO4_CENTROIDS[index] * scale
    return values.reshape(*values.shape[:-2], -1)[..., :head_dim]
