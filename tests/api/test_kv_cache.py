"""The paged KV cache under mlx-lm's protocol: pages, forks, batches, padding."""

from __future__ import annotations

import copy
import gc

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.cache.gated_delta_cache import GatedDeltaCache
from chunkdelta.cache.kv_cache import PagedKVCache, SharedPools
from chunkdelta.cache.kv_pool import KVPool
from chunkdelta.models.mlx_lm import load_prompt_cache
from mlx_lm.models.cache import KVCache, save_prompt_cache

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
SCALE = DIM**-0.5


def pool(pages: int = 32, **options) -> KVPool:
    return KVPool(pages, KV_HEADS, DIM, page_size=PAGE, kv_format="f32", **options)


class Sequence:
    """The keys and values that a row should hold, and what attending to them gives."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.k = np.zeros((0, KV_HEADS, DIM))
        self.v = np.zeros((0, KV_HEADS, DIM))

    def append(self, count: int):
        q = self.rng.standard_normal((count, HEADS, DIM))
        k, v = self.rng.standard_normal((2, count, KV_HEADS, DIM))
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        return q, k, v, self.attend(q)

    def attend(self, q):
        """Bottom-right causal attention in float64."""
        k = np.repeat(self.k, HEADS // KV_HEADS, axis=1)
        v = np.repeat(self.v, HEADS // KV_HEADS, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * SCALE
        seen = np.arange(len(k))[None] <= np.arange(len(k) - len(q), len(k))[:, None]
        p = np.exp(np.where(seen, scores, -np.inf) - scores.max(-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)

    def fork(self, seed: int) -> Sequence:
        other = Sequence(seed)
        other.k, other.v = self.k, self.v
        return other


def step(cache: PagedKVCache, rows: list[Sequence], columns: int, counts: list[int]) -> None:
    """Append to the cache what the rows append, and compare what attention sees."""
    q, k, v, want = (
        np.concatenate(x)
        for x in zip(*(r.append(n) for r, n in zip(rows, counts, strict=True)), strict=True)
    )
    got = cache.update_and_attend(
        *(mx.array(x.astype(np.float32)) for x in (q, k, v)),
        scale=SCALE,
        rows=len(rows),
        columns=columns,
    )
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert cache.lengths == [len(r.k) for r in rows]


def held(p: KVPool) -> int:
    gc.collect()
    return p.capacity // PAGE - p.free_pages


def test_one_prompt():
    p = pool()
    cache, row = PagedKVCache(p), Sequence(0)
    assert cache.empty()
    assert cache.offset == 0
    for count in (5, 1, 16, 1, 33):
        step(cache, [row], count, [count])
        assert cache.offset == cache.size() == len(row.k)
    assert not cache.empty()
    assert held(p) == -(-len(row.k) // PAGE)
    assert cache.nbytes == held(p) * p.page_bytes
    del cache
    assert held(p) == 0


def test_masks_are_never_arrays():
    cache = PagedKVCache(pool())
    assert cache.make_mask(1) is None
    assert cache.make_mask(9) == "causal"
    assert cache.make_mask(9, return_array=True) == "causal"
    batch = cache.merge([cache, cache])
    batch.prepare(lengths=[3, 9], right_padding=[6, 0])
    assert batch.make_mask(9) == "causal"
    with pytest.raises(ValueError, match="expected no window"):
        cache.make_mask(9, window_size=4)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 37, 50])
def test_trim_is_exact(count):
    p = pool()
    cache, row = PagedKVCache(p), Sequence(1)
    step(cache, [row], 37, [37])
    assert cache.is_trimmable()
    removed = min(count, 37)
    assert cache.trim(count) == removed
    row.k, row.v = row.k[: 37 - removed], row.v[: 37 - removed]
    assert held(p) == -(-len(row.k) // PAGE)
    step(cache, [row], 5, [5])


@pytest.mark.parametrize("length", [16, 20, 31])
def test_forks_write_apart(length):
    """Both sides of a fork, and a fork of a fork, append different tokens to a shared page."""
    p = pool()
    a, rows = PagedKVCache(p), [Sequence(2)]
    step(a, rows, length, [length])
    before = held(p)
    b, c = copy.deepcopy(a), copy.deepcopy(a)
    assert held(p) == before
    for cache, seed in ((b, 3), (a, 4), (c, 5)):
        row = rows[0].fork(seed)
        for count in (3, 14, 1):
            step(cache, [row], count, [count])
    del a, b
    assert held(p) == len(c._rows[0].table.pages)


def test_trimming_a_fork_leaves_the_other():
    p = pool()
    a, row = PagedKVCache(p), Sequence(6)
    step(a, [row], 40, [40])
    b = copy.deepcopy(a)
    assert b.trim(9) == 9
    other = row.fork(7)
    other.k, other.v = other.k[:31], other.v[:31]
    step(b, [other], 4, [4])
    step(a, [row], 4, [4])


@pytest.mark.parametrize("shared", [True, False], ids=["one-pool", "a-pool-each"])
def test_batches(shared):
    """merge, padded prompts, decode, filter, extend, extract: no row sees another's tokens."""
    common = pool()
    pools = [common] * 4 if shared else [pool() for _ in range(4)]
    rows = [Sequence(10 + i) for i in range(4)]
    caches = [PagedKVCache(x) for x in pools]
    step(caches[0], rows[:1], 18, [18])
    batch = PagedKVCache.merge(caches[:3])
    assert mx.array_equal(batch.offset, mx.array([18, 0, 0]))
    batch.prepare(lengths=[4, 20, 9], right_padding=[16, 0, 11])
    step(batch, rows[:3], 12, [4, 12, 9])
    step(batch, rows[:3], 8, [0, 8, 0])
    batch.finalize()
    assert mx.array_equal(batch.offset, mx.array([22, 20, 9]))
    for _ in range(3):
        step(batch, rows[:3], 1, [1, 1, 1])
    one = batch.extract(1)
    batch.filter([2, 0])
    order = [rows[2], rows[0]]
    step(batch, order, 1, [1, 1])
    late = PagedKVCache.merge([caches[3]])
    late.prepare(left_padding=[3])
    step(late, [rows[3]], 8, [5])
    batch.extend(late)
    step(batch, [*order, rows[3]], 1, [1, 1, 1])
    assert isinstance(one.offset, int)
    step(one, [rows[1]], 2, [2])
    del caches, late
    everything = {id(x): x for x in pools}.values()
    assert sum(held(p) for p in everything) > 0
    del batch, one
    assert [held(p) for p in everything] == [0] * len(everything)


def test_a_full_pool_is_refused_before_anything_changes():
    p = pool(pages=2)
    cache, row = PagedKVCache(p), Sequence(8)
    step(cache, [row], 20, [20])
    fork = copy.deepcopy(cache)
    message = r"\[kv_cache\] expected at most 0 new pages of 16 tokens \(a pool for 32 tokens"
    with pytest.raises(ValueError, match=message):
        cache.check(1, 13)
    with pytest.raises(ValueError, match=message):
        fork.check(1, 1)  # its last page is shared: a copy is needed
    x = mx.zeros((13, HEADS, DIM))
    with pytest.raises(ValueError, match=message):
        cache.update_and_attend(
            x, x[:, :KV_HEADS], x[:, :KV_HEADS], scale=SCALE, rows=1, columns=13
        )
    assert cache.lengths == [20]
    assert held(p) == 2
    del fork
    step(cache, [row], 12, [12])


def test_a_refused_append_gives_its_slots_back():
    p = pool()
    cache, row = PagedKVCache(p), Sequence(9)
    step(cache, [row], 5, [5])
    q, k = mx.zeros((3, HEADS, DIM)), mx.zeros((3, KV_HEADS + 1, DIM))
    with pytest.raises(ValueError, match="append_kv"):
        cache.update_and_attend(q, k, k, scale=SCALE, rows=1, columns=3)
    assert cache.lengths == [5]
    step(cache, [row], 14, [14])


def test_a_refusal_in_one_pool_leaves_the_rows_of_the_other():
    """Two pools in one batch; the second one's lack of room shows only after the first has
    appended, when another thread has taken its pages."""
    big, small = pool(), pool(pages=2)
    batch = PagedKVCache.merge([PagedKVCache(big), PagedKVCache(small)])
    rows = [Sequence(20), Sequence(21)]
    step(batch, rows, 10, [10, 10])
    batch.check = lambda rows, columns: None  # room was there when it was asked for
    x = mx.zeros((60, HEADS, DIM))
    with pytest.raises(ValueError, match=r"\[kv_cache\] expected at most 1 new pages"):
        batch.update_and_attend(
            x, x[:, :KV_HEADS], x[:, :KV_HEADS], scale=SCALE, rows=2, columns=30
        )
    assert batch.lengths == [10, 10]
    assert (held(big), held(small)) == (1, 1)
    step(batch, rows, 20, [20, 20])


def test_growing_pools_add_slabs():
    p = pool(pages=2, growable=True)
    cache, row = PagedKVCache(p), Sequence(11)
    for count in (20, 30, 100, 1):
        step(cache, [row], count, [count])
    assert p.pages.num_slabs >= 3
    first_arrays = p.pages.arrays[:2]
    assert first_arrays[0].shape[0] == 2  # the first slab is still what it was


def test_other_rows_than_held_are_refused():
    cache = PagedKVCache(pool())
    step(cache, [Sequence(0), Sequence(1)], 3, [3, 3])
    assert cache.offset == 3
    with pytest.raises(ValueError, match=r"\[kv_cache\] expected inputs of 2 rows; got 1"):
        cache.check(1, 1)


def test_what_it_cannot_do_is_refused():
    cache = PagedKVCache(pool())
    with pytest.raises(ValueError, match="kv_bits None"):
        cache.to_quantized(bits=4)
    with pytest.raises(ValueError, match="returned; got a layer that fetches"):
        cache.update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))


def test_a_send_ordered_after_the_keys_is_evaluated_with_the_state():
    """What mlx-lm's pipelined models do with the last layer's cache."""
    cache, row = PagedKVCache(pool()), Sequence(3)
    step(cache, [row], 5, [5])
    sent = mx.zeros(3) + 1
    cache.keys = mx.depends(cache.keys, sent)
    mx.eval([c.state for c in [cache]])
    step(cache, [row], 5, [5])


def test_shared_pools_live_as_long_as_a_cache():
    pools = SharedPools()
    shapes = [(KV_HEADS, DIM), (1, 128)]
    a = pools.get(shapes, kv_format="bf16")
    assert pools.get(shapes, kv_format="bf16") == a
    before = mx.get_active_memory()
    del a
    gc.collect()
    assert mx.get_active_memory() < before
    assert len(pools.get(shapes, kv_format="bf16")) == 2


def test_make_cache_counts_bytes_exactly():
    from chunkdelta.models.mlx_lm import accelerate

    from tests.integration.tiny_models import build

    model = accelerate(build("qwen3_5"))
    cache = chunkdelta.make_cache(model, max_tokens=100, page_size=16, kv_format="q8_0/bf16")
    p = cache[3].pool
    assert p.capacity == 112
    assert p.nbytes == 112 * 2 * (64 // 32 * 34 + 64 * 2)
    for wrong in ({"max_tokens": 0}, {"max_tokens": 8, "page_size": 24}):
        with pytest.raises(ValueError, match="expected"):
            chunkdelta.make_cache(model, **wrong)
    with pytest.raises(ValueError, match=r"expected .*q8_0.*; got 'q3'"):
        chunkdelta.make_cache(model, max_tokens=8, kv_format="q3")
    with pytest.raises(ValueError, match=r"\[make_cache\] expected a model that .*accelerate"):
        chunkdelta.make_cache(build("qwen3_5"), max_tokens=8)


@pytest.mark.parametrize("kv_format", ["f32", "q8_0/bf16"])
def test_state_round_trip_through_a_file(tmp_path, kv_format):
    """What mlx-lm's save_prompt_cache writes comes back; the copy lives apart."""

    p = KVPool(3, KV_HEADS, DIM, page_size=PAGE, kv_format=kv_format, growable=True)
    caches = [PagedKVCache(p), PagedKVCache(p), PagedKVCache(p)]
    rng = np.random.default_rng(0)

    def append(cache, rows, columns, seed):
        t = rows * columns
        q, k, v = (
            mx.random.normal((t, h, DIM), key=mx.random.key(seed + i))
            for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS))
        )
        return cache.update_and_attend(q, k, v, scale=SCALE, rows=rows, columns=columns)

    for i, n in enumerate(rng.integers(1, 60, 2)):
        append(caches[i], 1, int(n), i)
    batch = PagedKVCache.merge(caches)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [batch, GatedDeltaCache()], {"key": "value"})
    (again, other), metadata = load_prompt_cache(file)
    assert metadata == {"key": "value"}
    assert other.empty()
    assert again.lengths == batch.lengths
    assert mx.array_equal(again.offset, batch.offset)
    assert again.pool is not p
    before = batch.lengths
    got = append(again, 3, 17, 50)
    assert batch.lengths == before
    assert mx.array_equal(got, append(batch, 3, 17, 50))
    assert PagedKVCache.from_state(PagedKVCache(p).state).empty()


def test_prompt_caches_of_stock_models_are_refused(tmp_path):
    save_prompt_cache(str(tmp_path / "c.safetensors"), [KVCache()])
    with pytest.raises(ValueError, match=r"\[load_prompt_cache\] expected .*; got KVCache in"):
        load_prompt_cache(tmp_path / "c.safetensors")
