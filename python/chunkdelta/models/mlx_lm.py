"""mlx-lm models on chunkdelta's kernels: ``accelerate``, ``restore``, ``make_cache``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import olmo_hybrid as stock_olmo_hybrid
from mlx_lm.models import qwen3_5 as stock_qwen3_5
from mlx_lm.models import qwen3_next as stock_qwen3_next
from mlx_lm.models.base import gather_last_axis

from chunkdelta.cache.gated_delta_cache import GatedDeltaCache
from chunkdelta.cache.kv_cache import FORMATS, PagedKVCache, SharedPools
from chunkdelta.cache.kv_pool import KVPool
from chunkdelta.loop.shapes import (
    AttentionShape,
    GatedDeltaShape,
    LayerShape,
    MlpShape,
    ModelShape,
)
from chunkdelta.models import olmo_hybrid, qwen3_5, qwen3_next
from chunkdelta.models.prompt_cache import load_prompt_cache

__all__ = [
    "accelerate",
    "activation_dtype",
    "default_kv_format",
    "is_accelerated",
    "load_prompt_cache",
    "make_cache",
    "restore",
]

SUPPORTED = "Qwen3.5 (dense or MoE), Qwen3-Next or Olmo-Hybrid"

# Stock layer class -> the class that its instances get.
REPLACEMENTS: dict[type, type] = {
    stock_qwen3_5.GatedDeltaNet: qwen3_5.GatedDeltaNet,
    stock_qwen3_next.Qwen3NextGatedDeltaNet: qwen3_next.GatedDeltaNet,
    stock_qwen3_next.Qwen3NextAttention: qwen3_next.Attention,
    stock_olmo_hybrid.GatedDeltaNet: olmo_hybrid.GatedDeltaNet,
    stock_olmo_hybrid.Attention: olmo_hybrid.Attention,
}
_STOCK = {new: old for old, new in REPLACEMENTS.items()}

# Gated-delta layers of mlx-lm that are not supported, and why.
_REFUSED = {
    "KimiDeltaAttention": "gates per channel (KDA)",
    "KimiK3DeltaAttention": "gates per channel (KDA)",
    "BailingKDA": "gates per channel (KDA)",
}

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def accelerate(model: nn.Module) -> nn.Module:
    """Run a model's attention and gated-delta layers on chunkdelta's kernels.

    Swaps the class of these layers of this one model; weights, other models and mlx-lm itself stay
    as they are, and :func:`restore` undoes it. The model then works with ``mlx_lm.generate``,
    ``stream_generate``, ``BatchGenerator`` and the server (its ``make_cache()`` returns growing
    paged caches) and with :func:`chunkdelta.prefill` (caches from :func:`make_cache`). It is for
    inference: the kernels have no gradients and refuse to be traced.

    Args:
        model: An mlx-lm 0.32.2 model of Qwen3.5 (dense or MoE text model), Qwen3-Next or
            Olmo-Hybrid, of any weight quantisation; it may be sharded already.

    Returns:
        The same model. Accelerating it again changes nothing.

    Raises:
        ValueError: Another architecture (those with other gated-delta layers by name), or head
            dimensions that the kernels do not have. Nothing is changed then.

    Example:
        >>> import mlx_lm
        >>> from chunkdelta.models.mlx_lm import accelerate
        >>> model, tokenizer = mlx_lm.load("mlx-community/Qwen3.5-9B-4bit")  # doctest: +SKIP
        >>> text = mlx_lm.generate(accelerate(model), tokenizer, "Hello")  # doctest: +SKIP
    """
    if is_accelerated(model):
        return model
    swaps: list[tuple[nn.Module, type]] = []
    for mixer in _mixers(model):
        replacement = REPLACEMENTS.get(type(mixer))
        if replacement is None:
            reason = _REFUSED.get(type(mixer).__name__)
            raise ValueError(
                f"[accelerate] expected a model of {SUPPORTED}; got {_name(model)} with "
                f"{type(mixer).__name__} layers" + (f", {reason}" if reason else "")
            )
        _check_dims(mixer)
        swaps.append((mixer, replacement))
    kinds = {issubclass(type(mixer), tuple(_GATED_DELTA)) for mixer, _ in swaps}
    if True not in kinds:
        raise ValueError(
            f"[accelerate] expected a model of {SUPPORTED}; got {_name(model)} without "
            "gated-delta layers"
        )
    text = _text(model)
    swaps.append((text.model, _body(text.model.__class__)))
    swaps.append((text.model.embed_tokens, _embedding(text.model.embed_tokens.__class__)))
    swaps += [(m, _accelerated(m.__class__)) for m in ([model] if text is model else [model, text])]
    for module, cls in swaps:
        module.__class__ = cls
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo :func:`accelerate`: the model's layers are mlx-lm's own again.

    Caches made for the accelerated model do not fit the restored one.

    Args:
        model: A model, accelerated or not.

    Returns:
        The same model.
    """
    if not is_accelerated(model):
        return model
    text = _text(model)
    for module in [*_mixers(model), text.model.embed_tokens, text.model, text, model]:
        cls = type(module)
        module.__class__ = _STOCK.get(cls) or getattr(cls, "stock_class", cls)
    return model


def is_accelerated(model: Any) -> bool:
    """Whether :func:`accelerate` has been applied to ``model`` (and not undone)."""
    return isinstance(model, AcceleratedModel)


def make_cache(
    model: nn.Module,
    *,
    max_tokens: int,
    page_size: int = 64,
    kv_format: str | None = None,
) -> list[Any]:
    """Caches for one run, one a layer, with all KV memory allocated now.

    Args:
        model: A model that :func:`accelerate` returned.
        max_tokens: Tokens that the pages hold, prompt and generated ones, over all sequences of a
            batch (each sequence is rounded up to whole pages).
        page_size: Tokens in a page, a multiple of 16. Default: ``64``.
        kv_format: Storage format of K and V (see :class:`chunkdelta.KVPages`), or two of them as
            ``"K/V"``. Default: ``None``, the activations' own (``"bf16"`` for a bf16 model),
            which rounds nothing.

    Returns:
        A :class:`PagedKVCache` for each attention layer, a :class:`GatedDeltaCache` for each
        gated-delta layer. A prompt that does not fit is refused before a token is computed.

    Raises:
        ValueError: A model that is not accelerated, sizes out of range, or an unknown format.

    Example:
        >>> from chunkdelta.models import embedded
        >>> from chunkdelta.models.mlx_lm import accelerate, make_cache
        >>> model = accelerate(embedded.build(vocab_size=512))
        >>> cache = make_cache(model, max_tokens=1024, kv_format="q8_0")
        >>> cache[3].pool.capacity
        1024
    """
    if not is_accelerated(model):
        raise ValueError(
            "[make_cache] expected a model that chunkdelta.models.mlx_lm.accelerate returned; "
            f"got {_name(model)}"
        )
    if max_tokens < 1:
        raise ValueError(f"[make_cache] expected max_tokens >= 1; got {max_tokens}")
    fmt = kv_format or default_kv_format(model)
    caches: list[Any] = []
    for mixer in _mixers(model):
        if _is_gated_delta(mixer):
            caches.append(GatedDeltaCache(_entries(mixer)))
        else:
            pool = KVPool(
                -(-max_tokens // page_size),
                mixer.num_key_value_heads,
                mixer.head_dim,
                page_size=page_size,
                kv_format=fmt,
            )
            caches.append(PagedKVCache(pool))
    return caches


def default_kv_format(model: nn.Module) -> str:
    """The page format that stores the model's activations as they are: f32, f16 or bf16."""
    return FORMATS[activation_dtype(model)]


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """Type of the residual stream: that of the embedding, or of its scales if quantised."""
    embedding = _text(model).model.embed_tokens
    dtype: mx.Dtype = (embedding.scales if "scales" in embedding else embedding.weight).dtype
    return dtype


class AcceleratedModel:
    """What an accelerated model's class has in addition: caches, and the prefill loop's seams."""

    stock_class: type

    def make_cache(self) -> list[Any]:
        """Growing caches that share their pages with this model's other caches.

        What mlx-lm calls for each prompt. Memory grows by slabs with the tokens held, without
        copies, and is free when the last cache is gone. For memory known before the run use
        :func:`chunkdelta.make_cache`.
        """
        if not hasattr(self, "_shared_pools"):
            self._shared_pools = SharedPools()
        mixers = list(_mixers(self))
        attention = [m for m in mixers if not _is_gated_delta(m)]
        pools = iter(
            self._shared_pools.get(
                [(m.num_key_value_heads, m.head_dim) for m in attention],
                kv_format=default_kv_format(self),
            )
        )
        return [
            GatedDeltaCache(_entries(m)) if _is_gated_delta(m) else PagedKVCache(next(pools))
            for m in mixers
        ]

    def body(
        self, inputs: mx.array, cache: Sequence[Any], *, positions: mx.array | None = None
    ) -> mx.array:
        """Final hidden states ``[B, T, hidden]`` of tokens ``[B, T]`` or of their embeddings
        ``[B, T, hidden]``; the cache advances by T tokens."""
        if positions is not None:
            raise ValueError(
                "[prefill] expected no positions for a text model, whose tokens follow the cache; "
                f"got positions {tuple(positions.shape)}"
            )
        hidden: mx.array = _text(self).model(inputs, cache)
        return hidden

    def head(self, hidden: mx.array) -> mx.array:
        """Logits ``[B, n, vocab]`` of final hidden states ``[B, n, hidden]``."""
        text = _text(self)
        if text.args.tie_word_embeddings:
            return text.model.embed_tokens.as_linear(hidden)
        logits = text.lm_head(hidden)
        group = getattr(text, "sharding_group", None)
        return logits if group is None else gather_last_axis(logits, group)

    def memory_shape(self) -> ModelShape:
        """The dimensions that decide what a prefill keeps in memory."""
        text = _text(self)
        return ModelShape(
            hidden=text.args.hidden_size,
            vocab=text.args.vocab_size,
            layers=tuple(
                LayerShape(_mixer_shape(mixer), _mlp_shape(layer.mlp, text.args))
                for mixer, layer in zip(_mixers(self), _layers(self), strict=True)
            ),
            weight_bytes=sum(v.nbytes for _, v in tree_flatten(self.parameters())),  # type: ignore[attr-defined]
            dtype_bytes=activation_dtype(self).size,
            name=_name(self),
        )


_GATED_DELTA = [cls for pair in REPLACEMENTS.items() for cls in pair if "Delta" in cls.__name__]


def _is_gated_delta(mixer: nn.Module) -> bool:
    return isinstance(mixer, tuple(_GATED_DELTA))


def _entries(mixer: nn.Module) -> int:
    return 4 if isinstance(mixer, stock_olmo_hybrid.GatedDeltaNet) else 2


@functools.cache
def _accelerated(cls: type) -> type:
    return type(f"Accelerated{cls.__name__}", (AcceleratedModel, cls), {"stock_class": cls})


@functools.cache
def _body(cls: type) -> type:
    """``cls`` that lets the caches refuse a chunk before any of them changes."""

    def call(self: Any, inputs: mx.array, cache: Any = None, **kwargs: Any) -> mx.array:
        embeddings = kwargs.get("input_embeddings")
        rows, columns = (inputs if embeddings is None else embeddings).shape[:2]
        ours = [c for c in cache or () if isinstance(c, PagedKVCache | GatedDeltaCache)]
        for c in ours:
            c.check(rows, columns)
        spans = ours[0].spans(rows, columns) if ours else None
        if spans is not None and all(start == stop for start, stop in spans):
            for c in ours:  # padding in every row: nothing for a layer to do
                c.advance(columns)
            return mx.zeros((rows, columns, self.norm.weight.size), self.norm.weight.dtype)
        return cls.__call__(self, inputs, cache, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "stock_class": cls})


@functools.cache
def _embedding(cls: type) -> type:
    """``cls`` that also lets embeddings through, for models that take only tokens."""

    def call(self: Any, x: mx.array) -> mx.array:
        return x if mx.issubdtype(x.dtype, mx.floating) else cls.__call__(self, x)

    return type(cls.__name__, (cls,), {"__call__": call, "stock_class": cls})


def _text(model: Any) -> Any:
    """The module with ``args``, ``model`` and perhaps ``lm_head``, below any wrapper."""
    return getattr(model, "language_model", model)


def _layers(model: Any) -> list[nn.Module]:
    layers = getattr(model, "layers", None)
    if not isinstance(model, nn.Module) or not layers:
        raise ValueError(f"[accelerate] expected a model of {SUPPORTED}; got {_name(model)}")
    return list(layers)


def _mixers(model: Any) -> Iterator[nn.Module]:
    """The token mixer of each layer (of this pipeline stage)."""
    for layer in _layers(model):
        for name in ("linear_attn", "self_attn", "attention", "mixer"):
            if name in layer:
                yield layer[name]
                break
        else:
            raise ValueError(
                f"[accelerate] expected a model of {SUPPORTED}; got {_name(model)} with "
                f"{type(layer).__name__} layers"
            )


def _check_dims(mixer: nn.Module) -> None:
    if _is_gated_delta(mixer):
        for dim in (mixer.head_k_dim, mixer.head_v_dim):
            if dim % 4 or dim > 256:
                raise ValueError(
                    "[accelerate] expected key and value dimensions up to 256, multiples of 4; "
                    f"got {mixer.head_k_dim} and {mixer.head_v_dim}"
                )
    elif mixer.head_dim not in HEAD_DIMS:
        raise ValueError(f"[accelerate] expected head_dim in {HEAD_DIMS}; got {mixer.head_dim}")


def _mixer_shape(mixer: Any) -> AttentionShape | GatedDeltaShape:
    if _is_gated_delta(mixer):
        return GatedDeltaShape(
            num_k_heads=mixer.num_k_heads,
            num_v_heads=mixer.num_v_heads,
            head_k_dim=mixer.head_k_dim,
            head_v_dim=mixer.head_v_dim,
            conv_kernel=mixer.conv_kernel_size,
        )
    return AttentionShape(
        num_heads=mixer.num_attention_heads,
        num_kv_heads=mixer.num_key_value_heads,
        head_dim=mixer.head_dim,
        gated=isinstance(mixer, stock_qwen3_next.Qwen3NextAttention),
    )


def _mlp_shape(mlp: Any, args: Any) -> MlpShape:
    if "switch_mlp" not in mlp:
        return MlpShape(args.intermediate_size)
    return MlpShape(
        intermediate=args.shared_expert_intermediate_size,
        num_experts=args.num_experts,
        experts_per_token=args.num_experts_per_tok,
        expert_intermediate=args.moe_intermediate_size,
    )


def _name(model: Any) -> str:
    kind = getattr(model, "model_type", None)
    return f"{type(model).__name__} ({kind})" if isinstance(kind, str) else type(model).__name__
