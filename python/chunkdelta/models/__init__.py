"""Adapters: models as the prefill loop and the memory plan see them."""

from __future__ import annotations

from typing import Any


def make_cache(
    model: Any, *, max_tokens: int, page_size: int = 64, kv_format: str | None = None
) -> list[Any]:
    """Caches of an accelerated model for one run, with all KV memory allocated now.

    Args:
        model: A model that ``chunkdelta.models.mlx_lm.accelerate`` returned.
        max_tokens: Tokens that the pages hold, prompt and generated ones, over all sequences of a
            batch (each sequence is rounded up to whole pages).
        page_size: Tokens in a page, a multiple of 16. Default: ``64``.
        kv_format: Storage format of K and V, or two as ``"K/V"`` (see :class:`chunkdelta.KVPages`).
            Default: ``None``, the activations' own.

    Returns:
        A cache per layer, in the order of mlx-lm's ``make_prompt_cache``.

    Raises:
        ValueError: A model that is not accelerated, sizes out of range, or an unknown format.

    Example:
        >>> import chunkdelta
        >>> from chunkdelta.models import embedded
        >>> from chunkdelta.models.mlx_lm import accelerate
        >>> model = accelerate(embedded.build(vocab_size=512))
        >>> len(chunkdelta.make_cache(model, max_tokens=1024, kv_format="q8_0/turbo4"))
        4
    """
    from chunkdelta.models import mlx_lm

    return mlx_lm.make_cache(model, max_tokens=max_tokens, page_size=page_size, kv_format=kv_format)
