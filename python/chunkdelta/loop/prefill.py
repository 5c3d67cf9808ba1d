"""The chunked prefill loop.

It knows no model class: a model is anything with a body and a head (:class:`PrefillModel`), and a
cache any list of per-layer caches that mlx-lm's protocol describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

from chunkdelta.loop.chunks import plan_chunks
from chunkdelta.loop.limits import enforce_limit
from chunkdelta.loop.memory import plan_chunk
from chunkdelta.loop.shapes import ModelShape


@runtime_checkable
class PrefillModel(Protocol):
    """What the loop asks of a model; ``chunkdelta.models`` has adapters that provide it.

    ``body`` takes ``[B, T]`` token ids (an integer dtype) or ``[B, T, hidden]`` input embeddings
    (a floating dtype) and a cache, advances the cache by T tokens and returns the final hidden
    states ``[B, T, hidden]``, ready for ``head``. ``positions`` is passed on only if the caller of
    :func:`prefill` gave some. ``head`` maps ``[B, n, hidden]`` to logits ``[B, n, vocab]``.
    ``memory_shape`` describes the model to the memory plan.
    """

    def body(
        self, inputs: mx.array, cache: Sequence[Any], *, positions: mx.array | None = None
    ) -> mx.array: ...

    def head(self, hidden: mx.array) -> mx.array: ...

    def memory_shape(self) -> ModelShape: ...


class PrefillCancelled(Exception):
    """``should_stop`` returned true between two chunks.

    The cache holds exactly the first ``done`` of the ``total`` tokens that were given, so the
    prefill can be taken up again from token ``done``, or the cache dropped.
    """

    def __init__(self, done: int, total: int):
        super().__init__(f"[prefill] stopped by the caller after {done} of {total} tokens")
        self.done = done
        self.total = total


def prefill(
    model: PrefillModel,
    inputs: mx.array | Sequence[int],
    cache: Sequence[Any],
    *,
    chunk_size: int = 512,
    logits: Literal["last", "all", "none"] = "last",
    cut_points: Iterable[int] = (),
    positions: mx.array | None = None,
    progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> mx.array | None:
    """Run a prompt through a model in chunks, filling its cache, in memory known in advance.

    Each chunk is one evaluation of the model's body; the head runs on the last token alone (or not
    at all), the hidden states of a chunk are dropped before the next, and MLX's evaluator is held to
    the memory plan for the duration: it runs ahead of the kernels and would otherwise keep dozens of
    intermediates alive. Chunk size changes speed and memory, never meaning: the result is that of one
    call within the tolerance of the kernels, and bit for bit where the cuts are the same.

    The tokens given follow those that the cache holds already: ``prefill(a)`` then ``prefill(b)``
    is ``prefill(a + b)``.

    Args:
        model: A :class:`PrefillModel`, such as ``chunkdelta.models.mlx_lm.accelerate`` returns.
        inputs: Token ids, ``[T]`` or ``[B, T]`` integers, or input embeddings, ``[T, hidden]`` or
            ``[B, T, hidden]`` floats; T >= 1.
        cache: One cache per layer, as ``chunkdelta.make_cache`` makes them.
        chunk_size: Most tokens in a chunk. Default: ``512``.
        logits: ``"last"`` for those of the last token, ``[B, vocab]``; ``"all"`` for those of every
            token, ``[B, T, vocab]`` (20 GB for 40k tokens of a 248k vocabulary in bf16);
            ``"none"``. Default: ``"last"``.
        cut_points: Positions, counted from the start of the context (cached tokens included), where
            a chunk must end. Default: none.
        positions: Rotary positions of the tokens given, ``[T]`` or ``[3, T]`` (M-RoPE), sliced along
            their last axis with the chunks, for models whose ``body`` takes them. Default: those
            that follow the cache.
        progress: Called as ``progress(done, total)`` with tokens, once before the first chunk and
            after each.
        should_stop: Asked before each chunk.

    Returns:
        Logits in the dtype of the model's head, evaluated; None for ``logits="none"``.

    Raises:
        ValueError: On a model without body or head, inputs of the wrong rank or dtype, an empty
            prompt, positions of another length, or a cache with too few pages for the whole prompt;
            before anything is computed.
        PrefillCancelled: If ``should_stop`` returned true.

    Example:
        >>> from chunkdelta.models import embedded
        >>> from chunkdelta.models.mlx_lm import accelerate, make_cache
        >>> model = accelerate(embedded.build(vocab_size=512))
        >>> cache = make_cache(model, max_tokens=64)
        >>> prefill(model, [1, 2, 3, 4, 5], cache, chunk_size=2).shape
        (1, 512)
    """
    if not isinstance(model, PrefillModel):
        raise ValueError(
            "[prefill] expected a model with body, head and memory_shape, such as "
            f"chunkdelta.models.mlx_lm.accelerate(model) returns; got {type(model).__name__}"
        )
    if logits not in ("last", "all", "none"):
        raise ValueError(f"[prefill] expected logits to be last, all or none; got {logits!r}")
    layers = len(model.memory_shape().layers)
    if not isinstance(cache, Sequence) or len(cache) < layers:
        got = f"{len(cache)} of them" if isinstance(cache, Sequence) else type(cache).__name__
        raise ValueError(
            f"[prefill] expected a cache per layer, {layers} of them, as chunkdelta.make_cache makes; "
            f"got {got}"
        )
    rows = _batched(inputs)
    batch, total = rows.shape[:2]
    if positions is not None and positions.shape[-1] != total:
        raise ValueError(
            f"[prefill] expected positions of {total} tokens; got shape {tuple(positions.shape)}"
        )
    start = _cached_tokens(cache)
    chunks = plan_chunks(start, start + total, chunk_size=chunk_size, cut_points=cut_points)
    longest = max(end - begin for begin, end in chunks)
    transients = plan_chunk(
        model.memory_shape(),
        context=start + total,
        chunk_size=longest,
        batch=batch,
        logit_rows=2 * total if logits == "all" else 1,  # chunks, and the whole
        kv_format=next((c.pool.kv_format for c in cache if hasattr(c, "pool")), "bf16"),
    )

    for layer in cache:
        if hasattr(layer, "check"):  # pages that do not suffice are refused before any work
            layer.check(batch, total)

    out: list[mx.array] = []
    if progress is not None:
        progress(0, total)
    with enforce_limit(transients):
        for begin, end in chunks:
            if should_stop is not None and should_stop():
                raise PrefillCancelled(begin - start, total)
            part = slice(begin - start, end - start)
            extra = {} if positions is None else {"positions": _rows(positions, part, axis=-1)}
            hidden = model.body(_rows(rows, part, axis=1), cache, **extra)
            if logits == "all":
                out.append(model.head(hidden))
            elif logits == "last" and part.stop == total:
                out.append(model.head(hidden[:, -1:])[:, 0])
            mx.eval(hidden, out, [c.state for c in cache])
            del hidden
            mx.clear_cache()
            if progress is not None:
                progress(part.stop, total)
        if not out:
            return None
        result = out[0] if len(out) == 1 else mx.concatenate(out, axis=1)
        mx.eval(result)
    return result


def _batched(inputs: mx.array | Sequence[int]) -> np.ndarray | mx.array:
    """Token ids as host int32 [B, T], embeddings as [B, T, hidden]."""
    batched: np.ndarray | mx.array
    if isinstance(inputs, mx.array) and mx.issubdtype(inputs.dtype, mx.floating):
        rank, expected = 3, "embeddings [T, hidden] or [B, T, hidden]"
        batched = inputs[None] if inputs.ndim == 2 else inputs
    else:
        rank, expected = 2, "token ids [T] or [B, T]"
        batched = np.atleast_2d(np.asarray(inputs))
        if batched.size and not np.issubdtype(batched.dtype, np.integer):
            raise ValueError(
                f"[prefill] expected integer token ids, or floating embeddings in an mx.array; "
                f"got {batched.dtype}"
            )
        batched = batched.astype(np.int32)
    if batched.ndim != rank or 0 in batched.shape:
        raise ValueError(f"[prefill] expected {expected}, none empty; got shape {batched.shape}")
    return batched


def _rows(x: np.ndarray | mx.array, part: slice, *, axis: int) -> mx.array:
    """A chunk's rows in an array of their own: a view would keep the whole buffer alive."""
    index = (slice(None),) * (axis % x.ndim) + (part,)
    return mx.array(x[index]) if isinstance(x, np.ndarray) else mx.contiguous(x[index])


def _cached_tokens(cache: Sequence[Any]) -> int:
    """Tokens that the cache holds: the largest offset of its layers (recurrent ones have none)."""
    offsets = [c.offset for c in cache if getattr(c, "offset", None) is not None]
    return max((int(mx.max(mx.array(x))) for x in offsets), default=0)
