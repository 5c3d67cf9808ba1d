"""Chunk planning: covers the prompt, balanced, cut where it must be."""

import itertools

import pytest
from chunkdelta.loop.chunks import plan_chunks
from hypothesis import given
from hypothesis import strategies as st

CASES = [
    # start, stop, chunk_size, cut_points, chunks
    pytest.param(0, 0, 512, (), [], id="nothing-left"),
    pytest.param(7, 7, 1, (7,), [], id="nothing-left-after-prefix"),
    pytest.param(0, 1, 512, (), [(0, 1)], id="one-token"),
    pytest.param(0, 512, 512, (), [(0, 512)], id="exactly-one-chunk"),
    pytest.param(0, 513, 512, (), [(0, 257), (257, 513)], id="one-over-is-halved"),
    pytest.param(0, 1165, 512, (), [(0, 389), (389, 777), (777, 1165)], id="tail-141-spread"),
    pytest.param(3, 6, 1, (), [(3, 4), (4, 5), (5, 6)], id="token-by-token"),
    pytest.param(
        100, 700, 512, (700, 128, 128, 50, 4096), [(100, 128), (128, 414), (414, 700)], id="cuts"
    ),
    pytest.param(0, 1024, 512, (512,), [(0, 512), (512, 1024)], id="cut-at-a-natural-edge"),
]


@pytest.mark.parametrize(("start", "stop", "chunk_size", "cuts", "chunks"), CASES)
def test_chunks(start, stop, chunk_size, cuts, chunks):
    assert plan_chunks(start, stop, chunk_size=chunk_size, cut_points=cuts) == chunks


@given(
    start=st.integers(0, 5000),
    length=st.integers(0, 5000),
    chunk_size=st.integers(1, 2048),
    cuts=st.lists(st.integers(0, 12000), max_size=8),
)
def test_chunks_cover_balance_and_cut(start, length, chunk_size, cuts):
    stop = start + length
    chunks = plan_chunks(start, stop, chunk_size=chunk_size, cut_points=cuts)
    edges = [start] + [end for _, end in chunks]
    assert [begin for begin, _ in chunks] == edges[:-1]
    assert edges[-1] == stop
    assert {c for c in cuts if start < c < stop} <= set(edges)
    forced = sorted({start, stop, *(c for c in cuts if start < c < stop)})
    for low, high in itertools.pairwise(forced):
        lengths = [e - b for b, e in chunks if low <= b and e <= high]
        assert sum(lengths) == high - low
        assert max(lengths) <= chunk_size
        assert max(lengths) - min(lengths) <= 1
        assert len(lengths) == -(-(high - low) // chunk_size)
        assert len(lengths) == 1 or min(lengths) >= chunk_size // 2


@pytest.mark.parametrize(
    ("start", "stop", "chunk_size", "message"),
    [
        pytest.param(-1, 4, 2, "0 <= start <= stop; got start=-1", id="negative-start"),
        pytest.param(5, 4, 2, "0 <= start <= stop; got start=5, stop=4", id="backwards"),
        pytest.param(0, 4, 0, "chunk_size >= 1; got 0", id="no-chunk-size"),
    ],
)
def test_refuses(start, stop, chunk_size, message):
    with pytest.raises(ValueError, match=message):
        plan_chunks(start, stop, chunk_size=chunk_size)
