"""Adapters: models as the prefill loop and the memory plan see them."""

from __future__ import annotations

from typing import Any


def make_cache(
    model: Any, *, max_tokens: int, page_size: int = 64, kv_format: str | None = None
) -> list[Any]:
    """Caches of an accelerated model for one run, with all KV memory allocated now.

    See :func:`chunkdelta.models.mlx_lm.make_cache`; this one needs mlx-lm only when called.
    """
    from chunkdelta.models import mlx_lm

    return mlx_lm.make_cache(model, max_tokens=max_tokens, page_size=page_size, kv_format=kv_format)
