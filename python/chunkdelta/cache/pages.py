"""Pages of keys and values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import mlx.core as mx

from chunkdelta import _ext
from chunkdelta.cache.pool import Pool, refuse_beyond_memory
from chunkdelta.ops.rotation import BLOCK, Rotation, pad_heads, rotate

T = TypeVar("T")


def _runs(pages: Sequence[int], slabs: Sequence[range]) -> list[list[int]]:
    """Pages in order, split into runs of consecutive ids within one slab."""
    ends = {ids.stop for ids in slabs}
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][-1] + 1 and page not in ends:
            runs[-1].append(page)
        else:
            runs.append([page])
    return runs


class PageFormatWarning(UserWarning):
    """A format that is known to lose too much for some models."""


def _rotated() -> dict[str, tuple[str, Rotation]]:
    """Formats whose rows are rotated: name to (codec, rotation)."""
    return {
        "q8_0_rot": ("q8_0", "hadamard"),
        "q4_0_rot": ("q4_0", "hadamard"),
        "turbo4": ("turbo4", "turbo"),
    }


def page_formats() -> tuple[str, ...]:
    """Names that ``k_format`` and ``v_format`` take."""
    codecs = list(_ext.page_formats())
    return (*codecs, *(name for name in _rotated() if name not in codecs))


def page_row_bytes(name: str, head_dim: int) -> int:
    """Bytes of one key or value of ``head_dim`` values in the format ``name``."""
    return int(_ext.page_row_bytes(_codec(name)[0], head_dim))


def _codec(name: str) -> tuple[str, Rotation | None]:
    return _rotated().get(name, (name, None))


def is_rotated(name: str) -> bool:
    """Whether rows of the format are rotated before they are encoded."""
    return _codec(name)[1] is not None


def stored_head_dim(head_dim: int, k_format: str, v_format: str) -> int:
    """Values of a stored row: whole blocks of 128 where K or V is a turbo format."""
    turbo = "turbo" in (_codec(k_format)[1], _codec(v_format)[1])
    return -(-head_dim // BLOCK) * BLOCK if turbo else head_dim


def parse_kv_format(name: str) -> tuple[str, str]:
    """Formats of K and V from one name: ``"bf16"`` is both, ``"q8_0/bf16"`` is K, then V.

    Raises:
        ValueError: a format that does not exist.
    """
    parts = name.split("/")
    known = page_formats()
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
        k_format: ``"f32"``, ``"f16"``, ``"bf16"``, ``"q8_0"`` or ``"q4_0"`` (ggml's blocks of 32
            values; 8.5 and 4.5 bits a value), ``"q8_0_rot"`` or ``"q4_0_rot"`` (the same of
            Hadamard-rotated rows) or ``"turbo4"`` (blocks of 128, 4.25 bits; rows are filled up
            to a multiple of 128; keys in turbo4 warn). Default: ``"bf16"``.
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
        for name in (k_format, v_format):
            parse_kv_format(name)
        if k_format == "turbo4":
            warnings.warn(
                "[KVPages] keys in turbo4 are known to break small models (an error in a score is "
                "amplified by the softmax): prefer q8_0/turbo4",
                PageFormatWarning,
                stacklevel=2,
            )
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.k_format = k_format
        self.v_format = v_format
        self._codecs, self._rotations = zip(
            *(_codec(name) for name in (k_format, v_format)), strict=True
        )
        self._row_dim = stored_head_dim(head_dim, k_format, v_format)
        self._first_page = [0]
        super().__init__(self._new_slab(num_pages))
        self._first_page.append(num_pages)

    def _new_slab(self, num_pages: int) -> list[mx.array]:
        if (self._first_page[-1] + num_pages) * self.page_size > 2**31 - 1:
            raise ValueError(
                f"[KVPages] expected at most 2**31 - 1 slots; got {self._first_page[-1] + num_pages}"
                f" pages of {self.page_size}"
            )
        size = num_pages * self.page_size * self.bytes_per_token
        refuse_beyond_memory("KVPages", "pages", size)
        dtypes = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
        return [
            mx.zeros(
                _ext.slab_shape(name, num_pages, self.num_kv_heads, self.page_size, self._row_dim),
                dtypes.get(name, mx.uint8),
            )
            for name in self._codecs
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
        rows = (page_row_bytes(name, self._row_dim) for name in (self.k_format, self.v_format))
        return self.num_kv_heads * sum(rows)

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
        self._check_pages(op, source + target)
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

    def read_pages(self, pages: Sequence[int]) -> tuple[mx.array, mx.array]:
        """The stored bytes of pages: K and V ``[n, num_kv_heads, page_size, ...]`` as in the pool.

        Consecutive pages of one slab are a view, others a copy; evaluate before the next write.

        Raises:
            ValueError: page ids out of range.
        """
        op = "read_pages"
        pages = [int(p) for p in pages]
        self._check_pages(op, pages)
        slabs = [range(low, high) for low, high in pairwise(self._first_page)]

        def gather(arrays: list[mx.array]) -> mx.array:
            parts = []
            for run in _runs(pages, slabs):
                slab = next(i for i, ids in enumerate(slabs) if run[0] in ids)
                low = run[0] - slabs[slab].start
                parts.append(arrays[slab][low : low + len(run)])
            return parts[0] if len(parts) == 1 else mx.concatenate(parts or [arrays[0][:0]])

        with self._core.lock:
            self._check(op)
            arrays = self.arrays
            return gather(arrays[0::2]), gather(arrays[1::2])

    def write_pages(
        self,
        pages: Sequence[int],
        k: mx.array,
        v: mx.array,
        *,
        stream: mx.Stream | mx.Device | None = None,
    ) -> None:
        """Write stored bytes, as :meth:`read_pages` gave them, into other pages of such a pool.

        Raises:
            ValueError: page ids out of range or given twice, arrays that are not of this pool's
                shape and format; nothing is changed then.
        """
        op = "write_pages"
        pages = [int(p) for p in pages]
        self._check_pages(op, pages)
        if len(set(pages)) < len(pages):
            raise ValueError(f"[{op}] expected distinct pages; got {pages}")
        for name, x, like in (("k", k, self.arrays[0]), ("v", v, self.arrays[1])):
            if x.dtype != like.dtype or x.shape != (len(pages), *like.shape[1:]):
                raise ValueError(
                    f"[{op}] expected {name} {like.dtype} {(len(pages), *like.shape[1:])}; "
                    f"got {x.dtype} {x.shape}"
                )
        if not pages:
            return
        first = [*self._first_page, self.num_pages + len(pages)]
        source = list(range(self.num_pages, self.num_pages + len(pages)))
        touched = self._touched_slabs(lambda low, high: any(low <= p < high for p in pages))

        def build(index: int, arrays: list[mx.array], reads: list[mx.array]) -> mx.array:
            # The new rows stand behind the pool as one slab more.
            slabs = [*arrays[index % 2 :: 2], v if index % 2 else k]
            return _ext.copy_pages(slabs, index // 2, first, source, pages, reads, stream)

        self._write(op, touched, build)

    def _check_pages(self, op: str, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"[{op}] expected page ids in 0..{self.num_pages - 1}; got {page}")

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
        rows = [
            rotate(pad_heads(x, self._row_dim, stream=stream), rotation, stream=stream)
            for x, rotation in zip((k, v), self._rotations, strict=True)
        ]

        def build(index: int, arrays: list[mx.array], reads: list[mx.array]) -> mx.array:
            return _ext.append_kv(
                arrays[index],
                rows[index % 2],
                slots,
                self._first_page[index // 2],
                self._codecs[index % 2],
                self._row_dim,
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

        # The softmax is that of the model's own head, however its rows are stored.
        scale = self.head_dim**-0.5 if options[0] is None else options[0]
        dtype = q.dtype
        if q.ndim == 3:
            q = rotate(
                pad_heads(q, self._row_dim, stream=stream), self._rotations[0], stream=stream
            )

        def build(arrays: list[mx.array]) -> tuple[list[mx.array], mx.array]:
            *results, token = _ext.paged_attention(
                q,
                arrays[0::2],
                arrays[1::2],
                self._first_page,
                metadata,
                *self._codecs,
                scale,
                *options[1:],
                stream,
            )
            return results, token

        o, *lse = self._read("paged_attention", build)
        o = rotate(o, self._rotations[1], inverse=True, stream=stream)
        if self._row_dim != self.head_dim:
            o = o[..., : self.head_dim]
        return [o.astype(dtype, stream=stream), *lse]
