"""Small seeded models of each supported architecture, stock mlx-lm classes.

The widths are tiny because MLX's CPU matrix products are slow; the shapes that matter to the
kernels are kept hard: grouped heads, Hv > Hk, Dk != Dv in one model, partial RoPE, gated output.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import olmo_hybrid, qwen3_5, qwen3_next

VOCAB = 128

QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
}

QWEN3_5_MOE = QWEN3_5 | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 80,
}

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 4096,
    "full_attention_interval": 4,
}

OLMO_HYBRID = {
    "model_type": "olmo_hybrid",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 96,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")


def build(name: str, *, dtype: mx.Dtype = mx.float32, seed: int = 0, **overrides: Any) -> nn.Module:
    """A stock model with seeded weights; gates spread over fast and slow decays."""
    mx.random.seed(seed)
    model: nn.Module
    if name in ("qwen3_5", "qwen3_5_moe"):
        config = (QWEN3_5 if name == "qwen3_5" else QWEN3_5_MOE) | overrides
        config["rope_parameters"] = dict(config["rope_parameters"])  # the class edits it
        model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    elif name == "qwen3_next":
        model = qwen3_next.Model(qwen3_next.ModelArgs.from_dict(QWEN3_NEXT | overrides))
    else:
        model = olmo_hybrid.Model(olmo_hybrid.ModelArgs.from_dict(OLMO_HYBRID | overrides))
    for layer in model.layers:
        if "linear_attn" in layer:
            mixer = layer.linear_attn
            heads = mixer.A_log.size
            mixer.A_log = mx.log(mx.linspace(0.02, 4.0, heads))
            mixer.dt_bias = mx.random.normal((heads,))
    model.set_dtype(dtype)
    for layer in model.layers:  # mlx-lm's cast_predicate keeps A_log in float32
        if "linear_attn" in layer:
            layer.linear_attn.A_log = layer.linear_attn.A_log.astype(mx.float32)
    model.eval()
    mx.eval(model.parameters())
    return model


@functools.cache
def stock(name: str) -> nn.Module:
    """The float32 stock model, shared by tests that do not change it."""
    return build(name)


@functools.cache
def prompt(length: int, *, seed: int = 1, batch: int = 1) -> mx.array:
    """Seeded random token ids (batch, length)."""
    tokens = mx.random.randint(0, VOCAB, (batch, length), key=mx.random.key(seed))
    mx.eval(tokens)
    return tokens


@functools.cache
def stock_logits(name: str, length: int) -> mx.array:
    """Logits (1, length, vocab) of the stock model for ``prompt(length)`` in one call."""
    model = stock(name)
    logits = model(prompt(length), cache=model.make_cache())
    mx.eval(logits)
    return logits
