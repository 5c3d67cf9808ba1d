"""Page allocator and page tables."""

import copy
import gc
import threading

import chunkdelta
import numpy as np
import pytest
from chunkdelta.cache import OutOfPages, PageAllocator, PageTable, batch_metadata


def test_pages_are_reused_least_recently_freed_first():
    allocator = PageAllocator(4)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    allocator.release([2])
    allocator.release([0, 3])
    assert allocator.allocate(2) == [2, 0]
    assert allocator.num_free == 1


def test_allocation_is_all_or_nothing():
    allocator = PageAllocator(3)
    allocator.allocate(1)
    with pytest.raises(OutOfPages, match="expected 3 free pages; got 2 of 3"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_a_free_page_can_be_taken_back_with_what_it_holds():
    allocator = PageAllocator(4)
    allocator.release(allocator.allocate(3))
    allocator.retain([1])  # out of the middle of the free list
    assert allocator.ref_count(1) == 1
    assert allocator.allocate(3) == [3, 0, 2]


def test_pages_are_freed_with_their_last_reference():
    allocator = PageAllocator(2)
    pages = allocator.allocate(2)
    allocator.retain(pages)
    allocator.release(pages)
    assert allocator.num_free == 0
    allocator.release(pages)
    assert allocator.num_free == 2


def test_grown_pages_follow_the_old_ones():
    allocator = PageAllocator(1)
    allocator.allocate(1)
    allocator.grow(2)
    assert (allocator.num_pages, allocator.allocate(2)) == (3, [1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: PageAllocator(0), "num_pages >= 1; got 0"),
        (lambda a: a.allocate(-1), "count >= 0; got -1"),
        (lambda a: a.grow(0), "num_pages >= 1; got 0"),
        (lambda a: a.retain([3]), r"page ids in 0\.\.2; got 3"),
        (lambda a: a.release([-1]), r"page ids in 0\.\.2; got -1"),
        (lambda a: a.release([0]), "a page that is held; got page 0 with 0 references"),
        (lambda a: a.release([2, 2]), "a page that is held; got page 2 with 1 references"),
    ],
)
def test_allocator_refusals_change_nothing(call, message):
    allocator = PageAllocator(3)
    allocator.retain([2])
    with pytest.raises(ValueError, match=message):
        call(allocator)
    assert (allocator.num_free, allocator.ref_count(2)) == (2, 1)


def test_table_slots_follow_its_pages():
    allocator = PageAllocator(5)
    other = PageTable(allocator, 16)
    other.append(1)
    table = PageTable(allocator, 16)
    first = table.append(20)
    assert first.slots.dtype == np.int32
    assert first.slots.tolist() == [*range(16, 32), *range(32, 36)]
    assert table.append(0).slots.tolist() == []
    assert table.append(13).slots.tolist() == [*range(36, 48), 48]
    assert (table.length, table.pages) == (33, [1, 2, 3])


def test_trim_removes_exactly_that_many():
    allocator = PageAllocator(4)
    table = PageTable(allocator, 16)
    table.append(49)
    table.trim(1)
    assert (table.length, table.pages, allocator.num_free) == (48, [0, 1, 2], 1)
    table.trim(20)
    assert (table.length, table.pages, allocator.num_free) == (28, [0, 1], 2)
    for count in (29, -1):
        with pytest.raises(ValueError, match=rf"count in 0\.\.28, the tokens held; got {count}"):
            table.trim(count)
    assert table.append(4).slots.tolist() == [28, 29, 30, 31]


def test_fork_shares_until_it_writes():
    allocator = PageAllocator(4)
    table = PageTable(allocator, 16)
    table.append(20)
    fork = copy.deepcopy(table)
    assert (fork.pages, fork.length, allocator.num_free) == ([0, 1], 20, 2)
    assert fork.pages_needed(1) == 1
    appended = fork.append(1)
    assert (appended.copies, appended.slots.tolist()) == (([1], [2]), [36])
    assert table.append(1).copies == ([], [])  # page 1 is its own now
    assert [allocator.ref_count(p) for p in range(4)] == [2, 1, 1, 0]


def test_fork_at_a_page_boundary_copies_nothing():
    table = PageTable(PageAllocator(4), 16)
    table.append(16)
    fork = table.fork()
    assert fork.append(1).copies == ([], [])
    assert (table.pages, fork.pages) == ([0], [0, 1])


def test_a_full_pool_says_so_and_leaves_the_table_as_it_was():
    allocator = PageAllocator(3)
    table = PageTable(allocator, 16)
    table.append(33)
    fork = table.fork()
    for count in (1, 16):  # the copy of the shared page alone does not fit
        with pytest.raises(OutOfPages, match="got 0 of 3"):
            fork.append(count)
    assert (fork.length, fork.pages) == (33, [0, 1, 2])
    table.release()
    assert fork.append(15).copies == ([], [])


def test_a_dropped_table_releases_its_pages():
    allocator = PageAllocator(3)
    table = PageTable(allocator, 16)
    table.append(20)
    fork = table.fork()
    del table
    gc.collect()
    assert allocator.num_free == 1
    fork.release()
    fork.release()
    assert (allocator.num_free, fork.length) == (3, 0)


def test_tables_dropped_in_other_threads():
    allocator = PageAllocator(64)

    def work():
        for _ in range(200):
            table = PageTable(allocator, 16)
            table.append(40)
            fork = table.fork()
            fork.append(1)
            del table, fork

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert allocator.num_free == 64


def test_batch_metadata():
    allocator = PageAllocator(5)
    tables = [PageTable(allocator, 16) for _ in range(3)]
    for table, count in zip(tables, (20, 0, 3), strict=True):
        table.append(count)
    metadata = batch_metadata(tables, [4, 0, 1])
    assert (metadata.num_tokens, metadata.page_size, metadata.max_page) == (5, 16, 2)
    with pytest.raises(ValueError, match=r"\[batch_metadata\] expected tables of one page size"):
        batch_metadata([*tables, PageTable(allocator, 32)], [1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"\[batch_metadata\] expected tables of one page size"):
        batch_metadata(tables, [1])


def test_pages_and_tables_together():
    """Two sequences that share a prefix, written by both sides after the fork."""
    import mlx.core as mx

    pages = chunkdelta.KVPages(6, 1, 64, page_size=16, k_format="f32", v_format="f32")
    allocator = PageAllocator(pages.num_pages)
    table = PageTable(allocator, 16)

    def append(table, values):
        appended = table.append(len(values))
        pages.copy_pages(*appended.copies)
        v = mx.broadcast_to(mx.array(values, mx.float32)[:, None, None], (len(values), 1, 64))
        chunkdelta.append_kv(pages, mx.zeros_like(v), v, appended.slots)

    append(table, [1.0] * 20)
    fork = table.fork()
    append(fork, [5.0] * 20)
    append(table, [3.0] * 4)
    o = chunkdelta.paged_attention(
        mx.zeros((2, 1, 64)), pages, metadata=batch_metadata([table, fork], [1, 1])
    )
    assert o[:, 0, 0].tolist() == pytest.approx([(20 + 12) / 24, (20 + 100) / 40], rel=1e-6)
