"""The prefill loop with prefix reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from chunkdelta.cache.prefix_cache import PrefixCache
from chunkdelta.loop.prefill import PrefillModel, prefill


@dataclass(frozen=True)
class Prefilled:
    """A prompt's caches and the logits of its last token.

    Attributes:
        logits: ``[1, vocab]``.
        cache: one cache a layer, holding the whole prompt.
        reused: tokens that came from the prefix cache.
        computed: tokens that ran through the model.
    """

    logits: mx.array
    cache: list[Any]
    reused: int
    computed: int


def prefill_with_prefixes(
    model: PrefillModel,
    tokens: Sequence[int],
    prefixes: PrefixCache,
    make_cache: Callable[[], list[Any]],
    *,
    marks: Sequence[int] = (),
    keys: Mapping[int, str] | None = None,
    chunk_size: int = 512,
    progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Prefilled:
    """Prefill a prompt from the longest prefix that is kept, and keep checkpoints on the way.

    Args:
        model: as for :func:`prefill`.
        tokens: the prompt's token ids, at least one.
        prefixes: where to look and where to keep.
        make_cache: makes empty caches when nothing is found, in pools that the prefix cache's
            sequences share (``model.make_cache`` of an accelerated model).
        marks: positions where later prompts are likely to part from this one, such as the ends of
            messages. Default: none.
        keys: what else tells tokens apart (see :meth:`PrefixCache.lookup`). Default: none.
        chunk_size: most tokens in a chunk. Default: ``512``.
        progress: called as ``progress(done, total)``, in tokens of the whole prompt.
        should_stop: asked before each chunk.

    Returns:
        The :class:`Prefilled` prompt. It is kept whole as well, so that the same prompt computes
        nothing.

    Raises:
        ValueError: a prefix cache that another model has filled, an empty prompt, or arguments that :func:`prefill` refuses.
        PrefillCancelled: if ``should_stop`` returned true; checkpoints already kept stay.

    Example:
        >>> import chunkdelta
        >>> from chunkdelta.models import embedded
        >>> from chunkdelta.models.mlx_lm import accelerate
        >>> model = accelerate(embedded.build(vocab_size=512))
        >>> prefixes = chunkdelta.PrefixCache(max_bytes=10**9)
        >>> first = prefill_with_prefixes(model, [1, 2, 3, 4], prefixes, model.make_cache)
        >>> again = prefill_with_prefixes(model, [1, 2, 3, 4, 5], prefixes, model.make_cache)
        >>> again.reused, again.computed
        (4, 1)
    """
    prefixes.bind(model)
    ids = np.asarray(tokens)
    hit = prefixes.lookup(ids, keys=keys)
    total = len(ids)
    if hit.logits is not None and hit.cache is not None:
        if progress is not None:
            progress(total, total)
        return Prefilled(hit.logits, hit.cache, total, 0)
    cache = make_cache() if hit.cache is None else hit.cache
    prefixes.attach(cache)
    cuts = set(prefixes.checkpoints(hit, total, marks=marks))

    def on_chunk(done: int, _: int) -> None:
        position = hit.length + done
        if done and position in cuts:
            prefixes.insert(ids[:position], cache, keys=keys)
        if progress is not None:
            progress(position, total)

    logits = prefill(
        model,
        ids[hit.length :].tolist(),
        cache,
        chunk_size=chunk_size,
        cut_points=cuts,
        progress=on_chunk,
        should_stop=should_stop,
    )
    assert logits is not None
    prefixes.insert(ids, cache, keys=keys, logits=logits)
    return Prefilled(logits, cache, hit.length, total - hit.length)
