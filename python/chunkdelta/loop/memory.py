"""What a chunked prefill keeps in memory, named byte by byte before it runs, and held to.

docs/concepts/memory-plan.md explains the terms; here is where each number comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from chunkdelta.cache.pages import is_rotated, page_row_bytes, parse_kv_format, stored_head_dim
from chunkdelta.loop.chunks import plan_chunks
from chunkdelta.loop.shapes import (
    AttentionShape,
    GatedDeltaShape,
    LayerShape,
    MlpShape,
    ModelShape,
)
from chunkdelta.loop.workspace import cpu_workspace_bytes, gpu_scratch_bytes

_F32 = 4
MAX_CONTEXT = 1 << 27  # tokens; a pool addresses 2**31 - 1 slots


@dataclass(frozen=True)
class ChunkPlan:
    """Memory that one chunk needs beyond weights and cache; it does not depend on the context.

    Attributes:
        transients: Arrays of the widest layer that the evaluator may keep alive at once, by name, in
            bytes.
        workspace_bytes: Scratch of the kernels: on the CPU persistent and outside of MLX's
            accounting, on the GPU allocated through MLX for one op at a time.
        logits_bytes: Logits that are returned.
        largest_op_bytes: Most that one op allocates through MLX.
        workspace_in_mlx: Whether MLX counts the workspace.
    """

    transients: dict[str, int]
    workspace_bytes: int
    logits_bytes: int
    largest_op_bytes: int
    workspace_in_mlx: bool = False

    @property
    def transient_bytes(self) -> int:
        return sum(self.transients.values())

    @property
    def total_bytes(self) -> int:
        return self.transient_bytes + self.workspace_bytes + self.logits_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Every byte of a chunked prefill, before it runs; all sizes in bytes.

    Attributes:
        model: The model planned for.
        tokens: Context that the KV pages hold: prompt and tokens to come.
        prompt_tokens: Tokens of the prompt.
        chunk_size: Most tokens in a chunk.
        weight_bytes: Weights.
        kv_bytes: KV pages of all attention layers.
        state_bytes: Gated-delta states and convolution tails of all layers.
        chunk: What a chunk needs on top.
        one_call_bytes: What the same prompt in one stock call needs (see :func:`one_call_bytes`).
        page_bytes: KV bytes of one page of all attention layers.
        page_size: Tokens in a page.
        kv_format: Storage format of the pages.
        batch: Sequences of equal length.
        logit_rows: Rows of logits returned per sequence.
        checkpoint_bytes: States of checkpoints that are kept during the prefill.
        prefix_bytes: Budget of the prefix cache.
        device: Where it runs; None for MLX's default device.
        rows: The terms of the sum by name, for tables.
    """

    model: ModelShape
    tokens: int
    prompt_tokens: int
    chunk_size: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int
    chunk: ChunkPlan
    one_call_bytes: int
    page_bytes: int
    page_size: int
    kv_format: str
    batch: int
    logit_rows: int
    checkpoint_bytes: int = 0
    prefix_bytes: int = 0
    device: str | None = None
    rows: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "rows",
            {
                "weights": self.weight_bytes,
                "kv pages": self.kv_bytes,
                "states": self.state_bytes,
                "transients per chunk": self.chunk.transient_bytes,
                "kernel workspace": self.chunk.workspace_bytes,
                "logits": self.chunk.logits_bytes,
                **({"checkpoints": self.checkpoint_bytes} if self.checkpoint_bytes else {}),
                **({"prefix cache": self.prefix_bytes} if self.prefix_bytes else {}),
            },
        )

    @property
    def total_bytes(self) -> int:
        """The planned peak: weights, pages, states, transients, workspace and logits."""
        return sum(self.rows.values())

    @property
    def fixed_bytes(self) -> int:
        """All but the KV pages."""
        return self.total_bytes - self.kv_bytes

    def fits(self, memory_bytes: int) -> bool:
        return self.total_bytes <= memory_bytes

    def largest_context(self, memory_bytes: int) -> int | None:
        """Most tokens of context that fit into ``memory_bytes``, in whole pages and full chunks.

        0 if no page fits beside weights, states and one chunk; None if nothing grows with the
        context.
        """
        if self.page_bytes == 0:
            return None if self.fits(memory_bytes) else 0
        low, high = 0, max(0, memory_bytes - self.weight_bytes) // (self.batch * self.page_bytes)
        while low < high:
            pages = (low + high + 1) // 2
            if self._total_at(pages) <= memory_bytes:
                low = pages
            else:
                high = pages - 1
        return low * self.page_size

    def _total_at(self, pages: int) -> int:
        """Planned peak with so many pages per sequence."""
        chunk = plan_chunk(
            self.model,
            context=pages * self.page_size,
            chunk_size=self.chunk_size,
            batch=self.batch,
            logit_rows=self.logit_rows,
            kv_format=self.kv_format,
            device=self.device,
        )
        kv = self.batch * pages * self.page_bytes
        kept = self.state_bytes + self.checkpoint_bytes + self.prefix_bytes
        return self.weight_bytes + kv + kept + chunk.total_bytes

    def to_json(self) -> dict[str, int | str]:
        """The plan's terms as plain values, in bytes and tokens."""
        return {
            "model": self.model.name,
            "tokens": self.tokens,
            "chunk_size": self.chunk_size,
            "kv_format": self.kv_format,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "state_bytes": self.state_bytes,
            "transient_bytes": self.chunk.transient_bytes,
            "workspace_bytes": self.chunk.workspace_bytes,
            "logits_bytes": self.chunk.logits_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "prefix_bytes": self.prefix_bytes,
            "planned_peak_bytes": self.total_bytes,
            "one_call_bytes": self.one_call_bytes,
        }

    def against(self, memory_bytes: int) -> dict[str, int | bool | None]:
        """Whether the plan fits into so much memory, and the largest context that would."""
        return {
            "memory_bytes": memory_bytes,
            "fits": self.fits(memory_bytes),
            "largest_context": self.largest_context(memory_bytes),
        }

    def require(self, memory_bytes: int) -> None:
        """Raise MemoryError, with the largest context that fits, unless the plan fits."""
        if self.fits(memory_bytes):
            return
        largest = self.largest_context(memory_bytes)
        hint = (
            f"the largest context that fits is {largest:,} tokens"
            if largest
            else "no context fits: weights, states and one chunk need "
            f"{format_bytes(self.fixed_bytes)}"
        )
        raise MemoryError(
            f"[plan_memory] a context of {self.tokens:,} tokens needs "
            f"{format_bytes(self.total_bytes)} for {self.model.name}; got "
            f"{format_bytes(memory_bytes)}; {hint}"
        )


def format_bytes(n: float) -> str:
    """Bytes in decimal units: 1.72 GB, 18.3 MB, 412 B."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= size:
            digits = 2 if unit == "GB" else 1
            return f"{n / size:,.{digits}f} {unit}"
    return f"{n:.0f} B"


def plan_memory(
    model: ModelShape,
    tokens: int,
    *,
    max_tokens: int = 0,
    chunk_size: int = 512,
    page_size: int = 64,
    kv_format: str | None = None,
    batch: int = 1,
    logit_rows: int = 1,
    checkpoints: int = 0,
    prefix_bytes: int = 0,
    device: str | None = None,
) -> MemoryPlan:
    """Name every byte that a chunked prefill will hold, before anything is allocated.

    Args:
        model: Dimensions of the model.
        tokens: Tokens of the prompt, per sequence (>= 1).
        max_tokens: Tokens to generate after it, for which pages are kept. Default: ``0``.
        chunk_size: Most tokens in a chunk. Default: ``512``.
        page_size: Tokens in a KV page, a multiple of 16. Default: ``64``.
        kv_format: Storage format of the pages, of K and V alike or ``"K/V"``. Default: that of the
            activations (``"bf16"``, or ``"f32"`` for a float32 model).
        batch: Sequences of equal length. Default: ``1``.
        logit_rows: Rows of logits that are returned per sequence; 1 for the last token's.
        checkpoints: States kept on the way, per sequence, beside the running one; their pages are
            the prompt's own. Default: ``0``.
        prefix_bytes: What a :class:`PrefixCache` may hold of other prompts. Default: ``0``.
        device: ``"cpu"`` or ``"gpu"``, whose kernels' scratch is planned for. Default: ``None``,
            MLX's default device.

    Returns:
        The :class:`MemoryPlan`.

    Raises:
        ValueError: If a size is out of range or the format unknown.

    Example:
        >>> from chunkdelta.models.shapes import named_shape
        >>> plan = plan_memory(named_shape("qwen3.5-9b"), 131072)
        >>> plan.kv_bytes
        4294967296
    """
    if device not in (None, "cpu", "gpu"):
        raise ValueError(f"[plan_memory] expected device to be cpu or gpu; got {device!r}")
    for name, value in (("tokens", tokens), ("chunk_size", chunk_size), ("batch", batch)):
        if value < 1:
            raise ValueError(f"[plan_memory] expected {name} >= 1; got {value}")
    for name, value in (
        ("max_tokens", max_tokens),
        ("checkpoints", checkpoints),
        ("prefix_bytes", prefix_bytes),
    ):
        if value < 0:
            raise ValueError(f"[plan_memory] expected {name} >= 0; got {value}")
    if tokens + max_tokens > MAX_CONTEXT:
        raise ValueError(
            f"[plan_memory] expected a context of at most {MAX_CONTEXT:,} tokens; "
            f"got {tokens + max_tokens:,}"
        )
    if page_size < 16 or page_size % 16:
        raise ValueError(
            f"[plan_memory] expected page_size to be a multiple of 16; got {page_size}"
        )
    kv_format = kv_format or ("f32" if model.dtype_bytes == 4 else "bf16")
    capacity = tokens + max_tokens
    pages = batch * -(-capacity // page_size)
    page_bytes = page_size * sum(kv_bytes_per_token(x, kv_format) for x in model.attention_layers)
    return MemoryPlan(
        model=model,
        tokens=capacity,
        prompt_tokens=tokens,
        chunk_size=chunk_size,
        weight_bytes=model.weight_bytes,
        kv_bytes=pages * page_bytes,
        state_bytes=batch * state_bytes(model),
        chunk=plan_chunk(
            model,
            context=tokens,
            chunk_size=max(b - a for a, b in plan_chunks(0, tokens, chunk_size=chunk_size)),
            batch=batch,
            logit_rows=logit_rows,
            kv_format=kv_format,
            device=device,
        ),
        one_call_bytes=one_call_bytes(model, tokens, batch=batch),
        page_bytes=page_bytes,
        page_size=page_size,
        kv_format=kv_format,
        batch=batch,
        logit_rows=logit_rows,
        checkpoint_bytes=batch * checkpoints * state_bytes(model),
        prefix_bytes=prefix_bytes,
        device=device,
    )


def kv_bytes_per_token(layer: AttentionShape, kv_format: str) -> int:
    """K and V bytes of one token in one layer, in a page format (``"bf16"``, ``"q8_0/bf16"``)."""
    names = parse_kv_format(kv_format)
    stored = stored_head_dim(layer.head_dim, *names)
    return layer.num_kv_heads * sum(page_row_bytes(name, stored) for name in names)


def state_bytes(model: ModelShape) -> int:
    """Float32 states and convolution tails of one sequence, in all layers."""
    return sum(
        layer.state_bytes + _tail_bytes(layer, model.dtype_bytes)
        for layer in model.gated_delta_layers
    )


def _tail_bytes(layer: GatedDeltaShape, b: int) -> int:
    """The rows of the convolution's input that the next chunk needs."""
    return (layer.conv_kernel - 1) * layer.conv_dim * b


def one_call_bytes(model: ModelShape, tokens: int, *, batch: int = 1) -> int:
    """What one stock call on the whole prompt needs, without chunks and without fused attention.

    Weights, KV cache and states, the arrays of the widest layer over all tokens, and the larger of
    the attention scores of one layer, ``Hq * tokens * tokens``, and the logits of every token,
    ``tokens * vocab``, all in the activations' dtype. MLX attends unfused at head_dim 256 wherever
    its heuristics do not choose a fused kernel, and always on the CPU.
    """
    b = model.dtype_bytes
    kv = sum(2 * x.num_kv_heads * x.head_dim * b for x in model.attention_layers) * tokens
    scores = max((x.num_heads for x in model.attention_layers), default=0) * tokens * tokens * b
    logits = tokens * model.vocab * b
    layer = sum(_widest_half(model, tokens, 1, "bf16").values())
    per_sequence = kv + state_bytes(model) + layer + max(scores, logits)
    return model.weight_bytes + batch * per_sequence


def plan_chunk(
    model: ModelShape,
    *,
    context: int,
    chunk_size: int,
    batch: int = 1,
    logit_rows: int = 1,
    kv_format: str = "bf16",
    device: str | None = None,
) -> ChunkPlan:
    """What one chunk of ``chunk_size`` tokens needs on top of weights and cache.

    Transients are the arrays of the widest half layer (mixer or feed-forward part) and the residual
    stream. The evaluator never needs more: it needs a window of a few ops, and
    :func:`chunkdelta.loop.limits.enforce_limit` holds its run-ahead to this sum. The workspace of attention grows with the
    ``context`` up to the length of one segment (4,096 keys) and no further. ``device`` is
    ``"cpu"`` or ``"gpu"``; by default MLX's default device.
    """
    tokens = batch * chunk_size
    transients = _widest_half(model, tokens, batch, kv_format)
    logits = batch * logit_rows * model.vocab * model.dtype_bytes
    on_gpu = mx.default_device().type == mx.DeviceType.gpu if device is None else device == "gpu"
    workspace_of = gpu_scratch_bytes if on_gpu else cpu_workspace_bytes
    workspace = workspace_of(
        model, context=context, chunk_size=chunk_size, batch=batch, kv_format=kv_format
    )
    largest = max([logits, *transients.values()])
    return ChunkPlan(
        transients=transients,
        workspace_bytes=workspace,
        logits_bytes=logits,
        largest_op_bytes=largest + workspace if on_gpu else largest,
        workspace_in_mlx=on_gpu,
    )


def _widest_half(model: ModelShape, tokens: int, sequences: int, kv_format: str) -> dict[str, int]:
    """Bytes of the arrays of the widest half layer, with the residual stream."""
    b = model.dtype_bytes
    halves = []
    for layer in model.distinct_layers:
        arrays = _mixer_arrays(layer, model.hidden, b, kv_format)
        half = {name: n * tokens for name, n in arrays.items()}
        if isinstance(layer.mixer, GatedDeltaShape):
            # A state is a value: the next one is written beside it.
            half["next state"] = sequences * layer.mixer.state_bytes
            half["next convolution tail"] = sequences * _tail_bytes(layer.mixer, b)
        halves.append(half)
        if layer.mlp is not None:
            mlp = _mlp_arrays(layer.mlp, model.hidden, b)
            halves.append({name: n * tokens for name, n in mlp.items()})
    residual = {"residual in": model.hidden * b * tokens, "residual out": model.hidden * b * tokens}
    return residual | max(halves, key=lambda arrays: sum(arrays.values()))


def _mixer_arrays(layer: LayerShape, hidden: int, b: int, kv_format: str) -> dict[str, int]:
    mixer = layer.mixer
    if isinstance(mixer, GatedDeltaShape):
        return {
            "normed input": hidden * b,
            "q, k, v projection": mixer.conv_dim * b,
            "z projection": mixer.value_dim * b,
            "a and b projections": 2 * mixer.num_v_heads * b,
            "convolved q, k, v": mixer.conv_dim * b,
            "log gates and beta": 2 * mixer.num_v_heads * _F32,
            "delta rule output": mixer.value_dim * b,
            "normed output": mixer.value_dim * b,
            "gated output": mixer.value_dim * b,
            "mixer output": hidden * b,
        }
    q = mixer.num_heads * mixer.head_dim
    kv = mixer.num_kv_heads * mixer.head_dim
    # Rotations are float32: signs, transform, signs; K before it is stored, q, and o on its way back.
    k_format, v_format = parse_kv_format(kv_format)
    stored = stored_head_dim(mixer.head_dim, k_format, v_format) * _F32
    rotated = 2 * stored * mixer.num_heads
    rotations = {
        "q, rotated as K": rotated if is_rotated(k_format) else 0,
        "o, rotated as V": rotated if is_rotated(v_format) else 0,
        "k and v, rotated": 2 * stored * mixer.num_kv_heads
        if is_rotated(k_format) or is_rotated(v_format)
        else 0,
    }
    return {
        **{name: n for name, n in rotations.items() if n},
        "normed input": hidden * b,
        "q and gate projection": (2 if mixer.gated else 1) * q * b,
        "normed q": q * b,
        "rotated q": q * b,
        "k, normed and rotated": 3 * kv * b,
        "v": kv * b,
        "attention output": q * b,
        "sigmoid of the gate": (q if mixer.gated else 0) * b,
        "gated output": (q if mixer.gated else 0) * b,
        "mixer output": hidden * b,
    }


def _mlp_arrays(mlp: MlpShape, hidden: int, b: int) -> dict[str, int]:
    arrays = {
        "normed input": hidden * b,
        "gate": mlp.intermediate * b,
        "up": mlp.intermediate * b,
        "activated": mlp.intermediate * b,
        "mlp output": hidden * b,
    }
    if mlp.num_experts:
        k = mlp.experts_per_token
        arrays |= {
            "router": 3 * mlp.num_experts * _F32,
            "inputs sorted by expert": k * hidden * b,
            "expert gate, up, activated": 3 * k * mlp.expert_intermediate * b,
            "expert outputs": k * hidden * b,
            "outputs in token order": k * hidden * b,
            "weighted outputs": k * hidden * b,
            "sum of experts": hidden * b,
        }
    return arrays
