"""Pages of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import mlx.core as mx

from chunkdelta import _ext
from chunkdelta.cache.pool import Pool

T = TypeVar("T")


def parse_kv_format(name: str) -> tuple[str, str]:
    """Formats of K and V from one name: ``"bf16"`` is both, ``"q8_0/bf16"`` is K, then V.

    Raises:
        ValueError: a format that does not exist.
    """
    parts = name.split("/")
    known = _ext.page_formats()
    if len(parts) > 2 or any(part not in known for part in parts):
        raise ValueError(
            f"[kv_format] expected FORMAT or K_FORMAT/V_FORMAT with formats in "
            f"{{{', '.join(known)}}}; got {name!r}"
        )
    return parts[0], parts[-1]


class KVPages(Pool):
    """A pool of pages, each of ``page_size`` keys and values for all KV heads of one layer.

    K and V are arrays ``[pages, num_kv_heads, page_size, head_dim]`` each, in formats of their
    own. A token lives in slot ``page * page_size + offset``; :func:`append_kv` writes slots,
    :func:`paged_attention` reads them through block tables. Which page belongs to whom is not
    the pool's business: see :class:`PageAllocator`. Pages are uninitialised in meaning: what a
    slot holds before it is written never reaches a result.

    The arrays are evaluated when the pool is made and written in place from then on. The object
    may be shared by any number of sequences; it cannot be copied (``copy.deepcopy`` raises: fork
    a sequence with :meth:`PageTable.fork` instead). In another thread it is usable once pending
    writes and reads are evaluated.

    Args:
        num_pages: pages of the pool, at least 1.
        num_kv_heads: KV heads.
        head_dim: values of a head, a multiple of 4 up to 256.
        page_size: keys of a page, a multiple of 16. Default: ``64``.
        k_format: ``"f32"``, ``"f16"``, ``"bf16"`` or ``"q8_0"`` (ggml's blocks of 32 values, 34
            bytes; 8.5 bits a value where ``head_dim`` is a multiple of 32). Default: ``"bf16"``.
        v_format: the same for values. Default: ``"bf16"``.

    Raises:
        ValueError: sizes or formats that do not fit.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> pages = chunkdelta.KVPages(4, 2, 64, page_size=16, k_format="q8_0", v_format="bf16")
        >>> pages.num_slots, pages.bytes_per_token
        (64, 392)
        >>> k = v = mx.random.normal((5, 2, 64))
        >>> _ = chunkdelta.append_kv(pages, k, v, [16, 17, 18, 19, 20])  # page 1
    """

    def __init__(
        self,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 64,
        k_format: str = "bf16",
        v_format: str = "bf16",
    ):
        for name, value in (("num_pages", num_pages), ("num_kv_heads", num_kv_heads)):
            if value < 1:
                raise ValueError(f"[KVPages] expected {name} >= 1; got {value}")
        if not 0 < head_dim <= 256 or head_dim % 4:
            raise ValueError(
                f"[KVPages] expected head_dim a multiple of 4 in 4..256; got {head_dim}"
            )
        if page_size < 16 or page_size % 16:
            raise ValueError(f"[KVPages] expected page_size a multiple of 16; got {page_size}")
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.k_format = k_format
        self.v_format = v_format
        self._first_page = [0]
        super().__init__(self._new_slab(num_pages))
        self._first_page.append(num_pages)

    def _new_slab(self, num_pages: int) -> list[mx.array]:
        if (self._first_page[-1] + num_pages) * self.page_size > 2**31 - 1:
            raise ValueError(
                f"[KVPages] expected at most 2**31 - 1 slots; got {self._first_page[-1] + num_pages}"
                f" pages of {self.page_size}"
            )
        dtypes = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
        return [
            mx.zeros(
                _ext.slab_shape(name, num_pages, self.num_kv_heads, self.page_size, self.head_dim),
                dtypes.get(name, mx.uint8),
            )
            for name in (self.k_format, self.v_format)
        ]

    @property
    def num_pages(self) -> int:
        """Pages over all slabs; page ids run on from slab to slab."""
        return self._first_page[-1]

    @property
    def num_slots(self) -> int:
        """``num_pages * page_size``."""
        return self.num_pages * self.page_size

    @property
    def num_slabs(self) -> int:
        """Arrays that K (and V) consists of."""
        return len(self._first_page) - 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        row = _ext.page_row_bytes
        rows = row(self.k_format, self.head_dim) + row(self.v_format, self.head_dim)
        return int(self.num_kv_heads * rows)

    def grow(self, num_pages: int) -> None:
        """Add a slab of ``num_pages`` pages; nothing is copied, and ids of pages stay."""
        if num_pages < 1:
            raise ValueError(f"[KVPages.grow] expected num_pages >= 1; got {num_pages}")
        with self._core.lock:
            self._check("KVPages.grow", writes=True)
            self._add_arrays(self._new_slab(num_pages))
            self._first_page.append(self.num_pages + num_pages)

    def copy_pages(
        self,
        source: Sequence[int],
        target: Sequence[int],
        *,
        stream: mx.Stream | mx.Device | None = None,
    ) -> None:
        """Copy whole pages, ``source[i]`` to ``target[i]``, byte for byte (copy on write).

        Raises:
            ValueError: page ids out of range, a target given twice or read by another copy.
        """
        op = "copy_pages"
        source, target = [int(p) for p in source], [int(p) for p in target]
        if len(source) != len(target):
            raise ValueError(
                f"[{op}] expected a source per target; got {len(source)} and {len(target)}"
            )
        for page in source + target:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"[{op}] expected page ids in 0..{self.num_pages - 1}; got {page}")
        if len(set(target)) < len(target) or set(target) & set(source):
            raise ValueError(
                f"[{op}] expected distinct targets that are no sources; got {source} to {target}"
            )
        if not target:
            return
        touched = self._touched_slabs(lambda low, high: any(low <= p < high for p in target))

        def build(index: int, arrays: list[mx.array], reads: list[mx.array]) -> mx.array:
            return _ext.copy_pages(
                arrays[index % 2 :: 2], index // 2, self._first_page, source, target, reads, stream
            )

        # Sources lie in any slab of the same kind (K or V).
        self._write(op, touched, build, lambda written, other: written % 2 == other % 2)

    def _touched_slabs(self, touches: Callable[[int, int], bool]) -> list[int]:
        """Indices of the K and V arrays of the slabs with touched pages."""
        return [
            index
            for slab, (low, high) in enumerate(pairwise(self._first_page))
            if touches(low, high)
            for index in (2 * slab, 2 * slab + 1)
        ]

    # What chunkdelta.ops calls.

    def _append(
        self, k: mx.array, v: mx.array, slots: Any, stream: mx.Stream | mx.Device | None
    ) -> None:
        op = "append_kv"
        if slots.max_slot >= self.num_slots:
            raise ValueError(
                f"[{op}] expected slots below num_pages * page_size = {self.num_slots}; "
                f"got {slots.max_slot}"
            )
        for name, x in (("k", k), ("v", v)):
            if x.shape != (len(slots), self.num_kv_heads, self.head_dim):
                raise ValueError(
                    f"[{op}] expected {name} [T, Hkv, D] = "
                    f"({len(slots)}, {self.num_kv_heads}, {self.head_dim}) with T slots; "
                    f"got {x.dtype} {x.shape}"
                )
        size = self.page_size
        touched = self._touched_slabs(lambda low, high: slots.touches(low * size, high * size))

        def build(index: int, arrays: list[mx.array], reads: list[mx.array]) -> mx.array:
            return _ext.append_kv(
                arrays[index],
                v if index % 2 else k,
                slots,
                self._first_page[index // 2],
                self.v_format if index % 2 else self.k_format,
                self.head_dim,
                reads,
                stream,
            )

        if touched:
            self._write(op, touched, build)

    def _attend(
        self,
        q: mx.array,
        metadata: Any,
        options: tuple[Any, ...],
        stream: mx.Stream | mx.Device | None,
    ) -> list[mx.array]:
        if q.ndim == 3 and q.shape[2] != self.head_dim:
            raise ValueError(
                f"[paged_attention] expected q [T, Hq, D] with the pool's D = {self.head_dim}; "
                f"got {q.dtype} {q.shape}"
            )

        def build(arrays: list[mx.array]) -> tuple[list[mx.array], mx.array]:
            *results, token = _ext.paged_attention(
                q,
                arrays[0::2],
                arrays[1::2],
                self._first_page,
                metadata,
                self.k_format,
                self.v_format,
                *options,
                stream,
            )
            return results, token

        return self._read("paged_attention", build)
