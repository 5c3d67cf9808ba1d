"""Padding counted on the host, and packing of the tokens between it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.cache.packing import Packing, packing
from chunkdelta.cache.padding import Padding
from hypothesis import given
from hypothesis import strategies as st


def test_no_padding_has_no_spans():
    padding = Padding(rows=2)
    assert padding.spans(7) is None
    padding.prepare(rows=2, lengths=[7, 7], right_padding=[0, 0], op="t")
    assert padding.spans(7) is None


def test_left_padding_over_chunks():
    padding = Padding(left=[5, 0, 3])
    assert padding.spans(4) == ((4, 4), (0, 4), (3, 4))
    padding.advance(4)
    assert padding.spans(4) == ((1, 4), (0, 4), (0, 4))
    padding.advance(4)
    assert padding.spans(4) is None


def test_right_padding_over_chunks():
    padding = Padding(rows=2)
    padding.prepare(rows=2, lengths=[6, 1], right_padding=[0, 5], op="t")
    assert padding.spans(4) == ((0, 4), (0, 1))
    padding.advance(4)
    assert padding.spans(2) == ((0, 2), (0, 0))
    padding.finalize()
    assert padding.spans(1) is None


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"lengths": [1]}, r"\[t\] expected lengths of 2 rows, each >= 0; got \[1\]"),
        ({"left_padding": [1, -1]}, r"expected left_padding of 2 rows, each >= 0; got \[1, -1\]"),
        ({"right_padding": [0, 2]}, r"expected lengths beside right_padding"),
    ],
    ids=["rows", "negative", "right-alone"],
)
def test_refusals(given_, message):
    padding = Padding(rows=2)
    with pytest.raises(ValueError, match=message):
        padding.prepare(rows=2, op="t", **given_)
    assert padding.spans(3) is None


def test_arrays_are_taken_too():
    padding = Padding(rows=2)
    padding.prepare(rows=2, lengths=mx.array([2, 1]), right_padding=np.array([0, 1]), op="t")
    assert padding.spans(2) == ((0, 2), (0, 1))


rows = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=4
)  # left padding, tokens


@given(rows, st.integers(1, 5))
def test_every_token_is_seen_once_for_any_chunks(rows, chunk):
    """Left padding and right padding at once, cut anywhere."""
    left = [a for a, _ in rows]
    lengths = [a + n for a, n in rows]
    columns = max(lengths)
    padding = Padding(left=left)
    padding.prepare(rows=len(rows), lengths=lengths, op="t")
    seen: list[list[int]] = [[] for _ in rows]
    for start in range(0, columns, chunk):
        size = min(chunk, columns - start)
        spans = padding.spans(size) or ((0, size),) * len(rows)
        for b, (lo, hi) in enumerate(spans):
            seen[b] += range(start + lo, start + hi)
        padding.advance(size)
    assert seen == [list(range(a, a + n)) for a, n in rows]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
)
def test_pack_and_unpack(bounds):
    columns = 5
    spans = tuple((min(a, b), max(a, b)) for a, b in bounds)
    x = mx.arange(len(spans) * columns * 3).reshape(len(spans), columns, 3).astype(mx.float32) + 1
    p = Packing(columns, spans)
    packed = p.pack(x)
    assert packed.shape == (1, p.cu_seqlens[-1], 3)
    mask = np.zeros((len(spans), columns, 1), bool)
    for b, (lo, hi) in enumerate(spans):
        mask[b, lo:hi] = True
        start, stop = p.cu_seqlens[b : b + 2]
        assert mx.array_equal(packed[0, start:stop], x[b, lo:hi])
    np.testing.assert_array_equal(p.unpack(packed), np.where(mask, np.array(x), 0))


def test_padding_never_leaks():
    x = mx.array([[[mx.nan], [1.0]], [[2.0], [mx.nan]]])
    p = Packing(2, ((1, 2), (0, 1)))
    assert p.unpack(p.pack(x)).tolist() == [[[0.0], [1.0]], [[2.0], [0.0]]]


def test_one_packing_for_all_layers():
    assert packing(4, ((0, 4), (1, 4))) is packing(4, ((0, 4), (1, 4)))
