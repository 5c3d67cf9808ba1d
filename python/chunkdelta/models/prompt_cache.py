"""Prompt caches of accelerated models from files that mlx-lm's ``save_prompt_cache`` wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from chunkdelta.cache.gated_delta_cache import GatedDeltaCache
from chunkdelta.cache.kv_cache import PagedKVCache

_KINDS: dict[str, Any] = {c.__name__: c for c in (PagedKVCache, GatedDeltaCache)}
_DECODE: dict[str, Callable[[mx.array], Any]] = {
    "scalar": lambda a: a.item(),
    "string": lambda a: bytes(a.astype(mx.uint8)).decode("latin-1"),
    "none": lambda _: None,
}


def load_prompt_cache(file_name: str | Path) -> tuple[list[Any], dict[str, str]]:
    """Caches that ``mlx_lm.models.cache.save_prompt_cache`` saved from an accelerated model.

    mlx-lm's own ``load_prompt_cache`` finds only its own classes. The file holds the whole pools
    of the caches; the caches returned hold their sequences' pages alone, in growing pools.

    Args:
        file_name: The ``.safetensors`` file.

    Returns:
        ``(caches, metadata)``.

    Raises:
        ValueError: A file with other caches in it.

    Example:
        >>> import os, tempfile
        >>> import mlx.core as mx
        >>> from chunkdelta.models import embedded
        >>> from chunkdelta.models.mlx_lm import accelerate, load_prompt_cache
        >>> from mlx_lm.models.cache import save_prompt_cache
        >>> model = accelerate(embedded.build(vocab_size=512))
        >>> cache = model.make_cache()
        >>> _ = model(mx.array([[1, 2, 3]]), cache=cache)
        >>> file = os.path.join(tempfile.mkdtemp(), "prompt.safetensors")
        >>> save_prompt_cache(file, cache, {"text": "a prompt"})
        >>> load_prompt_cache(file)[1]
        {'text': 'a prompt'}
    """
    loaded: Any = mx.load(str(file_name), return_metadata=True)
    arrays, saved = loaded
    metadata, classes, marks = tree_unflatten(list(saved.items()))
    unknown = sorted(set(classes) - set(_KINDS))
    if unknown:
        raise ValueError(
            f"[load_prompt_cache] expected caches of an accelerated model ({', '.join(_KINDS)}); "
            f"got {', '.join(unknown)} in {file_name}"
        )
    for key, kind in marks[1:]:
        arrays[key] = _DECODE[kind](arrays[key])
    states = tree_unflatten(list(arrays.items()))
    caches = [_KINDS[name].from_state(state) for name, state in zip(classes, states, strict=True)]
    return caches, metadata or {}
