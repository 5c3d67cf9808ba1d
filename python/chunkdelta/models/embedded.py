"""The model that ``chunkdelta prefill`` runs when it is given none.

It has the architecture of Qwen3.5 and the parts of it that are hard, at full size: head_dim 256 with
grouped queries and output gates, rotary positions on a quarter of the dimensions, two value heads
for each key head with 128 x 128 states, the 248k vocabulary. Only the width and the depth are small:
one period of three gated-delta layers and an attention layer on a residual stream of 128. Weights
are drawn from a seed on the spot, so its text means nothing; its memory and arithmetic are real.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

NAME = "embedded Qwen3.5-style model"

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}

# Gated-delta heads forget with half-lives spread over this range of tokens, as trained ones do.
_HALF_LIVES = (2.0, 20000.0)
_ROWS = 16384


def build(*, seed: int = 0, dtype: mx.Dtype = mx.bfloat16, **overrides: Any) -> nn.Module:
    """Make the default model as an mlx-lm model with seeded weights.

    Args:
        seed: Seed of the weights; the global random state plays no part. Default: ``0``.
        dtype: Type of the weights and activations. Default: ``bfloat16``.
        overrides: Entries of the configuration to replace or add, such as ``vocab_size=512``.

    Returns:
        An ``mlx_lm.models.qwen3_5.Model``, evaluated, in inference mode.

    Raises:
        ImportError: If mlx-lm is not installed.
        ValueError: If an override is no entry of a Qwen3.5 configuration.

    Example:
        >>> model = build(vocab_size=512)
        >>> model(mx.array([[1, 2, 3]])).shape
        (1, 3, 512)
    """
    from mlx_lm.models import qwen3_5

    known = {field.name for field in dataclasses.fields(qwen3_5.TextModelArgs)}
    if unknown := sorted(set(overrides) - known):
        raise ValueError(f"[embedded] expected overrides among {sorted(known)}; got {unknown}")
    config = {**CONFIG, **overrides}
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    # The embedding is drawn in place, a block of rows at a time: drawn at once, MLX would hold
    # several times its bytes.
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict({**config, "vocab_size": 1}))
    key = mx.random.key(seed)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        if value.ndim > 1:
            key, own = mx.random.split(key)
            bound = math.prod(value.shape[1:]) ** -0.5
            value = mx.random.uniform(-bound, bound, value.shape, key=own)
        weights.append((name, value.astype(dtype)))
    model.load_weights(weights)
    _spread_half_lives(model)

    embedding = mx.zeros((vocab, hidden), dtype)
    for row in range(0, vocab, _ROWS):
        key, own = mx.random.split(key)
        block = mx.random.normal((min(_ROWS, vocab - row), hidden), scale=hidden**-0.5, key=own)
        embedding[row : row + block.shape[0]] = block.astype(dtype)
        mx.eval(embedding)
        del block
    text = model.language_model
    text.args.vocab_size = model.args.text_config["vocab_size"] = vocab
    text.model.embed_tokens.weight = embedding
    mx.eval(model.parameters())
    model.eval()
    return model


def _spread_half_lives(model: nn.Module) -> None:
    """Set A_log so that at dt = softplus(dt_bias) the heads' half-lives are log-uniform."""
    layers = [layer.linear_attn for layer in model.layers if layer.is_linear]
    heads = sum(layer.num_v_heads for layer in layers)
    low, high = _HALF_LIVES
    softplus_of_bias = math.log1p(math.e)
    rates = [
        math.log(2) / (low * (high / low) ** (i / max(heads - 1, 1))) / softplus_of_bias
        for i in range(heads)
    ]
    for i, layer in enumerate(layers):
        part = rates[i * layer.num_v_heads : (i + 1) * layer.num_v_heads]
        layer.A_log = mx.log(mx.array(part, dtype=mx.float32))
