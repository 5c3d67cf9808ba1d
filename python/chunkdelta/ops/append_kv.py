"""New keys and values into pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chunkdelta import _ext

if TYPE_CHECKING:
    from chunkdelta.cache.pages import KVPages


def slot_mapping(slots: Sequence[int] | NDArray[np.integer] | mx.array) -> Any:
    """Check the slots of new tokens once, for :func:`append_kv` of every layer.

    Args:
        slots: host int32 ``[T]``: token t goes to slot ``page * page_size + offset``; -1 skips
            it. No slot twice.

    Returns:
        An opaque object that ``append_kv`` takes as its ``slot_mapping``.

    Raises:
        ValueError: values below -1, duplicates, a shape other than ``[T]``.

    Example:
        >>> import chunkdelta
        >>> len(chunkdelta.slot_mapping([64, 65, -1]))
        3
    """
    return _ext.SlotMapping(slots)


def append_kv(
    pages: KVPages,
    k: mx.array,
    v: mx.array,
    slot_mapping: Sequence[int] | NDArray[np.integer] | mx.array | Any,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> KVPages:
    """Write new keys and values into slots of ``pages``, encoding them in the pages' formats.

    The pool is written in place, after all reads of it that were built before; reads that are
    built later see the new rows. Rounding is to nearest even; ``q8_0`` gives the bytes of ggml's
    reference quantiser.

    Args:
        pages: the pool.
        k: keys ``[T, Hkv, D]``; float32, float16 or bfloat16, ``T`` may be 0.
        v: values ``[T, Hkv, D]``, likewise.
        slot_mapping: host int32 ``[T]`` (a list, a NumPy array, or an ``mx.array``, which costs
            one eval), slot ``page * page_size + offset`` of each token, -1 to skip it; or what
            :func:`chunkdelta.slot_mapping` made of them once for all layers.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        ``pages``, the same object.

    Raises:
        ValueError: shapes or dtypes that do not fit, slots outside the pool or given twice, a
            traced call, a pool with writes or reads pending in another thread. Nothing is
            changed then.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> pages = chunkdelta.KVPages(2, 1, 64, page_size=16)
        >>> k, v = mx.random.normal((2, 3, 1, 64))
        >>> pages = chunkdelta.append_kv(pages, k, v, [0, 1, 2])
    """
    append = getattr(pages, "_append", None)
    if append is None:
        raise ValueError(f"[append_kv] expected pages a KVPages; got {type(pages).__name__}")
    slots = (
        slot_mapping
        if isinstance(slot_mapping, _ext.SlotMapping)
        else _ext.SlotMapping(slot_mapping)
    )
    append(k, v, slots, stream)
    return pages
