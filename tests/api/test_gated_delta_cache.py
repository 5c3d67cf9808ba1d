"""The gated-delta cache under mlx-lm's protocol."""

from __future__ import annotations

import copy

import mlx.core as mx
import pytest
from chunkdelta.cache.gated_delta_cache import GatedDeltaCache
from mlx_lm.models.cache import ArraysCache


def filled(rows: int, value: float = 1.0) -> GatedDeltaCache:
    cache = GatedDeltaCache()
    cache[0] = value * mx.ones((rows, 3, 8)) * mx.arange(1, rows + 1)[:, None, None]
    cache[1] = value * mx.ones((rows, 2, 4, 4)) * mx.arange(1, rows + 1)[:, None, None, None]
    return cache


def first(cache: GatedDeltaCache) -> list[float]:
    return cache[1][:, 0, 0, 0].tolist()


def test_is_an_arrays_cache_that_cannot_be_trimmed():
    cache = GatedDeltaCache()
    assert isinstance(cache, ArraysCache)
    assert cache.empty()
    assert cache.nbytes == 0
    assert not cache.is_trimmable()
    assert cache.make_mask(5) is None
    assert filled(2).nbytes == 2 * (3 * 8 + 2 * 4 * 4) * 4


def test_mask_stays_none_for_padded_batches():
    cache = GatedDeltaCache(left_padding=[1, 0])
    assert cache.make_mask(4) is None
    assert cache.spans(2, 4) == ((1, 4), (0, 4))
    merged = GatedDeltaCache.merge([GatedDeltaCache(), GatedDeltaCache()])
    assert merged.make_mask(4) is None
    assert merged.batch_size == 2
    merged.prepare(lengths=[4, 2], right_padding=[0, 2])
    assert merged.make_mask(4) is None
    assert merged.spans(2, 4) == ((0, 4), (0, 2))
    merged.advance(4)
    assert merged.lengths == [0, 0]
    merged.finalize()
    assert merged.spans(2, 4) is None


def test_merge_filter_extend_extract():
    batch = GatedDeltaCache.merge([filled(1, 1), GatedDeltaCache(), filled(1, 3)])
    assert first(batch) == [1, 0, 3]
    batch.extend(GatedDeltaCache.merge([filled(1, 5), GatedDeltaCache()]))
    assert first(batch) == [1, 0, 3, 5, 0]
    batch.filter([3, 0])
    assert first(batch) == [5, 1]
    assert batch.batch_size == 2
    assert first(batch.extract(1)) == [1]


def test_extending_empty_batches_counts_rows():
    batch = GatedDeltaCache.merge([GatedDeltaCache()])
    batch.extend(GatedDeltaCache.merge([GatedDeltaCache(), GatedDeltaCache()]))
    assert batch.batch_size == 3
    batch.extend(filled(1))
    assert first(batch) == [0, 0, 0, 1]


def test_extending_a_batch_in_preparation_is_refused():
    batch = GatedDeltaCache.merge([GatedDeltaCache()])
    batch.prepare(lengths=[3])
    with pytest.raises(ValueError, match=r"call finalize\(\) first"):
        batch.extend(GatedDeltaCache())


def test_deepcopy_is_a_fork():
    cache = filled(2)
    cache.prepare(lengths=[4, 2])
    fork = copy.deepcopy(cache)
    cache[1] = cache[1] + 1
    cache.advance(1)
    assert first(fork) == [1, 2]
    assert fork.lengths == [4, 2]
    assert first(cache) == [2, 3]


def test_state_round_trip():
    cache = filled(2)
    cache.prepare(lengths=[4, 2])
    again = GatedDeltaCache.from_state(cache.state)
    assert first(again) == first(cache)
    assert again.spans(2, 4) == cache.spans(2, 4)


def test_wrong_rows_are_refused():
    with pytest.raises(ValueError, match=r"expected inputs of 2 rows; got 3"):
        filled(2).spans(3, 1)
    with pytest.raises(ValueError, match=r"expected lengths of 2 rows"):
        filled(2).prepare(lengths=[1, 2, 3])
    with pytest.raises(ValueError, match=r"expected left padding before the first token"):
        filled(2).prepare(left_padding=[1, 0])


def test_extract_does_not_keep_the_batch_alive():
    state = mx.zeros((64, 2, 64, 64))
    batch = GatedDeltaCache()
    batch[0], batch[1] = mx.zeros((64, 3, 8)), state
    mx.eval(batch.state[0])
    before = mx.get_active_memory()
    row = batch.extract(5)
    mx.eval(row.state[0])
    del batch, state
    assert mx.get_active_memory() < before - 60 * 2 * 64 * 64 * 4
    assert row[1].shape == (1, 2, 64, 64)
