"""The pages of one attention layer together with who holds them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from chunkdelta.cache.page_allocator import PageAllocator, PageTable
from chunkdelta.cache.pages import KVPages, parse_kv_format

# A growing pool starts with this many tokens; each slab adds half of what there is, within bounds:
# at most a third of the memory waits for tokens, and 131,072 tokens take nine slabs.
FIRST_SLAB_TOKENS = 2048
LARGEST_SLAB_TOKENS = 32768

Work = Sequence[tuple[PageTable, int]]  # how many tokens each sequence appends


class KVPool:
    """Pages of one layer and their reference counts, of fixed capacity or growing by slabs.

    Args:
        num_pages: Pages allocated now.
        num_kv_heads: KV heads (of this shard).
        head_dim: Dimension of a head.
        page_size: Tokens in a page, a multiple of 16. Default: ``64``.
        kv_format: Format of K and V, or ``"K/V"``. Default: ``"bf16"``.
        growable: Whether a full pool adds a slab instead of refusing. Default: ``False``.

    Attributes:
        pages: The :class:`KVPages` that the kernels read and write.
        allocator: The :class:`PageAllocator` of these pages.
        reclaim: Called as ``reclaim(pool, pages)`` when a pool that does not grow has fewer free
            pages than a sequence needs, to give up what it holds in reserve
            (:meth:`PrefixCache.attach`). Default: ``None``.

    Example:
        >>> from chunkdelta.cache.kv_pool import KVPool
        >>> pool = KVPool(4, num_kv_heads=2, head_dim=64)
        >>> table = pool.new_table()
        >>> pool.extend([(table, 70)]).tolist()[-1], pool.free_pages
        (69, 2)
    """

    def __init__(
        self,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int = 64,
        kv_format: str = "bf16",
        growable: bool = False,
    ):
        k_format, v_format = parse_kv_format(kv_format)
        self.pages = KVPages(
            num_pages,
            num_kv_heads,
            head_dim,
            page_size=page_size,
            k_format=k_format,
            v_format=v_format,
        )
        self.allocator = PageAllocator(num_pages)
        self.kv_format = kv_format
        self.growable = growable
        self.reclaim: Callable[[KVPool, int], None] | None = None
        self._lock = threading.Lock()

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.pages.page_size

    @property
    def capacity(self) -> int:
        """Tokens that the pages allocated now can hold."""
        return self.pages.num_slots

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, held or free."""
        return self.pages.nbytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V."""
        return self.pages.bytes_per_token * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self.allocator.num_free

    def new_table(self) -> PageTable:
        """An empty sequence in this pool."""
        return PageTable(self.allocator, self.page_size)

    def _needed(self, work: Work) -> int:
        needed = sum(table.pages_needed(count) for table, count in work)
        if len(work) > 1:  # of forks that all write into their shared page, the last keeps it
            writers = Counter(
                table.pages[-1] for table, count in work if count and table.length % self.page_size
            )
            needed -= sum(
                n > 1 and n == self.allocator.ref_count(page) for page, n in writers.items()
            )
        return needed

    def _short(self, work: Work) -> int:
        needed = self._needed(work)
        if needed > self.free_pages and not self.growable and self.reclaim is not None:
            self.reclaim(self, needed)
        free = self.free_pages
        if needed > free and not self.growable:
            tokens = sum(count for _, count in work)
            raise ValueError(
                f"[kv_cache] expected at most {free} new pages of {self.page_size} tokens (a pool "
                f"for {self.capacity} tokens, {self.pages.num_pages - free} pages held); got "
                f"{tokens} tokens more, which take {needed}: make the cache with larger max_tokens"
            )
        return max(0, needed - free)

    def check(self, work: Work) -> None:
        """Raise ValueError unless each sequence can append its count of tokens."""
        with self._lock:
            self._short(work)

    def extend(self, work: Work) -> NDArray[np.int32]:
        """Give each sequence pages for its new tokens, all or none; shared pages are copied.

        Returns:
            int32 slots of the new tokens, sequence after sequence.

        Raises:
            ValueError: The pool is full and does not grow; nothing is changed then.
        """
        with self._lock:
            short = self._short(work)
            if short:
                half = min(self.pages.num_pages // 2, LARGEST_SLAB_TOKENS // self.page_size)
                slab = max(short, half)
                self.pages.grow(slab)
                self.allocator.grow(slab)
            appended = [table.append(count) for table, count in work]
            sources = [page for a in appended for page in a.copies[0]]
            if sources:
                self.pages.copy_pages(sources, [page for a in appended for page in a.copies[1]])
        return np.concatenate([a.slots for a in appended])
