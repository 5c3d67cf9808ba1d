"""Any history of appends, forks, merges, filters, trims and drops over two small pools: every row
attends to its own tokens, and every page is held by those who use it."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import numpy as np
from chunkdelta.cache.kv_cache import PagedKVCache
from chunkdelta.cache.kv_pool import KVPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

DIM, PAGE, PAGES = 64, 16, 12
SCALE = DIM**-0.5


class Batch:
    """A cache and the tokens that its rows should hold: token i has key and value i's rows."""

    def __init__(self, cache: PagedKVCache, rows: list[list[int]]):
        self.cache, self.rows = cache, rows


class Machine(RuleBasedStateMachine):
    batches = Bundle("batches")

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(0)
        self.k, self.v, self.q = rng.standard_normal((3, 4000, 1, DIM)).astype(np.float32)
        self.tokens = 0
        # One fixed pool with NaN in every slot never written, one that grows.
        self.pools = [
            KVPool(PAGES, 1, DIM, page_size=PAGE, kv_format="f32"),
            KVPool(1, 1, DIM, page_size=PAGE, kv_format="f32", growable=True),
        ]
        for pool in self.pools:
            nan = (mx.full(a.shape, mx.nan) for a in pool.pages.arrays)
            pool.pages.write_pages(range(pool.pages.num_pages), *nan)
        self.alive: list[Batch] = []

    def keep(self, cache: PagedKVCache, rows: list[list[int]]) -> Batch:
        batch = Batch(cache, rows)
        self.alive.append(batch)
        return batch

    @rule(target=batches, pool=st.integers(0, 1))
    def prompt(self, pool):
        return self.keep(PagedKVCache(self.pools[pool]), [[]])

    @rule(target=batches, a=batches)
    def fork(self, a):
        return self.keep(copy.deepcopy(a.cache), [list(r) for r in a.rows])

    @rule(target=batches, parts=st.lists(batches, min_size=1, max_size=3))
    def merge(self, parts):
        rows = [list(r) for b in parts for r in b.rows]
        if len(rows) > 6:
            return multiple()
        return self.keep(PagedKVCache.merge([b.cache for b in parts]), rows)

    @rule(a=batches, b=batches)
    def extend(self, a, b):
        if a is not b and len(a.rows) + len(b.rows) <= 6:
            a.cache.extend(b.cache)
            a.rows += [list(r) for r in b.rows]

    @rule(a=batches, data=st.data())
    def filter(self, a, data):
        keep = data.draw(st.lists(st.integers(0, len(a.rows) - 1), min_size=1, max_size=4))
        a.cache.filter(keep)
        a.rows = [list(a.rows[i]) for i in keep]

    @rule(target=batches, a=batches, data=st.data())
    def extract(self, a, data):
        i = data.draw(st.integers(0, len(a.rows) - 1))
        return self.keep(a.cache.extract(i), [list(a.rows[i])])

    @rule(a=batches, n=st.integers(0, 40))
    def trim(self, a, n):
        removed = a.cache.trim(n)
        assert removed == min([n, *map(len, a.rows)])
        a.rows = [r[: len(r) - removed] for r in a.rows]

    @rule(a=consumes(batches))
    def drop(self, a):
        self.alive.remove(a)
        a.cache = None

    @rule(a=batches, data=st.data())
    def append(self, a, data):
        """A chunk of columns, with padding on the right, on the left, or none."""
        rows = len(a.rows)
        columns = data.draw(st.integers(1, 20))
        counts = [columns] * rows
        if data.draw(st.booleans()):
            counts = data.draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
            pads = [columns - n for n in counts]
            if a.cache.empty() and data.draw(st.booleans()):
                a.cache.prepare(left_padding=pads)
            else:
                a.cache.prepare(lengths=counts, right_padding=pads)
        new = [
            list(range(self.tokens + sum(counts[:b]), self.tokens + sum(counts[: b + 1])))
            for b in range(rows)
        ]
        packed = [t for row in new for t in row]
        held, before = a.cache.lengths, [p.free_pages for p in self.pools]
        refused = None
        try:
            out = a.cache.update_and_attend(
                *(mx.array(x[packed]) for x in (self.q, self.k, self.v)),
                scale=SCALE,
                rows=rows,
                columns=columns,
            )
        except ValueError as error:
            refused = str(error)
        a.cache.finalize()
        if refused:  # the fixed pool is full, and nothing has changed
            assert "[kv_cache] expected at most" in refused
            assert a.cache.lengths == held
            assert [p.free_pages for p in self.pools] == before
            return
        self.tokens += len(packed)
        a.rows = [[*r, *n] for r, n in zip(a.rows, new, strict=True)]
        want = [self.attend(r, len(n)) for r, n in zip(a.rows, new, strict=True)]
        np.testing.assert_allclose(np.array(out), np.concatenate(want), atol=3e-6)

    def attend(self, row, count):
        q, k, v = (x[:, 0].astype(np.float64) for x in (self.q[row], self.k[row], self.v[row]))
        q = q[len(row) - count :]
        scores = q @ k.T * SCALE
        seen = np.arange(len(row))[None] <= np.arange(len(row) - count, len(row))[:, None]
        p = np.exp(np.where(seen, scores, -np.inf))
        return (p @ v / p.sum(-1, keepdims=True))[:, None]

    @invariant()
    def lengths_are_exact(self):
        for b in self.alive:
            assert b.cache.lengths in ([len(r) for r in b.rows], [])
            assert b.cache.size() == max(map(len, b.rows))
            assert b.cache.nbytes == sum(-(-len(r) // PAGE) for r in b.rows) * (
                self.pools[0].page_bytes
            )

    def teardown(self):
        for batch in self.alive:
            batch.cache = None
        gc.collect()
        assert [p.free_pages for p in self.pools] == [p.pages.num_pages for p in self.pools]


Machine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
