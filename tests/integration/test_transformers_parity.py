"""Parity with an independent implementation: transformers' PyTorch classes, same weights."""

from __future__ import annotations

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.models.mlx_lm import accelerate
from mlx_lm.models import olmo_hybrid, qwen3_5, qwen3_5_moe, qwen3_next

from tests.integration import tiny_models

pytestmark = pytest.mark.parity

LENGTH = 150


def _config(base: dict, **changes) -> dict:
    config = {k: v for k, v in base.items() if k != "model_type"} | changes
    if "rope_parameters" in config:
        config["rope_parameters"] = dict(config["rope_parameters"])
    return config


def _rope(theta: float, factor: float = 1.0) -> dict:
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}


UNTIED = {"tie_word_embeddings": False}
CASES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", tiny_models.QWEN3_5, qwen3_5, UNTIED),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        tiny_models.QWEN3_5_MOE,
        qwen3_5_moe,
        {"norm_topk_prob": True} | UNTIED,
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        tiny_models.QWEN3_NEXT,
        qwen3_next,
        {"rope_parameters": _rope(10000.0, 0.25), "tie_word_embeddings": False},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        tiny_models.OLMO_HYBRID,
        olmo_hybrid,
        {"rope_parameters": _rope(500000.0), "pad_token_id": None},
    ),
}


def torch_model(name: str):
    """transformers' model with seeded weights, gates spread over fast and slow decays."""
    torch = pytest.importorskip("torch", reason="extra `parity`")
    transformers = pytest.importorskip("transformers", reason="extra `parity`")
    config_name, model_name, base, _, changes = CASES[name]
    config = getattr(transformers, config_name)(**_config(base, **changes))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim > 1:
                bound = value[0].numel() ** -0.5
                value.uniform_(-bound, bound)
            elif key.endswith("A_log"):
                value.copy_(torch.linspace(0.02, 4.0, len(value)).log())
            elif key.endswith("dt_bias"):
                value.normal_()
            elif "norm" in key:
                value.add_(0.1 * torch.randn_like(value))
    return model


def mlx_model(name: str, model):
    """mlx-lm's model with the weights of transformers' one, through mlx-lm's own conversion."""
    _, _, base, module, changes = CASES[name]
    ours = module.Model(module.ModelArgs.from_dict(_config(base, **changes) | {"model_type": name}))
    weights = {k: mx.array(v.numpy()) for k, v in model.state_dict().items()}
    # transformers 5 fuses in memory what these models' files hold apart.
    weights = dict(pair for item in weights.items() for pair in _as_in_files(name, base, *item))
    ours.load_weights(list(ours.sanitize(weights).items()))
    ours.eval()
    return ours


def _as_in_files(name: str, config: dict, key: str, value: mx.array):
    head, found, kind = key.partition("mlp.experts.")
    if name == "qwen3_next" and found:
        for e, w in enumerate(value):
            parts = {"down_proj": w}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), mx.split(w, 2), strict=True))
            for part, weight in parts.items():
                yield f"{head}mlp.experts.{e}.{part}.weight", weight
    elif name == "olmo_hybrid" and ".conv1d." in key:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        for part, weight in zip("qkv", mx.split(value, [keys, 2 * keys]), strict=True):
            yield key.replace(".conv1d.", f".{part}_conv1d."), weight
    else:
        yield key, value


def chunked_logits(model, tokens: mx.array, chunk: int) -> np.ndarray:
    cache = chunkdelta.make_cache(model, max_tokens=tokens.size)
    parts = []
    for start in range(0, tokens.size, chunk):
        parts.append(model(tokens[:, start : start + chunk], cache=cache))
        mx.eval(parts[-1], [c.state for c in cache])
    return np.array(mx.concatenate(parts, axis=1))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str):
    """Both in float32: 1e-5 over all logits. Where transformers runs in float64 (its grouped
    matrix products for experts do not), 1e-5 for the logits of every single token."""
    import torch

    theirs = torch_model(name)
    ours = accelerate(mlx_model(name, theirs))
    tokens = tiny_models.prompt(LENGTH, seed=7)
    ids = torch.tensor(np.array(tokens))
    dense = name in ("qwen3_5", "olmo_hybrid")
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits.numpy()
        exact = theirs.double()(ids, use_cache=False).logits.numpy() if dense else None
    for chunk in (1, 64, 149, LENGTH):
        got = chunked_logits(ours, tokens, chunk)
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
        if exact is not None:
            error = np.linalg.norm(got - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
            assert error.max() <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(name: str):
    import torch
    from mlx_lm.generate import generate_step

    theirs = torch_model(name)
    ours = accelerate(mlx_model(name, theirs))
    tokens = tiny_models.prompt(40, seed=8)
    ids = torch.tensor(np.array(tokens), dtype=torch.long)
    with torch.no_grad():
        for _ in range(8):
            logits = theirs(ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    generator = generate_step(tokens[0], ours, max_tokens=8, prefill_step_size=16)
    assert [token for token, _ in generator] == ids[0, 40:].tolist()
