"""Errors measured against float64, and bounded by comparison with the plain computation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def to_float64(a: Any) -> F64:
    """The values of an array of any library and dtype as float64 (bfloat16 has no NumPy dtype)."""
    if isinstance(a, mx.array):
        a = np.array(a.astype(mx.float32) if a.dtype in (mx.bfloat16, mx.float16) else a)
    return np.asarray(a, np.float64)


def relative_error(actual: Any, expected: Any) -> float:
    """Relative Frobenius error ``|actual - expected| / |expected|``.

    The absolute error where ``expected`` is all zeros, 0.0 for empty arrays, and ``inf`` where
    ``actual`` is not finite.

    Args:
        actual: array of any library.
        expected: array of the same shape, usually float64.

    Returns:
        The error as a float.

    Raises:
        ValueError: shapes that differ.
    """
    a, b = to_float64(actual), to_float64(expected)
    if a.shape != b.shape:
        raise ValueError(f"[relative_error] expected shape {b.shape}; got {a.shape}")
    if not np.all(np.isfinite(a)):
        return float("inf")
    norm = float(np.linalg.norm(b))
    error = float(np.linalg.norm(a - b))
    return error / norm if norm else error


def assert_close_as(
    actual: Any, plain: Any, oracle: Any, *, ratio: float, floor: float = 1e-7, name: str = "result"
) -> None:
    """Check that ``actual`` is at most ``ratio`` times as far from ``oracle`` as ``plain`` is.

    Args:
        actual: what is tested.
        plain: the textbook computation in the same dtype.
        oracle: the float64 result.
        ratio: factor allowed, see the page on exactness in docs/concepts.
        floor: error that is always allowed; about one float32 rounding.
        name: what to call it in the message.

    Raises:
        AssertionError: a larger error.
    """
    error, bar = relative_error(actual, oracle), relative_error(plain, oracle)
    assert error <= max(ratio * bar, floor), (
        f"{name}: error {error:.2e} against float64; the plain computation has {bar:.2e} "
        f"and {ratio} times that is allowed"
    )
