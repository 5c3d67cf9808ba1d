"""A state machine over a model's caches: whatever is done to them, each sequence decodes as if run alone.

Subclass it with a model; hypothesis finds and shrinks the interleaving that breaks it:

    class TestCaches(HybridCacheMachine.TestCase): ...
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chunkdelta.cache.prefix_cache import PrefixCache
from chunkdelta.cache.snapshot import load_prefix, save_prefix
from chunkdelta.loop.prefill import PrefillCancelled, prefill
from chunkdelta.loop.reuse import prefill_with_prefixes

CHUNK = 16


class HybridCacheMachine(RuleBasedStateMachine):
    """Prefill, decode, fork, drop, checkpoint, hit, evict, cancel, save and load, interleaved.

    Class attributes to set: ``model`` (accelerated), ``vocab``, ``kv_format``, ``tolerance`` on
    logits relative to their largest, and ``capacity`` in tokens of the shared pool.
    """

    model: ClassVar[Any]
    vocab: ClassVar[int]
    kv_format: ClassVar[str | None] = None
    tolerance: ClassVar[float] = 1e-4

    @initialize()
    def start(self) -> None:
        # Caches of one model share their pools as long as one is alive: this one keeps them.
        self.anchor = self.model.make_cache()
        self.sequences: list[tuple[list[int], list[Any]]] = []
        self.prefixes = PrefixCache(max_bytes=1 << 30, block_size=16, checkpoint_every=32)
        self.rng = np.random.default_rng(0)
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        if not hasattr(self, "anchor"):
            return
        pools = [layer.pool for layer in self.anchor if hasattr(layer, "pool")]
        self.sequences.clear()
        self.prefixes.clear()
        assert self.prefixes.nbytes == 0
        for pool in pools:
            assert pool.free_pages == pool.pages.num_pages, "pages are lost"
        self.folder.cleanup()

    def _tokens(self, count: int) -> list[int]:
        return [int(t) for t in self.rng.integers(0, self.vocab, count)]

    def _reference(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        logits = self.model(mx.array([tokens]))[:, -1]
        return np.array(logits.astype(mx.float32))

    def _compare(self, logits: mx.array, tokens: list[int]) -> None:
        expected = self._reference(tokens)
        error = np.abs(np.array(logits.astype(mx.float32)) - expected).max()
        assert error <= self.tolerance * np.abs(expected).max()

    def _prefill(self, tokens: list[int], cache: list[Any]) -> mx.array:
        logits = prefill(self.model, tokens, cache, chunk_size=CHUNK)
        assert logits is not None
        return logits

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(count=st.integers(1, 70))
    def new_sequence(self, count: int) -> None:
        tokens, cache = self._tokens(count), self.model.make_cache()
        self._compare(self._prefill(tokens, cache), tokens)
        self.sequences.append((tokens, cache))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3), count=st.sampled_from([1, 1, 1, 3, 15, 17]))
    def go_on(self, which: int, count: int) -> None:
        tokens, cache = self.sequences[which % len(self.sequences)]
        tokens += self._tokens(count)
        self._compare(self._prefill(tokens[-count:], cache), tokens)

    @precondition(lambda self: 0 < len(self.sequences) < 4)
    @rule(which=st.integers(0, 3))
    def fork(self, which: int) -> None:
        tokens, cache = self.sequences[which % len(self.sequences)]
        self.sequences.append((list(tokens), copy.deepcopy(cache)))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3))
    def drop(self, which: int) -> None:
        del self.sequences[which % len(self.sequences)]

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3), extra=st.integers(0, 40))
    def checkpoint_and_hit(self, which: int, extra: int) -> None:
        tokens, cache = self.sequences[which % len(self.sequences)]
        self.prefixes.insert(tokens, cache)
        prompt = tokens + self._tokens(extra)
        hit = self.prefixes.lookup(prompt, compute_at_least=0)
        assert hit.length == len(tokens)
        assert hit.cache is not None
        if extra:
            self._compare(self._prefill(prompt[hit.length :], hit.cache), prompt)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3), keep=st.integers(1, 70), extra=st.integers(0, 40))
    def reuse_what_there_is(self, which: int, keep: int, extra: int) -> None:
        prompt = self.sequences[which % len(self.sequences)][0][:keep] + self._tokens(extra)
        done = prefill_with_prefixes(
            self.model, prompt, self.prefixes, self.model.make_cache, chunk_size=CHUNK
        )
        assert done.reused + done.computed == len(prompt)
        self._compare(done.logits, prompt)
        again = prefill_with_prefixes(self.model, prompt, self.prefixes, self.model.make_cache)
        assert again.computed == 0
        assert mx.array_equal(again.logits, done.logits)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3), chunks=st.integers(0, 2))
    def cancel(self, which: int, chunks: int) -> None:
        tokens, cache = self.sequences[which % len(self.sequences)]
        more, asked = self._tokens(3 * CHUNK), iter(range(100))
        try:
            prefill(
                self.model, more, cache, chunk_size=CHUNK, should_stop=lambda: next(asked) >= chunks
            )
        except PrefillCancelled as stopped:
            assert stopped.done == chunks * CHUNK  # noqa: PT017
            tokens += more[: stopped.done]
        else:
            raise AssertionError("expected PrefillCancelled")

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        budget = int(share * self.prefixes.nbytes)
        self.prefixes.evict(budget)
        assert self.prefixes.nbytes <= budget

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 3))
    def save_and_load(self, which: int) -> None:
        tokens, cache = self.sequences[which % len(self.sequences)]
        path = Path(self.folder.name) / "prefix.safetensors"
        save_prefix(path, tokens, cache, fingerprint="tiny")
        loaded = self.model.make_cache()
        assert load_prefix(path, loaded, fingerprint="tiny") == tokens
        self.sequences[which % len(self.sequences)] = (tokens, loaded)

    @invariant()
    def lengths_agree(self) -> None:
        for tokens, cache in getattr(self, "sequences", []):
            for layer in cache:
                if hasattr(layer, "lengths") and hasattr(layer, "pool"):
                    assert layer.lengths == [len(tokens)]
