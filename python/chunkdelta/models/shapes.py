"""Shapes of hybrid models: from a configuration, from a model directory, or by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chunkdelta.loop.shapes import (
    AttentionShape,
    GatedDeltaShape,
    LayerShape,
    MlpShape,
    ModelShape,
)

# mlx-lm's model types whose layers chunkdelta replaces.
SUPPORTED_TYPES = (
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

# Configurations of known models, in the names of their config.json.
NAMED_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": _QWEN3_5
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
    "qwen3.5-27b": _QWEN3_5
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
    },
    "qwen3.5-35b-a3b": _QWEN3_5
    | {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3-next-80b": _QWEN3_5
    | {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}


def named_shape(name: str, *, bits: int = 4, group_size: int = 64) -> ModelShape:
    """Shape of a known model, its weights as MLX's affine quantisation would store them.

    Args:
        name: A key of ``NAMED_CONFIGS``; ``"9b"`` is short for ``"qwen3.5-9b"``, and so on.
        bits: Bits per weight, 2 to 8, or 16 for unquantised weights. Default: ``4``.
        group_size: Weights that share a 16-bit scale and bias. Default: ``64``.

    Raises:
        ValueError: If the name is unknown.
    """
    key = name.lower()
    matches = [k for k in NAMED_CONFIGS if k == key or k.split("-", 1)[1] == key]
    if not matches:
        raise ValueError(
            f"[plan_memory] expected a model directory or one of {', '.join(NAMED_CONFIGS)}; "
            f"got {name!r}"
        )
    config = NAMED_CONFIGS[matches[0]]
    bits_per_weight = 16 if bits == 16 else bits + 2 * 16 / group_size
    weight_bytes = round(parameter_count(config) * bits_per_weight / 8)
    return shape_from_config(config, weight_bytes=weight_bytes, name=matches[0])


def shape_from_config(
    config: Mapping[str, Any],
    *,
    weight_bytes: int,
    dtype_bytes: int | None = None,
    name: str = "model",
) -> ModelShape:
    """Shape from a config.json of a supported architecture.

    Args:
        config: The parsed file; a ``text_config`` inside is followed.
        weight_bytes: Bytes of the weights as stored.
        dtype_bytes: Bytes per activation. Default: those of the configuration's dtype, else ``2``.
        name: What messages call the model.

    Raises:
        ValueError: If the architecture is not supported, by its name.
    """
    model_type = config.get("model_type", "unknown")
    if model_type not in SUPPORTED_TYPES:
        raise ValueError(
            f"[shape_from_config] expected an architecture of {', '.join(SUPPORTED_TYPES)}; "
            f"got {model_type!r}"
        )
    dtype = config.get("dtype", config.get("torch_dtype"))
    config = config.get("text_config", config)
    dtype = config.get("dtype", config.get("torch_dtype", dtype))
    heads = config["num_attention_heads"]
    attention = AttentionShape(
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        gated=model_type != "olmo_hybrid",
    )
    delta = GatedDeltaShape(
        num_k_heads=config["linear_num_key_heads"],
        num_v_heads=config["linear_num_value_heads"],
        head_k_dim=config["linear_key_head_dim"],
        head_v_dim=config["linear_value_head_dim"],
        conv_kernel=config["linear_conv_kernel_dim"],
    )
    return ModelShape(
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        layers=tuple(
            LayerShape(attention if kind == "full_attention" else delta, _mlp(config, i))
            for i, kind in enumerate(_layer_types(config))
        ),
        weight_bytes=weight_bytes,
        dtype_bytes=dtype_bytes or _DTYPE_BYTES.get(str(dtype), 2),
        name=name,
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    if config.get("layer_types"):
        return list(config["layer_types"])
    interval = config.get("full_attention_interval") or 4
    return [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]


def _mlp(config: Mapping[str, Any], layer: int) -> MlpShape:
    experts = config.get("num_experts") or 0
    dense = layer in (config.get("mlp_only_layers") or ())
    if dense or not experts or (layer + 1) % (config.get("decoder_sparse_step") or 1):
        return MlpShape(config["intermediate_size"])
    return MlpShape(
        intermediate=config.get("shared_expert_intermediate_size") or 0,
        num_experts=experts,
        experts_per_token=config["num_experts_per_tok"],
        expert_intermediate=config["moe_intermediate_size"],
    )


def parameter_count(config: Mapping[str, Any]) -> int:
    """Parameters of a configuration's projections, convolutions and embeddings (norms left out)."""
    shape = shape_from_config(config, weight_bytes=0)
    config = config.get("text_config", config)
    hidden = shape.hidden
    total = shape.vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    for layer in shape.layers:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, AttentionShape):
            q = mixer.num_heads * mixer.head_dim
            total += hidden * (q * (3 if mixer.gated else 2))
            total += hidden * 2 * mixer.num_kv_heads * mixer.head_dim
        else:
            total += hidden * (mixer.conv_dim + 2 * mixer.value_dim + 2 * mixer.num_v_heads)
            total += mixer.conv_kernel * mixer.conv_dim
        if mlp is not None:
            total += 3 * hidden * mlp.intermediate
            total += mlp.num_experts * (hidden + 3 * hidden * mlp.expert_intermediate)
    return total


def shape_from_directory(path: str | Path) -> ModelShape:
    """Shape of a model directory (config.json and safetensors), read without loading weights.

    Weight bytes are those of the safetensors' tensors, the vision tower's and the multi-token
    prediction head's left out, as mlx-lm leaves them out.

    Raises:
        ValueError: If the directory, its configuration or its weights cannot be read, or the
            architecture is not supported; one sentence.
    """
    path = Path(path)
    config_file = path / "config.json"
    try:
        config = json.loads(config_file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"[shape_from_directory] expected a model directory with a readable config.json; "
            f"got {path}: {error}"
        ) from error
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"[shape_from_directory] expected model*.safetensors in {path}; got none")
    try:
        weight_bytes = sum(_tensor_bytes(file) for file in files)
        return shape_from_config(config, weight_bytes=weight_bytes, name=path.name)
    except KeyError as error:
        raise ValueError(
            f"[shape_from_directory] expected {error} in {config_file}; got a configuration without"
        ) from error


def _tensor_bytes(file: Path) -> int:
    try:
        with file.open("rb") as f:
            header_size = int.from_bytes(f.read(8), "little")
            if not 0 < header_size <= 100_000_000:
                raise ValueError(f"header of {header_size} bytes")
            header = json.loads(f.read(header_size))
        skipped = ("model.visual", "vision_tower", "visual.")
        return sum(
            tensor["data_offsets"][1] - tensor["data_offsets"][0]
            for name, tensor in header.items()
            if name != "__metadata__" and not name.startswith(skipped) and "mtp." not in name
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"[shape_from_directory] expected a safetensors file; got {file}: {error}"
        ) from error
