"""Pools under lazy graphs: every interleaving is right or refused."""

import copy
import gc
import pickle
import threading

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.cache import KVPages

TOKENS = 16


def make(num_pages=2):
    return KVPages(num_pages, 1, 64, page_size=TOKENS, k_format="f32", v_format="f32")


def write(pages, value, page=0):
    x = mx.full((TOKENS, 1, 64), value)
    return chunkdelta.append_kv(pages, mx.zeros_like(x), x, range(page * 16, page * 16 + TOKENS))


def read(pages, page=0, q=None):
    """The mean of a page's values."""
    q = mx.zeros((1, 1, 64)) if q is None else q
    return chunkdelta.paged_attention(
        q, pages, block_table=[[page]], seq_lens=[TOKENS], cu_seqlens_q=[0, 1]
    )


def test_pairs_of_append_and_read_in_one_eval():
    pages = make()
    results = [read(write(pages, float(value))) for value in range(1, 9)]
    mx.eval(results)
    assert [r[0, 0, 0].item() for r in results] == list(range(1, 9))


def test_reads_before_writes_whatever_is_evaluated_first():
    pages = make()
    write(pages, 1.0)
    slow = mx.zeros((1, 1, 64))
    for _ in range(200):  # the read's input takes its time
        slow = slow + mx.zeros((1, 1, 64))
    early = read(pages, q=slow)
    write(pages, 2.0)
    mx.eval(pages.arrays)  # the write is evaluated first, the read only as what it waits for
    late = read(pages)
    assert (early[0, 0, 0].item(), late[0, 0, 0].item()) == (1.0, 2.0)


def test_reads_on_another_stream_come_before_the_write():
    pages = make()
    write(pages, 1.0)
    stream = mx.new_stream(mx.cpu)
    early = []
    for value in range(2, 8):
        early.append(
            chunkdelta.paged_attention(
                mx.zeros((1, 1, 64)),
                pages,
                block_table=[[0]],
                seq_lens=[TOKENS],
                cu_seqlens_q=[0, 1],
                stream=stream,
            )
        )
        write(pages, float(value))
    mx.eval(pages.arrays, early)
    assert [e[0, 0, 0].item() for e in early] == list(range(1, 7))


def test_equal_writes_are_not_merged():
    pages = make()
    first = read(write(pages, 3.0))
    write(pages, 4.0)
    again = read(write(pages, 3.0))
    mx.eval(again)
    assert (first[0, 0, 0].item(), again[0, 0, 0].item()) == (3.0, 3.0)


def test_a_read_that_nobody_evaluates_does_no_harm():
    pages = make()
    write(pages, 1.0)
    read(pages)
    gc.collect()
    write(pages, 2.0)
    assert read(pages)[0, 0, 0].item() == 2.0


def test_tokens_do_not_pin_outputs():
    pages = make()
    write(pages, 1.0)
    q = mx.zeros((1024, 16, 64))
    mx.eval(q)
    before = mx.get_active_memory()
    for _ in range(4):
        o = chunkdelta.paged_attention(
            q, pages, block_table=[[0]], seq_lens=[TOKENS], cu_seqlens_q=[0, 1024], causal=False
        )
        mx.eval(o)
    del o
    assert mx.get_active_memory() - before < q.nbytes // 4


def test_a_pool_that_is_only_read_forgets_finished_reads():
    pages = make()
    write(pages, 1.0)
    for _ in range(300):
        mx.eval(read(pages))
    assert max(map(len, pages._core.reads)) <= 65


def test_copied_pages_are_bytes_of_the_moment():
    pages = make(2)
    pages.grow(2)
    write(pages, 1.0, page=0)
    pages.copy_pages([0], [3])  # into the other slab
    write(pages, 2.0, page=0)  # waits for the copy
    pages.copy_pages([3], [1])
    write(pages, 5.0, page=3)
    results = [read(pages, page)[0, 0, 0].item() for page in (0, 1, 3)]
    assert results == [2.0, 1.0, 5.0]


def test_copies_across_slabs_wait_for_each_other():
    pages = make(2)
    pages.grow(2)
    for page in range(4):
        write(pages, float(page), page=page)
    pages.copy_pages([0, 2], [3, 1])  # either slab reads the other
    for page in (0, 2):
        write(pages, 9.0, page=page)
    mx.eval(pages.arrays)
    assert [read(pages, page)[0, 0, 0].item() for page in range(4)] == [9.0, 2.0, 9.0, 0.0]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([0], [0, 1], "a source per target"),
        ([0], [2], r"page ids in 0\.\.1; got 2"),
        ([-1], [0], r"page ids in 0\.\.1; got -1"),
        ([0], [0], "distinct targets that are no sources"),
        ([0, 0], [1, 1], "distinct targets that are no sources"),
    ],
)
def test_copy_refusals(source, target, message):
    pages = make()
    with pytest.raises(ValueError, match=message):
        pages.copy_pages(source, target)
    assert pages.generation == 0


def test_tracers_are_refused():
    pages = make()
    write(pages, 1.0)
    mx.eval(pages.arrays)

    def reads(q):
        return read(pages, q=q).sum()

    def writes(x):
        chunkdelta.append_kv(pages, x, x, [0])
        return x

    q, x = mx.zeros((1, 1, 64)), mx.zeros((1, 1, 64))
    for traced in (
        lambda: mx.compile(reads)(q),
        lambda: mx.compile(writes)(x),
        lambda: mx.compile(lambda: read(pages))(),  # no traced argument at all
        lambda: mx.grad(reads)(q),
        lambda: mx.vmap(reads)(q[None]),
        lambda: mx.vmap(writes)(x[None]),
        lambda: mx.compile(lambda: mx.array(make().num_pages))(),
    ):
        with pytest.raises(ValueError, match=r"outside mx\.compile, mx\.grad and mx\.vmap"):
            traced()
    assert pages.generation == 1
    assert read(pages)[0, 0, 0].item() == 1.0


def test_traced_metadata_is_refused():
    pages = make()
    metadata = mx.array([0, 1])

    def call(offsets):
        return chunkdelta.attention_metadata(
            block_table=[[0]], seq_lens=[3], cu_seqlens_q=offsets, page_size=16
        ).num_tokens

    assert call(metadata) == 1
    with pytest.raises(ValueError, match="cu_seqlens_q as host data"):
        mx.compile(lambda offsets: mx.array(call(offsets)))(metadata)
    assert pages.generation == 0


def test_copies_of_the_object_are_refused():
    pages = make()
    for copied in (
        lambda: copy.copy(pages),
        lambda: copy.deepcopy([pages]),
        lambda: pickle.dumps(pages),
    ):
        with pytest.raises(TypeError, match=r"\[KVPages\] expected the pool itself"):
            copied()


def test_a_frozen_handle_reads_its_generation_only():
    pages = make()
    write(pages, 1.0)
    frozen = pages.frozen()
    assert read(frozen)[0, 0, 0].item() == 1.0
    with pytest.raises(ValueError, match="the pool itself; got a frozen handle"):
        write(frozen, 2.0)
    with pytest.raises(ValueError, match="the pool itself; got a frozen handle"):
        frozen.grow(1)
    write(pages, 2.0)
    with pytest.raises(ValueError, match=r"generation 1, .* got generation 2"):
        read(frozen)
    assert read(pages.frozen())[0, 0, 0].item() == 2.0


def in_thread(call):
    result = []

    def run():
        with mx.stream(mx.new_stream(mx.cpu)):
            try:
                result.append(call())
            except Exception as error:
                result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


def test_pending_writes_of_another_thread_are_refused():
    pages = make()
    write(pages, 1.0)
    refused = in_thread(lambda: read(pages))
    assert isinstance(refused, ValueError)
    assert "expected writes of other threads to be evaluated" in str(refused)
    mx.eval(pages.arrays)
    assert in_thread(lambda: read(pages)[0, 0, 0].item()) == 1.0


def test_pending_reads_of_another_thread_are_refused_to_writers():
    pages = make()
    write(pages, 1.0)
    mx.eval(pages.arrays)
    pending = read(pages)
    assert in_thread(lambda: read(pages)[0, 0, 0].item()) == 1.0  # two readers are fine
    refused = in_thread(lambda: write(pages, 2.0))
    assert "expected reads of other threads to be evaluated" in str(refused)
    assert pending[0, 0, 0].item() == 1.0
    in_thread(lambda: mx.eval(write(pages, 2.0).arrays))
    assert read(pages)[0, 0, 0].item() == 2.0


def test_two_threads_at_once_are_right_or_refused():
    pages = make(4)
    counts = {"right": 0, "refused": 0, "wrong": 0}
    lock = threading.Lock()

    def work(page):
        stream = mx.new_stream(mx.cpu)
        with mx.stream(stream):
            for value in range(1, 40):
                try:
                    write(pages, float(value), page=page)
                    got = read(pages, page)
                    mx.eval(got, pages.arrays)
                    outcome = "right" if got[0, 0, 0].item() == value else "wrong"
                except ValueError as error:
                    known = "of other threads to be evaluated" in str(error)
                    outcome = "refused" if known else "wrong"
                with lock:
                    counts[outcome] += 1

    threads = [threading.Thread(target=work, args=(page,)) for page in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts["wrong"] == 0
    assert counts["right"] > 0
    assert counts["right"] + counts["refused"] == 78


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1, 64), {}, "num_pages >= 1; got 0"),
        ((1, 0, 64), {}, "num_kv_heads >= 1; got 0"),
        ((1, 1, 66), {}, r"head_dim a multiple of 4 in 4\.\.256; got 66"),
        ((1, 1, 260), {}, r"head_dim a multiple of 4 in 4\.\.256; got 260"),
        ((1, 1, 64), {"page_size": 24}, "page_size a multiple of 16; got 24"),
        ((2**27, 1, 64), {}, r"2\*\*31 - 1 slots"),
    ],
)
def test_pool_refusals(arguments, options, message):
    with pytest.raises(ValueError, match=r"\[KVPages\] expected .*" + message):
        KVPages(*arguments, **options)


@pytest.mark.parametrize(
    ("k_format", "v_format", "bits"),
    [("f32", "f32", 32), ("f16", "bf16", 16), ("q8_0", "bf16", 12.25), ("q8_0", "q8_0", 8.5)],
)
def test_bytes_are_those_of_the_format(k_format, v_format, bits):
    pages = KVPages(3, 2, 128, page_size=32, k_format=k_format, v_format=v_format)
    assert pages.bytes_per_token == 2 * 128 * 2 * bits / 8
    assert pages.nbytes == pages.num_slots * pages.bytes_per_token
    pages.grow(5)
    assert pages.nbytes == pages.num_slots * pages.bytes_per_token
    assert (pages.num_pages, pages.num_slots, pages.num_slabs) == (8, 256, 2)


def test_kv_format_names():
    for options in ({"k_format": "q3_x"}, {"v_format": "q3_x"}):
        with pytest.raises(ValueError, match=r"formats in \{f32, f16, bf16, q8_0.*\}; got '"):
            KVPages(1, 1, 64, **options)
    assert chunkdelta.cache.parse_kv_format("bf16") == ("bf16", "bf16")
    assert chunkdelta.cache.parse_kv_format("q8_0/f16") == ("q8_0", "f16")
    for name in ("", "q8_0/", "int4", "bf16/bf16/bf16", "bf16/int4"):
        with pytest.raises(ValueError, match=r"\[kv_format\] expected FORMAT"):
            chunkdelta.cache.parse_kv_format(name)


def test_numpy_of_page_ids():
    pages = make(2)
    write(pages, 1.0)
    pages.copy_pages(np.array([0]), np.array([1]))
    assert read(pages, 1)[0, 0, 0].item() == 1.0
