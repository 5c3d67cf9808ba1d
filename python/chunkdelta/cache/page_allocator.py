"""Which page belongs to whom: reference counts, a free list, and the page table of a sequence."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chunkdelta import _ext


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than asked for. Nothing was allocated."""


class PageAllocator:
    """Reference counts and an O(1) free list over page ids ``0 .. num_pages - 1``.

    One allocator serves any number of :class:`KVPages` of equal page size and count: all attention
    layers of a model share their page tables. Free pages are handed out least recently freed
    first, and :meth:`retain` takes one back out of the middle of the list, so that a cache may
    remember pages that nobody holds until they are given away. Usable from any thread.

    Args:
        num_pages: pages to hand out, at least 1.

    Example:
        >>> from chunkdelta.cache import PageAllocator
        >>> allocator = PageAllocator(4)
        >>> allocator.allocate(3)
        [0, 1, 2]
        >>> allocator.release([1])
        >>> allocator.num_free, allocator.allocate(2)
        (2, [3, 1])
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"[PageAllocator] expected num_pages >= 1; got {num_pages}")
        self._lock = threading.Lock()
        # A doubly linked list of free pages; entry 0 is its end, page p is entry p + 1.
        self._next = [0]
        self._previous = [0]
        self._counts: list[int] = []
        self._num_free = 0
        # Finalisers run at any point, also while this thread holds the lock: they only queue.
        self._dropped: deque[list[int]] = deque()
        self._add(num_pages)

    def _add(self, num_pages: int) -> None:
        first = len(self._counts)
        self._next += [0] * num_pages
        self._previous += [0] * num_pages
        self._counts += [0] * num_pages
        for page in range(first, first + num_pages):
            self._push(page)

    def _push(self, page: int) -> None:
        entry, last = page + 1, self._previous[0]
        self._next[last], self._previous[entry] = entry, last
        self._next[entry], self._previous[0] = 0, entry
        self._num_free += 1

    def _unlink(self, page: int) -> None:
        after, before = self._next[page + 1], self._previous[page + 1]
        self._next[before], self._previous[after] = after, before
        self._num_free -= 1

    def _collect(self) -> None:
        while self._dropped:
            for page in self._dropped.popleft():
                self._drop(page)

    def _drop(self, page: int) -> None:
        self._counts[page] -= 1
        if self._counts[page] == 0:
            self._push(page)

    def _check(self, op: str, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < len(self._counts):
                raise ValueError(
                    f"[PageAllocator.{op}] expected page ids in 0..{len(self._counts) - 1}; "
                    f"got {page}"
                )

    @property
    def num_pages(self) -> int:
        """All pages."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        with self._lock:
            self._collect()
            return self._num_free

    def ref_count(self, page: int) -> int:
        """Holders of a page; 0 if it is free."""
        with self._lock:
            self._collect()
            self._check("ref_count", [page])
            return self._counts[page]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free pages, each with one reference.

        Raises:
            OutOfPages: fewer are free; none is taken then.
        """
        if count < 0:
            raise ValueError(f"[PageAllocator.allocate] expected count >= 0; got {count}")
        with self._lock:
            self._collect()
            if count > self._num_free:
                raise OutOfPages(
                    f"[PageAllocator.allocate] expected {count} free pages; got {self._num_free} "
                    f"of {len(self._counts)}"
                )
            pages = []
            for _ in range(count):
                page = self._next[0] - 1
                self._unlink(page)
                self._counts[page] = 1
                pages.append(page)
            return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page; a free one leaves the free list with what it holds."""
        pages = list(pages)
        with self._lock:
            self._collect()
            self._check("retain", pages)
            for page in pages:
                if self._counts[page] == 0:
                    self._unlink(page)
                self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page, in order; pages without one left are freed."""
        pages = list(pages)
        with self._lock:
            self._collect()
            self._check("release", pages)
            dropped: dict[int, int] = {}
            for page in pages:
                dropped[page] = dropped.get(page, 0) + 1
                if dropped[page] > self._counts[page]:
                    raise ValueError(
                        f"[PageAllocator.release] expected a page that is held; got page {page} "
                        f"with {self._counts[page]} references"
                    )
            for page in pages:
                self._drop(page)

    def grow(self, num_pages: int) -> None:
        """Add pages after the last one, as :meth:`KVPages.grow` does."""
        if num_pages < 1:
            raise ValueError(f"[PageAllocator.grow] expected num_pages >= 1; got {num_pages}")
        with self._lock:
            self._add(num_pages)


@dataclass(frozen=True)
class Appended:
    """Where new tokens go. Every layer first copies, then writes:

    ``pages.copy_pages(*appended.copies)`` (does nothing if empty), ``append_kv(pages, k, v,
    appended.slots)``.
    """

    slots: NDArray[np.int32]
    copies: tuple[list[int], list[int]]  # source and target pages


class PageTable:
    """The pages of one sequence, in order of its tokens, shared by all attention layers.

    Forks share pages and copy the last, partial one when either side writes to it. The table
    releases its pages when it is garbage collected. Not for concurrent use by several threads.

    Args:
        allocator: where pages come from.
        page_size: tokens of a page. Default: ``64``.

    Example:
        >>> from chunkdelta.cache import PageAllocator, PageTable
        >>> table = PageTable(PageAllocator(4), page_size=16)
        >>> table.append(17).slots.tolist()[-2:], table.pages
        ([15, 16], [0, 1])
        >>> fork = table.fork()
        >>> appended = fork.append(1)  # page 1 is shared and not full
        >>> appended.copies, appended.slots.tolist()
        (([1], [2]), [33])
        >>> table.trim(2)
        >>> table.length, table.pages
        (15, [0])
    """

    def __init__(self, allocator: PageAllocator, page_size: int = 64):
        self.allocator = allocator
        self.page_size = page_size
        self.length = 0
        self._pages: list[int] = []
        # The finaliser holds the list, not the table.
        self._finalizer = weakref.finalize(self, allocator._dropped.append, self._pages)

    @property
    def pages(self) -> list[int]:
        """Page ids, a copy."""
        return list(self._pages)

    def pages_needed(self, count: int) -> int:
        """Pages that :meth:`append` would take for ``count`` more tokens."""
        size = self.page_size
        more = -(-(self.length + count) // size) - len(self._pages)
        return max(more, 0) + (count > 0 and self._shares_partial_page())

    def _shares_partial_page(self) -> bool:
        return self.length % self.page_size != 0 and self.allocator.ref_count(self._pages[-1]) > 1

    def append(self, count: int) -> Appended:
        """Make room for ``count`` tokens and say in which slots they go.

        Raises:
            OutOfPages: the allocator has too few pages; the table is unchanged then.
        """
        if count < 0:
            raise ValueError(f"[PageTable.append] expected count >= 0; got {count}")
        new = self.allocator.allocate(self.pages_needed(count))
        copies: tuple[list[int], list[int]] = ([], [])
        if count > 0 and self._shares_partial_page():
            copies = ([self._pages[-1]], [new[0]])
            self.allocator.release([self._pages[-1]])
            self._pages[-1] = new.pop(0)
        self._pages += new
        size = self.page_size
        positions = np.arange(self.length, self.length + count)
        slots = np.asarray(self._pages, np.int32)[positions // size] * size + positions % size
        self.length += count
        return Appended(slots.astype(np.int32), copies)

    def trim(self, count: int) -> None:
        """Forget exactly the last ``count`` tokens and release pages without any left."""
        if not 0 <= count <= self.length:
            raise ValueError(
                f"[PageTable.trim] expected count in 0..{self.length}, the tokens held; got {count}"
            )
        self.length -= count
        keep = -(-self.length // self.page_size)
        dropped = self._pages[keep:]
        del self._pages[keep:]
        self.allocator.release(reversed(dropped))

    def fork(self) -> PageTable:
        """Another table of the same tokens; pages are shared until one side writes."""
        other = PageTable(self.allocator, self.page_size)
        self.allocator.retain(self._pages)
        other._pages += self._pages
        other.length = self.length
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PageTable:
        other = self.fork()
        memo[id(self)] = other
        return other

    def release(self) -> None:
        """Give up all tokens and pages."""
        self.trim(self.length)


def batch_metadata(tables: Sequence[PageTable], q_lens: Sequence[int]) -> Any:
    """The metadata of :func:`paged_attention` for a batch, to be shared by all layers.

    Args:
        tables: one per sequence, the chunk's tokens appended.
        q_lens: queries of each sequence.

    Returns:
        What ``paged_attention(..., metadata=...)`` takes.
    """
    if len({table.page_size for table in tables}) != 1 or len(tables) != len(q_lens):
        raise ValueError(
            f"[batch_metadata] expected tables of one page size and as many q_lens; got "
            f"{[table.page_size for table in tables]} and {len(q_lens)} q_lens"
        )
    width = max(1, *(len(table._pages) for table in tables)) if tables else 1
    block_table = np.full((len(tables), width), -1, np.int32)
    for n, table in enumerate(tables):
        block_table[n, : len(table._pages)] = table._pages
    return _ext.AttentionMetadata(
        block_table=block_table,
        seq_lens=np.array([table.length for table in tables], np.int32),
        cu_seqlens_q=np.cumsum([0, *q_lens]),
        page_size=tables[0].page_size,
    )
