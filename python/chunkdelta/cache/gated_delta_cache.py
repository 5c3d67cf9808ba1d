"""The cache of a gated delta-rule layer: convolution tails and the recurrent state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from chunkdelta.cache.padding import Padding, Spans, host_ints


class GatedDeltaCache(ArraysCache):  # type: ignore[misc]
    """Convolution tails and the float32 state of one gated delta-rule layer.

    An ``ArraysCache`` of mlx-lm 0.32.2, so its generation loop, batch generator and server take
    it, with two differences. Padding is kept as host integers and :meth:`make_mask` is always
    None: the layer runs on the rows' tokens alone instead of masking. And every entry owns its
    memory: a sequence taken out of a batch does not keep the batch's arrays alive.

    Arrays are immutable values here, so a fork (``copy.deepcopy``) shares them until one side
    moves on. A state cannot run backwards: ``is_trimmable()`` is False.

    Args:
        size: Number of entries: the convolution tails ``[B, K-1, C]``, and last the state
            ``[B, Hv, Dv, Dk]`` float32. Default: ``2``.
        left_padding: Padding columns on the left of each row to come. Default: none.

    Example:
        >>> from chunkdelta.cache.gated_delta_cache import GatedDeltaCache
        >>> cache = GatedDeltaCache(left_padding=[2, 0])
        >>> cache.spans(rows=2, columns=5)
        ((2, 5), (0, 5))
    """

    def __init__(self, size: int = 2, left_padding: Sequence[int] | None = None):
        self._padding = Padding(left=left_padding)
        super().__init__(size)

    # Protocol attributes; lists of host integers or None, where ArraysCache has arrays.
    @property
    def left_padding(self) -> list[int] | None:
        return self._padding.left

    @left_padding.setter
    def left_padding(self, value: Any) -> None:
        if value is not None:
            self._padding = Padding(left=host_ints(value))

    @property
    def lengths(self) -> list[int] | None:
        return self._padding.lengths

    @lengths.setter
    def lengths(self, value: Any) -> None:
        self._padding.lengths = None if value is None else host_ints(value)

    @property
    def batch_size(self) -> int:
        for entry in self.cache:
            if entry is not None:
                return int(entry.shape[0])
        return self._padding.rows or 1

    def spans(self, rows: int, columns: int) -> Spans | None:
        """``(start, stop)`` of each row's tokens in the next columns; None if all are tokens.

        Raises:
            ValueError: If the cache holds another number of rows.
        """
        known = self._padding.rows is not None or not self.empty()
        if known and rows != self.batch_size:
            raise ValueError(
                f"[GatedDeltaCache] expected inputs of {self.batch_size} rows; got {rows}"
            )
        return self._padding.spans(columns)

    def check(self, rows: int, columns: int) -> None:
        """Raise ValueError unless the rows of the next columns are those held."""
        self.spans(rows, columns)

    def advance(self, columns: int) -> None:
        """Columns have passed, their tokens taken into the entries."""
        self._padding.advance(columns)

    def make_mask(self, columns: int) -> None:
        """Always None: padding is skipped, not masked."""

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
        rows = len(given[0]) if given and self.empty() else self.batch_size
        if left_padding is not None and not self.empty():
            raise ValueError(
                "[GatedDeltaCache] expected left padding before the first token; "
                f"got left_padding={host_ints(left_padding)}"
            )
        self._padding.prepare(
            rows=rows,
            left_padding=left_padding,
            lengths=lengths,
            right_padding=right_padding,
            op="GatedDeltaCache",
        )

    def finalize(self) -> None:
        """The padded columns have passed: those to come are tokens in every row."""
        self._padding.finalize()

    @property
    def state(self) -> tuple[list[mx.array | None], list[int] | None, list[int] | None]:
        """Entries, left padding and lengths to come."""
        return self.cache, self.left_padding, self.lengths

    @state.setter
    def state(self, value: Any) -> None:
        entries, left, lengths = value
        self.cache = list(entries)
        self._padding = Padding(left=None if left is None else host_ints(left))
        self._padding.lengths = None if lengths is None else host_ints(lengths)

    def filter(self, batch_indices: Iterable[int]) -> None:
        """Keep the rows of ``batch_indices``, in that order."""
        keep = host_ints(batch_indices)
        index = mx.array(keep, mx.int32)
        self.cache = [None if c is None else mx.take(c, index, axis=0) for c in self.cache]
        self._padding.filter(keep)

    def extend(self, other: GatedDeltaCache) -> None:
        """Append another cache's rows; rows that have seen no token start from zeros."""
        mine, theirs = self.batch_size, other.batch_size
        self._padding.rows = mine
        padding = other._padding.copy()
        padding.rows = theirs
        self._padding.extend(padding)
        self.cache = [
            _stack([(a, mine), (b, theirs)]) for a, b in zip(self.cache, other.cache, strict=True)
        ]

    def extract(self, idx: int) -> GatedDeltaCache:
        """Row ``idx`` as a cache of its own."""
        cache = GatedDeltaCache(len(self.cache))
        cache.cache = [None if c is None else mx.contiguous(c[idx : idx + 1]) for c in self.cache]
        return cache

    @classmethod
    def merge(cls, caches: Sequence[GatedDeltaCache]) -> GatedDeltaCache:
        """One batch of several caches; they stay usable."""
        batch = cls(len(caches[0].cache))
        batch._padding.rows = sum(c.batch_size for c in caches)
        batch.cache = [
            _stack([(c[e], c.batch_size) for c in caches]) for e in range(len(batch.cache))
        ]
        return batch

    def __deepcopy__(self, memo: dict[int, Any]) -> GatedDeltaCache:
        fork = type(self)(len(self.cache))
        fork.cache = list(self.cache)
        fork._padding = self._padding.copy()
        return fork


def _stack(parts: list[tuple[mx.array | None, int]]) -> mx.array | None:
    """Rows of all parts; zeros for a part that is None, None if all are."""
    known = next((a for a, _ in parts if a is not None), None)
    if known is None:
        return None
    if len(parts) == 1:
        return known
    return mx.concatenate(
        [mx.zeros((n, *known.shape[1:]), known.dtype) if a is None else a for a, n in parts]
    )
