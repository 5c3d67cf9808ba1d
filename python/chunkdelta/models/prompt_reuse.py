"""The prefix cache where mlx-lm 0.32.2's server and batch generator keep prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from chunkdelta.cache.prefix_cache import PrefixCache


class PromptCache:
    """:class:`PrefixCache` under the protocol of mlx-lm's ``LRUPromptCache``.

    The stock cache reuses a longer prompt by trimming it, which a recurrent state does not allow, so
    hybrid models reuse whole prompts only; it also ignores how much a trim removed. Here a fetch
    returns the nearest kept position and exactly the tokens that remain, and pages are shared
    instead of copied.

    Args:
        max_size: kept positions at most. Default: ``1000``.
        max_bytes: bytes of their states and pages at most. Default: ``1 << 40``.

    Example:
        >>> from chunkdelta.models import embedded
        >>> from chunkdelta.models.mlx_lm import accelerate
        >>> from chunkdelta.models.prompt_reuse import PromptCache
        >>> model, prompts = accelerate(embedded.build(vocab_size=512)), PromptCache()
        >>> cache, rest = prompts.fetch_nearest_cache("model", [1, 2, 3])
        >>> cache is None, rest
        (True, [1, 2, 3])
        >>> cache = model.make_cache()
        >>> _ = model(mx.array([[1, 2, 3]]), cache)
        >>> prompts.insert_cache("model", [1, 2, 3], cache)
        >>> prompts.fetch_nearest_cache("model", [1, 2, 3, 4])[1]
        [4]
    """

    def __init__(self, max_size: int = 1000, max_bytes: int = 1 << 40):
        self.max_size = max_size
        self.prefixes = PrefixCache(max_bytes)

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """Forks of the caches of the longest kept prefix, and the tokens after it (at least one)."""
        hit = self.prefixes.lookup(tokens, keys=_key(model))
        return hit.cache, list(tokens[hit.length :])

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int],
        prompt_cache: Sequence[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep what ``prompt_cache`` holds of ``tokens``: the last sampled token is not in it."""
        lengths = [int(mx.max(mx.array(c.offset))) for c in prompt_cache if hasattr(c, "offset")]
        held = min([len(tokens), *lengths])
        if held:
            self.prefixes.insert(tokens[:held], prompt_cache, keys=_key(model))
            self.trim_to(n_sequences=self.max_size)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Drop the least valuable positions until so many, or so many bytes, are left."""
        while n_sequences is not None and len(self) > max(0, n_sequences):
            self.prefixes.evict_one()
        if n_bytes is not None:
            self.prefixes.evict(max(0, n_bytes))

    def __len__(self) -> int:
        return len(self.prefixes)

    @property
    def nbytes(self) -> int:
        """Bytes of states and pages held, pages once each."""
        return self.prefixes.nbytes

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """What the server logs."""
        return {"checkpoints": {"n_sequences": len(self), "n_bytes": self.nbytes}}


def _key(model: Any) -> dict[int, str]:
    return {0: repr(model)}
