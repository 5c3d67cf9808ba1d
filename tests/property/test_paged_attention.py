"""Paged attention over random batches, formats and options, and its invariances."""

import os

import chunkdelta
import mlx.core as mx
import numpy as np
from chunkdelta.testing.attention import PagedBatch
from chunkdelta.testing.attention_strategies import attention_options, paged_batches
from hypothesis import given, settings
from hypothesis import strategies as st

# CHUNKDELTA_FUZZ is read by the tests only: the number of cases of a long run.
FUZZ = int(os.environ.get("CHUNKDELTA_FUZZ", "30"))


def relative(a, b):
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def attend(batch, options):
    o, lse = chunkdelta.paged_attention(
        batch.q, batch.pages, **batch.metadata, return_lse=True, **options
    )
    return np.array(o.astype(mx.float32), np.float64), np.array(lse, np.float64)


@settings(max_examples=FUZZ, deadline=None)
@given(batch=paged_batches(), data=st.data())
def test_error_is_at_most_twice_that_of_the_plain_computation(batch, data):
    options = data.draw(attention_options(batch.num_q_heads))
    if data.draw(st.booleans(), "strided"):
        batch.q = mx.contiguous(batch.q.transpose(1, 2, 0)).transpose(2, 0, 1)
    o, lse = attend(batch, options)
    expected, expected_lse = batch.naive(**options)
    assert np.isfinite(o).all()  # unused slots hold NaN
    # One rounding of the output, for batches of a few rows where the plain one may be exact.
    rounding = {mx.float32: 2**-22, mx.float16: 2**-11, mx.bfloat16: 2**-8}[batch.dtype]
    plain = batch.plain(**options)
    assert relative(o, expected) <= 2 * relative(plain, expected) + rounding
    seen = np.isfinite(expected_lse)
    assert np.array_equal(lse == -np.inf, ~seen)
    magnitude = np.abs(expected_lse[seen]).max(initial=1.0)
    assert np.abs(lse[seen] - expected_lse[seen]).max(initial=0) <= 4e-6 * magnitude


@settings(max_examples=FUZZ, deadline=None)
@given(
    length=st.integers(1, 400),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    head_dim=st.sampled_from([64, 80]),
    window=st.none() | st.integers(1, 200),
)
def test_chunks_say_what_the_whole_says(length, cuts, head_dim, window):
    batch = PagedBatch(q_lens=[length], seq_lens=[length], head_dim=head_dim, num_q_heads=2)
    ends = sorted({min(cut, length) for cut in cuts} | {length})
    parts, begin = [], 0
    for end in ends:
        parts.append(
            chunkdelta.paged_attention(
                batch.q[begin:end],
                batch.pages,
                block_table=batch.block_table,
                seq_lens=[end],
                cu_seqlens_q=[0, end - begin],
                window=window,
            )
        )
        begin = end
    got = np.array(mx.concatenate(parts), np.float64)
    expected, _ = batch.naive(window=window)
    error = relative(batch.plain(window=window), expected)
    assert relative(got, expected) <= 2 * error + 2**-22


@settings(max_examples=FUZZ, deadline=None)
@given(batch=paged_batches(), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_where_pages_lie_changes_no_bit(batch, seed, data):
    options = data.draw(attention_options(batch.num_q_heads))
    before = attend(batch, options)
    used = batch.block_table[batch.block_table >= 0]
    if used.size:
        first = batch.pages.num_pages
        batch.pages.grow(used.size)
        moved = np.random.default_rng(seed).permutation(used.size) + first
        batch.pages.copy_pages(used, moved)
        batch.block_table[batch.block_table >= 0] = moved
    after = attend(batch, options)
    assert np.array_equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])


@settings(max_examples=FUZZ, deadline=None)
@given(batch=paged_batches(), data=st.data())
def test_sequences_do_not_see_each_other(batch, data):
    options = data.draw(attention_options(batch.num_q_heads))
    together, _ = attend(batch, options)
    for n, length in enumerate(batch.seq_lens):
        begin, end = batch.cu_seqlens_q[n : n + 2]
        alone = chunkdelta.paged_attention(
            batch.q[begin:end],
            batch.pages,
            block_table=batch.block_table[n : n + 1],
            seq_lens=[length],
            cu_seqlens_q=[0, end - begin],
            **options,
        )
        assert np.array_equal(np.array(alone.astype(mx.float32)), together[begin:end])


@settings(max_examples=FUZZ, deadline=None)
@given(
    length=st.integers(32, 300),
    queries=st.integers(1, 20),
    data=st.data(),
)
def test_split_over_keys_and_merged_is_the_whole(length, queries, data):
    batch = PagedBatch(q_lens=[queries], seq_lens=[length])
    cut = data.draw(st.integers(1, (length - 1) // 16))
    table = batch.block_table
    parts = [
        chunkdelta.paged_attention(
            batch.q,
            batch.pages,
            block_table=part,
            seq_lens=[keys],
            cu_seqlens_q=[0, queries],
            causal=False,
            return_lse=True,
        )
        for part, keys in ((table[:, :cut], cut * 16), (table[:, cut:], length - cut * 16))
    ]
    outs, lses = zip(*parts, strict=True)
    o, lse = chunkdelta.merge_states(mx.stack(outs), mx.stack(lses))
    expected, expected_lse = batch.naive(causal=False)
    error = relative(batch.plain(causal=False), expected)
    assert relative(np.array(o), expected) <= 2 * error + 2**-22
    assert np.abs(np.array(lse) - expected_lse).max() <= 4e-6 * np.abs(expected_lse).max()
