"""Paged KV caches under mlx-lm's cache protocol."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import numpy as np

from chunkdelta.cache.kv_pool import FIRST_SLAB_TOKENS, KVPool
from chunkdelta.cache.padding import Padding, Spans, host_ints
from chunkdelta.cache.page_allocator import PageTable, batch_metadata
from chunkdelta.ops import append_kv, paged_attention


@dataclass(frozen=True)
class _Row:
    """A sequence: its pages, and the pool that they are in."""

    pool: KVPool
    table: PageTable

    @classmethod
    def new(cls, pool: KVPool) -> _Row:
        return cls(pool, pool.new_table())

    def fork(self) -> _Row:
        return _Row(self.pool, self.table.fork())


# The page format that stores activations as they are.
FORMATS = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}


class PagedKVCache:
    """Keys and values of one attention layer, in pages: a list of sequences, one for each row.

    Serves mlx-lm 0.32.2's cache protocol, for one prompt (``offset`` is an int) and, from
    :meth:`merge` on, for a batch (``offset`` is an array). What differs from mlx-lm's caches:

    * :meth:`update_and_attend` takes the place of ``update_and_fetch``: keys and values are never
      gathered into one array.
    * Padding takes no slots. Its columns are announced by :meth:`prepare` and skipped; no row is
      rolled or shifted, and :meth:`make_mask` needs no array.
    * Forks (``copy.deepcopy``), :meth:`merge`, :meth:`extend` and :meth:`extract` share pages by
      reference counts and copy no keys; a shared page is copied when one of its holders writes
      into it. Pages go back to the pool when the last holder is dropped.
    * :meth:`trim` removes exactly the tokens asked for and frees whole pages.

    Args:
        pool: Where pages come from. Caches of one layer may share it.
        left_padding: Padding columns on the left of each row to come; makes it a batch. Default:
            none.
    """

    def __init__(self, pool: KVPool, left_padding: Sequence[int] | None = None):
        self.pool = pool
        self._padding = Padding(left=left_padding)
        self._batched = left_padding is not None
        # None until the first tokens show how many rows there are.
        self._rows: list[_Row] | None = (
            None if left_padding is None else [_Row.new(pool) for _ in left_padding]
        )
        self._after: mx.array | None = None

    @classmethod
    def for_one_call(
        cls, rows: int, columns: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype
    ) -> PagedKVCache:
        """A cache that holds ``rows`` sequences of ``columns`` tokens as they are."""
        pages = max(1, rows * -(-columns // 64))
        return cls(KVPool(pages, num_kv_heads, head_dim, kv_format=FORMATS[dtype]))

    # ------------------------------------------------------------------ what a layer uses

    @property
    def offset(self) -> int | mx.array:
        """Tokens held, padding excluded: an int, or int32 ``(B,)`` for a batch."""
        if self._batched:
            return mx.array(self.lengths, mx.int32)
        return self.lengths[0] if self._rows else 0

    @property
    def lengths(self) -> list[int]:
        """Tokens held by each row."""
        return [row.table.length for row in self._rows or []]

    def spans(self, rows: int, columns: int) -> Spans | None:
        """``(start, stop)`` of each row's tokens in the next columns; None if all are tokens.

        Raises:
            ValueError: If the cache holds another number of rows.
        """
        if self._rows is not None and rows != len(self._rows):
            raise ValueError(f"[kv_cache] expected inputs of {len(self._rows)} rows; got {rows}")
        return self._padding.spans(columns)

    def counts(self, rows: int, columns: int) -> list[int]:
        """Tokens of each row in the next columns."""
        spans = self.spans(rows, columns)
        return [columns] * rows if spans is None else [stop - start for start, stop in spans]

    def check(self, rows: int, columns: int) -> None:
        """Raise ValueError unless the next columns' rows and tokens fit; changes nothing."""
        counts = self.counts(rows, columns)
        if self._rows is None:
            self.pool.check([(self.pool.new_table(), n) for n in counts])
        else:
            for pool, members in self._groups():
                pool.check([(self._rows[b].table, counts[b]) for b in members])

    def positions(self, columns: int) -> mx.array:
        """Positions of the tokens in the next columns, packed: int32 ``(T,)``."""
        lengths = self.lengths
        counts = self.counts(len(lengths), columns)
        return mx.array(
            np.concatenate(
                [np.arange(n, n + c) for n, c in zip(lengths, counts, strict=True)]
            ).astype(np.int32)
        )

    def update_and_attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        rows: int,
        columns: int,
    ) -> mx.array:
        """Append the next columns' tokens and attend to all tokens up to each.

        Args:
            queries: Rotated queries ``[T, Hq, D]``: the tokens of row 0, then of row 1, ...
            keys: Rotated keys ``[T, Hkv, D]``.
            values: ``[T, Hkv, D]``.
            scale: Factor of the scores.
            rows: Rows of the batch.
            columns: Columns that pass, padding included.

        Returns:
            ``[T, Hq, D]``.

        Raises:
            ValueError: Rows or tokens that do not fit, or a full pool; nothing is changed.
        """
        self.check(rows, columns)
        counts = self.counts(rows, columns)
        if self._rows is None:
            self._rows = [_Row.new(self.pool) for _ in range(rows)]
        before = self.lengths
        try:
            out = self._attend_in_groups(counts, queries, keys, values, scale)
        except Exception:
            for row, length in zip(self._rows, before, strict=True):
                row.table.trim(row.table.length - length)
            raise
        self.advance(columns)
        return out

    def _attend_in_groups(
        self, counts: Sequence[int], q: mx.array, k: mx.array, v: mx.array, scale: float
    ) -> mx.array:
        """One call for each pool that rows are in; one in all, unless caches were made apart."""
        rows = self._rows or []
        groups = self._groups()
        if len(groups) == 1:
            return _attend(groups[0][0], [r.table for r in rows], counts, q, k, v, scale=scale)
        starts = [0, *accumulate(counts)]
        parts, order = [], []
        for pool, members in groups:
            where = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in members])
            index = mx.array(where.astype(np.int32))
            parts.append(
                _attend(
                    pool,
                    [rows[b].table for b in members],
                    [counts[b] for b in members],
                    *(mx.take(x, index, axis=0) for x in (q, k, v)),
                    scale=scale,
                )
            )
            order.append(where)
        back = np.argsort(np.concatenate(order)).astype(np.int32)
        return mx.take(mx.concatenate(parts), mx.array(back), axis=0)

    def advance(self, columns: int) -> None:
        """Columns have passed, their tokens appended."""
        self._padding.advance(columns)

    def _groups(self) -> list[tuple[KVPool, list[int]]]:
        groups: dict[int, tuple[KVPool, list[int]]] = {}
        for b, row in enumerate(self._rows or []):
            groups.setdefault(id(row.pool), (row.pool, []))[1].append(b)
        return list(groups.values())

    # ------------------------------------------------------------------ mlx-lm's protocol

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> str | None:
        """``"causal"``, or None for a single column; never an array."""
        if window_size is not None:
            raise ValueError(
                f"[kv_cache] expected no window: the cache keeps all tokens; got {window_size}"
            )
        return None if N == 1 else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Refused: pages are attended to where they are."""
        raise ValueError(
            "[kv_cache] expected a layer of a model that chunkdelta.models.mlx_lm.accelerate "
            "returned; got a layer that fetches keys and values as arrays"
        )

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PagedKVCache:
        """Refused: the format is chosen when the pages are made."""
        raise ValueError(
            f"[kv_cache] expected kv_bits None, the format being make_cache(..., kv_format=...); "
            f"got kv_bits={bits}"
        )

    def prepare(
        self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None
    ) -> None:
        """Announce padded columns to come.

        Args:
            left_padding: Padding columns on the left of each row; for an empty cache.
            lengths: Columns that each row has, left padding included.
            right_padding: Padding columns after them; only with ``lengths``.
        """
        given = [x for x in (left_padding, lengths, right_padding) if x is not None]
        if not given:
            return
        if left_padding is not None and not self.empty():
            raise ValueError(
                "[kv_cache] expected left padding before the first token; "
                f"got left_padding={host_ints(left_padding)}"
            )
        rows = len(given[0]) if self._rows is None else len(self._rows)
        self._padding.prepare(
            rows=rows,
            left_padding=left_padding,
            lengths=lengths,
            right_padding=right_padding,
            op="kv_cache",
        )
        if self._rows is None:
            self._rows = [_Row.new(self.pool) for _ in range(rows)]
        self._batched = True

    def finalize(self) -> None:
        """The padded columns have passed: those to come are tokens in every row."""
        self._padding.finalize()

    @classmethod
    def merge(cls, caches: Sequence[PagedKVCache]) -> PagedKVCache:
        """One batch of several caches, which stay usable; pages are shared, not copied."""
        batch = cls(caches[0].pool, left_padding=[])
        batch._rows = [row for cache in caches for row in cache._forks()]
        batch._padding = Padding(rows=len(batch._rows))
        return batch

    def _forks(self) -> list[_Row]:
        if self._rows is None:
            return [_Row.new(self.pool)]
        return [row.fork() for row in self._rows]

    def extend(self, other: PagedKVCache) -> None:
        """Append another cache's rows; pages are shared, not copied."""
        mine = self._rows if self._rows is not None else [_Row.new(self.pool)]
        theirs = other._forks()
        self._padding.rows = len(mine)
        padding = other._padding.copy()
        padding.rows = len(theirs)
        self._padding.extend(padding)
        self._rows = [*mine, *theirs]
        self._batched = True

    def filter(self, batch_indices: Iterable[int]) -> None:
        """Keep the rows of ``batch_indices``, in that order; the others' pages are free."""
        keep = host_ints(batch_indices)
        rows = [_Row.new(self.pool)] if self._rows is None else self._rows
        self._rows = [rows[i].fork() if i in keep[:n] else rows[i] for n, i in enumerate(keep)]
        self._padding.filter(keep)

    def extract(self, idx: int) -> PagedKVCache:
        """Row ``idx`` as a cache of its own; pages are shared, not copied."""
        row = self._forks()[idx] if self._rows is None else self._rows[idx].fork()
        cache = PagedKVCache(row.pool)
        cache._rows = [row]
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        fork = PagedKVCache(self.pool)
        fork._rows = None if self._rows is None else self._forks()
        fork._padding = self._padding.copy()
        fork._batched = self._batched
        return fork

    def is_trimmable(self) -> bool:
        """True: pages can be cut anywhere."""
        return True

    def trim(self, n: int) -> int:
        """Remove the last ``n`` tokens of each row, or those of the shortest if it has fewer.

        Returns:
            How many were removed, the same in every row.
        """
        n = max(0, min([n, *self.lengths])) if self._rows else 0
        for row in self._rows or []:
            row.table.trim(n)
        return n

    def size(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    def empty(self) -> bool:
        """Whether no row holds a token."""
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pages held; pages shared with other caches count in each."""
        return sum(len(row.table.pages) * row.pool.page_bytes for row in self._rows or [])

    def held_pages(self) -> list[tuple[KVPool, list[int]]]:
        """The pages of each row, and the pool that they are in."""
        return [(row.pool, row.table.pages) for row in self._rows or []]

    def restore(self, tokens: int, k: mx.array, v: mx.array) -> None:
        """Take over a sequence's stored pages (:meth:`KVPages.read_pages`) into an empty cache."""
        self.check(1, tokens)
        row = _Row.new(self.pool)
        self.pool.extend([(row.table, tokens)])
        try:
            self.pool.pages.write_pages(row.table.pages, k, v)
        except ValueError:
            row.table.release()
            raise
        self._rows = [row]

    @property
    def keys(self) -> mx.array:
        """The pool's first array. mlx-lm's pipelined models order a send after it by assigning
        ``mx.depends(keys, sent)``, which is then evaluated with :attr:`state`."""
        return self.pool.pages.arrays[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._after = value

    @property
    def state(self) -> tuple[Any, ...]:
        """Pools' arrays, rows and shapes: what to evaluate after a chunk, and what to save.

        Assigning a state copies the rows' pages into a pool of this cache's own, which grows.
        """
        pools = {id(row.pool): row.pool for row in self._rows or []} or {0: self.pool}
        order = list(pools)
        rows = [
            (order.index(id(row.pool)), mx.array(row.table.pages, mx.int32), row.table.length)
            for row in self._rows or []
        ]
        pages = self.pool.pages
        shape = (pages.num_kv_heads, pages.head_dim, pages.page_size, self.pool.kv_format)
        arrays = [pool.pages.arrays for pool in pools.values()]
        return arrays, rows or None, shape, self._batched, self._after

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        arrays, rows, (heads, head_dim, page_size, kv_format), self._batched, _ = value
        held = sum(table.size for _, table, _ in rows or [])
        self.pool = KVPool(
            max(1, held),
            heads,
            head_dim,
            page_size=page_size,
            kv_format=kv_format,
            growable=True,
        )
        if held:
            parts = [
                [mx.take(mx.concatenate(arrays[p][i::2]), table, axis=0) for i in (0, 1)]
                for p, table, _ in rows
            ]
            k, v = (mx.concatenate([part[i] for part in parts]) for i in (0, 1))
            self.pool.pages.write_pages(range(held), k, v)
            mx.eval(self.pool.pages.arrays)
        self._rows = None if rows is None else [_Row.new(self.pool) for _ in rows]
        if self._rows:  # a new pool hands out its pages in order
            self.pool.extend(
                [(r.table, int(n)) for r, (_, _, n) in zip(self._rows, rows, strict=True)]
            )
        self._padding = Padding(rows=None if rows is None else len(rows))
        self._after = None

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> PagedKVCache:
        """A cache of its own with a saved state's rows."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache


class SharedPools:
    """Growing pools, one a layer, that all caches of one model share while any is alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: list[weakref.ref[KVPool]] = []

    def get(
        self, shapes: Sequence[tuple[int, int]], *, kv_format: str, page_size: int = 64
    ) -> list[KVPool]:
        """The pools of layers with these ``(num_kv_heads, head_dim)``, made anew if none is left."""
        with self._lock:
            pools = [pool for ref in self._pools if (pool := ref()) is not None]
            if len(pools) != len(shapes):
                pools = [
                    KVPool(
                        FIRST_SLAB_TOKENS // page_size,
                        heads,
                        head_dim,
                        page_size=page_size,
                        kv_format=kv_format,
                        growable=True,
                    )
                    for heads, head_dim in shapes
                ]
                self._pools = [weakref.ref(pool) for pool in pools]
            return pools

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedPools:
        return SharedPools()


def _attend(
    pool: KVPool,
    tables: Sequence[PageTable],
    counts: Sequence[int],
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
) -> mx.array:
    """Append and attend for rows of one pool; their tokens are packed in the rows' order."""
    slots = pool.extend(list(zip(tables, counts, strict=True)))
    append_kv(pool.pages, k, v, slots)
    metadata = batch_metadata(tables, counts)
    return cast(mx.array, paged_attention(q, pool.pages, metadata=metadata, scale=scale))
