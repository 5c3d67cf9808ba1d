"""Prefixes of prompts, kept with their caches for reuse.

A recurrent state cannot be trimmed, so a hybrid model can only start again where a state was kept: at
a *checkpoint*. A checkpoint is a fork of the caches at one position: pages by reference count,
states and convolution tails as the immutable arrays they are. It costs what its states take (51.5 MB
on Qwen3.5-9B) and the pages that nobody else holds. docs/concepts/prefix-reuse.md has the pictures.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(eq=False)
class _Checkpoint:
    """The caches of one prefix. ``tail`` are its tokens past its last whole block."""

    up: weakref.ref[_Block]  # weak, as all links upwards: dropping the cache drops its pages
    tail: Tokens
    tail_keys: tuple[tuple[int, str], ...]
    length: int
    cache: list[Any]
    logits: mx.array | None
    used: int = 0  # clock of the last use

    @property
    def block(self) -> _Block:
        block = self.up()
        assert block is not None  # the block holds the checkpoint
        return block


@dataclass(eq=False)
class _Block:
    """``block_size`` tokens after the parent's. The root has none."""

    digest: bytes
    up: weakref.ref[_Block] | None
    tokens: Tokens
    keys: tuple[tuple[int, str], ...]
    children: dict[bytes, list[_Block]] = field(default_factory=dict)
    checkpoints: list[_Checkpoint] = field(default_factory=list)

    @property
    def parent(self) -> _Block | None:
        return None if self.up is None else self.up()


@dataclass(frozen=True)
class PrefixHit:
    """What :meth:`PrefixCache.lookup` found.

    Attributes:
        length: tokens that the caches hold; the prompt is to be computed from there.
        cache: forks of the caches, one a layer, the caller's own; None if ``length`` is 0.
        common: tokens that some stored prefix shares with the prompt, in whole blocks beyond
            ``length``: where prompts part, and so where a checkpoint pays from now on.
        logits: those that were stored with the prefix, if all of the prompt was found.
    """

    length: int
    cache: list[Any] | None
    common: int
    logits: mx.array | None = None


class PrefixCache:
    """Checkpoints of prompts within a budget of bytes, found by their tokens.

    Tokens are indexed as a chain of hashes over blocks, each hash over its parent's, the block's
    tokens and their keys. Tokens and keys are compared as well, so a collision is never served.
    Hits are forks: what a running sequence holds stays alive when its checkpoint is evicted, and
    evicting frees only what nobody else holds. Usable from several threads.

    When the budget is exceeded, the checkpoint with the lowest
    ``recency + efficiency_weight * efficiency`` goes, both scaled to [0, 1]; the efficiency is the
    work that the checkpoint saves over the next shorter one, per byte that it frees (Marconi,
    arXiv 2411.19379, section 4.2).

    Args:
        max_bytes: budget for states and pages of all checkpoints.
        fingerprint: of the model and of whatever else changes its caches; part of every hash.
            Default: ``""``.
        block_size: tokens of a block; branch points are seen at this resolution. Default: ``64``.
        checkpoint_every: distance of the checkpoints that :meth:`checkpoints` plans in a long
            prompt, in tokens. Default: ``8192``.
        efficiency_weight: see above; 0 is plain LRU. Default: ``1.0``.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> import chunkdelta
        >>> from chunkdelta.models import embedded
        >>> from chunkdelta.models.mlx_lm import accelerate
        >>> model = accelerate(embedded.build(vocab_size=512))
        >>> prefixes = chunkdelta.PrefixCache(max_bytes=10**9)
        >>> cache = model.make_cache()
        >>> _ = model(mx.array([[1, 2, 3, 4]]), cache)
        >>> prefixes.insert([1, 2, 3, 4], cache)
        True
        >>> prefixes.lookup([1, 2, 3, 4, 5, 6]).length
        4
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        fingerprint: str = "",
        block_size: int = 64,
        checkpoint_every: int = 8192,
        efficiency_weight: float = 1.0,
    ):
        for name, value in (
            ("max_bytes", max_bytes),
            ("block_size", block_size),
            ("checkpoint_every", checkpoint_every),
        ):
            if value < 1:
                raise ValueError(f"[PrefixCache] expected {name} >= 1; got {value}")
        self.max_bytes = max_bytes
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.checkpoint_every = checkpoint_every
        self.efficiency_weight = efficiency_weight
        self._lock = threading.RLock()
        self._clock = 0
        self._model: weakref.ref[Any] | None = None
        self._empty()
        self._counts: Counter[str] = Counter()

    def bind(self, model: object) -> None:
        """Tie the cache to the model whose states it keeps; another model is refused.

        Raises:
            ValueError: the cache is tied to another model.
        """
        with self._lock:
            bound = model if self._model is None else self._model()
            if bound is None:  # that model is gone, and with it what its states are good for
                self.clear()
                bound = model
            self._model = weakref.ref(bound)
            if bound is not model:
                raise ValueError(
                    "[PrefixCache] expected the model whose states are kept here; got another one "
                    f"({type(model).__name__})"
                )

    def _empty(self) -> None:
        digest = hashlib.blake2b(self.fingerprint.encode(), digest_size=16).digest()
        self._root = _Block(digest, None, np.zeros(0, np.int64), ())
        self._checkpoints: list[_Checkpoint] = []
        self._pages: Counter[tuple[int, int]] = Counter()  # (pool, page) -> checkpoints holding it
        self._page_bytes: dict[int, int] = {}
        self._nbytes = 0

    # ------------------------------------------------------------------ finding

    def lookup(
        self,
        tokens: Sequence[int] | Tokens,
        *,
        keys: Mapping[int, str] | None = None,
        compute_at_least: int = 1,
    ) -> PrefixHit:
        """The longest checkpoint that is a prefix of a prompt.

        Args:
            tokens: the prompt's token ids.
            keys: what else tells tokens apart, by position: a hash of the image whose placeholder
                stands there, an adapter's name at position 0. Default: none.
            compute_at_least: tokens to leave, since the last one's logits are needed. A checkpoint
                of the whole prompt that was stored with logits is returned all the same.
                Default: ``1``.

        Returns:
            A :class:`PrefixHit`; its ``length`` is 0 if nothing was found.
        """
        prompt = _ids(tokens)
        keys = keys or {}
        with self._lock:
            self._clock += 1
            best: _Checkpoint | None = None
            common = 0
            for block, start in self._walk(prompt, keys):
                common = start
                for point in block.checkpoints:
                    whole = point.length == len(prompt) and point.logits is not None
                    if not whole and point.length > len(prompt) - compute_at_least:
                        continue
                    if best is not None and point.length <= best.length:
                        continue
                    tail = prompt[start : point.length]
                    if np.array_equal(tail, point.tail) and point.tail_keys == _keys_in(
                        keys, start, point.length
                    ):
                        best = point
            self._counts["lookups"] += 1
            self._counts["tokens"] += len(prompt)
            if best is None or best.length == 0:
                return PrefixHit(0, None, common)
            best.used = self._clock
            self._counts["hits"] += 1
            self._counts["tokens_reused"] += best.length
            logits = best.logits if best.length == len(prompt) else None
            return PrefixHit(best.length, copy.deepcopy(best.cache), common, logits)

    def _walk(self, prompt: Tokens, keys: Mapping[int, str]) -> Iterator[tuple[_Block, int]]:
        """The blocks known of a prompt, from the root, and where each ends."""
        block, start = self._root, 0
        while True:
            yield block, start
            stop = start + self.block_size
            if stop > len(prompt):
                return
            child = self._child(block, prompt[start:stop], _keys_in(keys, start, stop))
            if child is None:
                return
            block, start = child, stop

    def _child(
        self, block: _Block, tokens: Tokens, keys: tuple[tuple[int, str], ...]
    ) -> _Block | None:
        for child in block.children.get(_digest(block, tokens, keys), ()):
            if np.array_equal(child.tokens, tokens) and child.keys == keys:
                return child
        return None

    # ------------------------------------------------------------------ keeping

    def checkpoints(
        self, hit: PrefixHit, prompt_tokens: int, *, marks: Sequence[int] = ()
    ) -> list[int]:
        """Where to keep checkpoints while computing a prompt from a hit on.

        At the marks (ends of messages), where stored prompts were seen to part from this one, at
        every ``checkpoint_every`` tokens, and before the last token; sparse, since each costs the
        model's states.

        Returns:
            Positions in ``(hit.length, prompt_tokens)``, ascending: cut points for ``prefill``.
        """
        every = range(self.checkpoint_every, prompt_tokens, self.checkpoint_every)
        wanted = {*marks, *every, hit.common, prompt_tokens - 1}
        return sorted(p for p in wanted if hit.length < p < prompt_tokens)

    def insert(
        self,
        tokens: Sequence[int] | Tokens,
        cache: Sequence[Any],
        *,
        keys: Mapping[int, str] | None = None,
        logits: mx.array | None = None,
    ) -> bool:
        """Keep a fork of the caches of a prefix.

        Args:
            tokens: the token ids that the caches hold, all of them.
            cache: one cache a layer; forked here (``copy.deepcopy``) and left as they are.
            keys: as in :meth:`lookup`.
            logits: of the last token, for prompts that are this prefix and no more.

        Returns:
            Whether it is kept: False if it alone exceeds the budget.

        Raises:
            ValueError: a cache that holds another number of tokens.
        """
        prefix = _ids(tokens)
        keys = keys or {}
        for layer in cache:
            offset = getattr(layer, "offset", None)
            if offset is not None and int(mx.max(mx.array(offset))) != len(prefix):
                raise ValueError(
                    f"[PrefixCache.insert] expected caches of {len(prefix)} tokens; got one of "
                    f"{int(mx.max(mx.array(offset)))}"
                )
        fork = copy.deepcopy(list(cache))
        mx.eval([c.state for c in fork], [] if logits is None else logits)
        with self._lock:
            self._clock += 1
            block = self._root
            whole = len(prefix) // self.block_size * self.block_size
            for start in range(0, whole, self.block_size):
                stop = start + self.block_size
                part, part_keys = prefix[start:stop], _keys_in(keys, start, stop)
                child = self._child(block, part, part_keys)
                if child is None:
                    digest = _digest(block, part, part_keys)
                    child = _Block(digest, weakref.ref(block), part.copy(), part_keys)
                    block.children.setdefault(digest, []).append(child)
                block = child
            tail, tail_keys = prefix[whole:], _keys_in(keys, whole, len(prefix))
            point = _Checkpoint(
                weakref.ref(block), tail.copy(), tail_keys, len(prefix), fork, logits, self._clock
            )
            block.checkpoints.append(point)
            self._checkpoints.append(point)
            self._nbytes += _state_bytes(point) + self._hold(point)
            self._counts["inserted"] += 1
            for old in block.checkpoints[:-1]:  # now that the block stays
                if np.array_equal(old.tail, tail) and old.tail_keys == tail_keys:
                    self._remove(old)
            self.evict(self.max_bytes)
            return point in self._checkpoints

    def evict(self, to_bytes: int = 0) -> int:
        """Drop checkpoints until at most ``to_bytes`` are held.

        Returns:
            Bytes that are held no longer (by this cache; sequences that run keep what is theirs).
        """
        with self._lock:
            before = self._nbytes
            while self._nbytes > to_bytes:
                self.evict_one()
            return before - self._nbytes

    def evict_one(self) -> None:
        """Drop the least valuable checkpoint, if there is any."""
        with self._lock:
            if self._checkpoints:
                self._remove(self._least_valuable(self._checkpoints))
                self._counts["evicted"] += 1

    def attach(self, cache: Sequence[Any]) -> None:
        """Let caches of fixed capacity take pages from this cache when theirs are used up."""
        for layer in cache:
            pool = getattr(layer, "pool", None)
            if pool is not None:
                pool.reclaim = self._reclaim

    def _reclaim(self, pool: Any, pages: int) -> None:
        with self._lock:
            while pool.free_pages < pages:
                holding = [
                    p
                    for p in self._checkpoints
                    if any(k[0] == id(pool) and self._pages[k] == 1 for k in self._held(p))
                ]
                if not holding:
                    return
                self._remove(self._least_valuable(holding))
                self._counts["evicted"] += 1

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._empty()

    @property
    def nbytes(self) -> int:
        """Bytes of states, and of pages once each, that the checkpoints hold."""
        return self._nbytes

    def __len__(self) -> int:
        """Number of checkpoints."""
        return len(self._checkpoints)

    def stats(self) -> dict[str, int]:
        """Counters since the cache was made: lookups, hits, tokens asked for and reused, ..."""
        names = ("lookups", "hits", "tokens", "tokens_reused", "inserted", "evicted")
        with self._lock:
            counts = {name: self._counts[name] for name in names}
            return {**counts, "checkpoints": len(self), "nbytes": self._nbytes}

    # ------------------------------------------------------------------ accounts

    def _held(self, point: _Checkpoint) -> Iterator[tuple[int, int]]:
        for layer in point.cache:
            for pool, pages in layer.held_pages() if hasattr(layer, "held_pages") else ():
                self._page_bytes[id(pool)] = pool.page_bytes
                for page in pages:
                    yield id(pool), page

    def _hold(self, point: _Checkpoint) -> int:
        """Count the pages of a checkpoint; returns the bytes that are new."""
        new = 0
        for key in self._held(point):
            self._pages[key] += 1
            if self._pages[key] == 1:
                new += self._page_bytes[key[0]]
        return new

    def _would_free(self, point: _Checkpoint) -> int:
        own = (key for key in self._held(point) if self._pages[key] == 1)
        return _state_bytes(point) + sum(self._page_bytes[pool] for pool, _ in own)

    def _remove(self, point: _Checkpoint) -> None:
        freed = self._would_free(point)
        for key in self._held(point):
            self._pages[key] -= 1
            if self._pages[key] == 0:
                del self._pages[key]
        self._nbytes -= freed
        self._checkpoints.remove(point)
        block = point.block
        block.checkpoints.remove(point)
        while (parent := block.parent) is not None:  # drop blocks that lead nowhere
            if block.checkpoints or block.children:
                break
            siblings = parent.children[block.digest]
            siblings.remove(block)
            if not siblings:
                del parent.children[block.digest]
            block = parent

    def _least_valuable(self, points: Sequence[_Checkpoint]) -> _Checkpoint:
        """Marconi's score; linear in the number of checkpoints, of which there are few."""
        saved = [(p.length - self._shorter(p)) / max(1, self._would_free(p)) for p in points]
        most = max(saved) or 1.0
        oldest = min(p.used for p in points)
        span = max(1, self._clock - oldest)

        def score(item: tuple[_Checkpoint, float]) -> float:
            point, efficiency = item
            return (point.used - oldest) / span + self.efficiency_weight * efficiency / most

        return min(zip(points, saved, strict=True), key=score)[0]

    def _shorter(self, point: _Checkpoint) -> int:
        """Length of the next shorter checkpoint on the way to this one, where work would start."""
        block: _Block | None = point.block
        while block is not None:
            shorter = [
                p.length
                for p in block.checkpoints
                if p.length < point.length
                and (block is not point.block or np.array_equal(point.tail[: len(p.tail)], p.tail))
                and (block is point.block or len(p.tail) == 0)
            ]
            if shorter:
                return max(shorter)
            block = block.parent
        return 0


def _ids(tokens: Sequence[int] | Tokens) -> Tokens:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"[PrefixCache] expected token ids [T]; got {ids.dtype} {ids.shape}")
    return ids.astype(np.int64)


def _keys_in(keys: Mapping[int, str], start: int, stop: int) -> tuple[tuple[int, str], ...]:
    return tuple(sorted((p, k) for p, k in keys.items() if start <= p < stop))


def _digest(parent: _Block, tokens: Tokens, keys: tuple[tuple[int, str], ...]) -> bytes:
    h = hashlib.blake2b(parent.digest, digest_size=16)
    h.update(tokens.tobytes())
    if keys:
        h.update(repr(keys).encode())
    return h.digest()


def _state_bytes(point: _Checkpoint) -> int:
    """Bytes of a checkpoint's arrays: states and tails, and logits."""
    arrays = 0 if point.logits is None else point.logits.nbytes
    return arrays + sum(c.nbytes for c in point.cache if not hasattr(c, "held_pages"))
