"""accelerate and restore: what they change, what they leave, what they refuse."""

from __future__ import annotations

import copy
import inspect

import chunkdelta
import mlx.core as mx
import mlx.nn as nn
import pytest
from chunkdelta.models import mlx_lm as adapter
from chunkdelta.models.mlx_lm import accelerate, is_accelerated, restore
from mlx.utils import tree_flatten
from mlx_lm.models import bailing_moe_v3, kimi_linear, llama
from mlx_lm.models.cache import ArraysCache, KVCache

from tests.integration.tiny_models import ARCHITECTURES, build, prompt


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_restore_undoes_accelerate(name: str):
    model, other = build(name), build(name)
    before, weights = classes(model), dict(tree_flatten(model.parameters()))
    tokens = prompt(9)
    want = model(tokens)
    assert accelerate(model) is model
    assert accelerate(model) is model
    assert is_accelerated(model)
    changed = {n for n, cls in classes(model).items() if cls is not before[n]}
    mixers = {n for n in before if n.endswith(("linear_attn", "self_attn"))}
    assert mixers <= changed
    assert not any(".mlp" in n or "norm" in n or "proj" in n for n in changed)
    assert all(w is dict(tree_flatten(model.parameters()))[n] for n, w in weights.items())
    assert classes(other) == before  # nothing global
    assert restore(model) is model
    assert classes(model) == before
    assert not is_accelerated(model)
    assert mx.array_equal(model(tokens), want)
    assert [type(c) for c in model.make_cache()] == [ArraysCache, ArraysCache, ArraysCache, KVCache]


def test_restoring_a_stock_model_does_nothing():
    model = build("qwen3_5")
    before = classes(model)
    assert restore(model) is model
    assert classes(model) == before


def test_the_text_model_alone():
    """mlx-lm's qwen3_5.TextModel, without its wrapper, is a model as well."""
    model = build("qwen3_5").language_model
    tokens = prompt(70)
    want = model(tokens)
    assert mx.allclose(accelerate(model)(tokens, cache=model.make_cache()), want, atol=1e-4)
    restore(model)
    assert mx.array_equal(model(tokens), want)


def test_signatures_stay():
    """mlx-lm looks at them to see whether a model takes embeddings."""
    model = build("qwen3_5")
    before = inspect.signature(model.__call__)
    assert inspect.signature(accelerate(model).__call__) == before


def kimi() -> nn.Module:
    return kimi_linear.Model(
        kimi_linear.ModelArgs.from_dict(
            {
                "model_type": "kimi_linear",
                "vocab_size": 32,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 32,
                "head_dim": 16,
                "rope_theta": 1e4,
                "rms_norm_eps": 1e-6,
                "linear_attn_config": {
                    "kda_layers": [1],
                    "full_attn_layers": [2],
                    "num_heads": 2,
                    "head_dim": 16,
                    "short_conv_kernel_size": 4,
                },
                "model_max_length": 64,
                "num_experts": 0,
                "moe_intermediate_size": 16,
                "kv_lora_rank": 16,
                "q_lora_rank": None,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 16,
            }
        )
    )


def bailing() -> nn.Module:
    """A layer of it: the class is what is refused."""
    model = build("qwen3_5")
    layer = nn.Module()
    layer.attention = bailing_moe_v3.BailingKDA.__new__(bailing_moe_v3.BailingKDA)
    nn.Module.__init__(layer.attention)
    model.language_model.model.layers[1] = layer
    return model


def llama_model() -> nn.Module:
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=1,
            intermediate_size=32,
            num_attention_heads=2,
            rms_norm_eps=1e-6,
            vocab_size=32,
        )
    )


REFUSED = [
    pytest.param(
        kimi, r"got Model \(kimi_linear\) with KimiDeltaAttention layers, gates per", id="kimi"
    ),
    pytest.param(bailing, r"with BailingKDA layers, gates per channel \(KDA\)", id="bailing"),
    pytest.param(llama_model, r"got Model \(llama\) with Attention layers", id="llama"),
    pytest.param(
        lambda: build("qwen3_5", head_dim=48),
        r"head_dim in \(64, 80, .*\); got 48",
        id="head-dim",
    ),
    pytest.param(
        lambda: build("qwen3_5", linear_key_head_dim=34),
        r"key and value dimensions .* multiples of 4; got 34 and 32",
        id="key-dim",
    ),
    pytest.param(lambda: nn.Linear(4, 4), r"got Linear", id="no-model"),
    pytest.param(lambda: "qwen", r"got str", id="no-module"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused_by_name_and_left_alone(make, message: str):
    model = make()
    before = classes(model) if isinstance(model, nn.Module) else None
    with pytest.raises(ValueError, match=r"\[accelerate\] expected .*" + message):
        accelerate(model)
    if before is not None:
        assert classes(model) == before


def test_foreign_caches_and_masks_are_refused():
    model = accelerate(build("qwen3_5"))
    tokens = prompt(5)
    with pytest.raises(ValueError, match=r"expected a GatedDeltaCache .*; got ArraysCache"):
        model(tokens, cache=restore(build("qwen3_5")).make_cache())
    attention = model.layers[3].self_attn
    x = mx.zeros((1, 5, 64))
    with pytest.raises(ValueError, match=r"expected a PagedKVCache .*; got KVCache"):
        attention(x, None, KVCache())
    with pytest.raises(ValueError, match=r"expected no mask array.*; got mlx.core.bool \(5, 5\)"):
        attention(x, mx.zeros((5, 5), mx.bool_), model.make_cache()[3])


def test_a_refused_chunk_changes_no_cache():
    model = accelerate(build("qwen3_5"))
    cache = chunkdelta.make_cache(model, max_tokens=64)
    tokens = prompt(65)
    model(tokens[:, :60], cache=cache)
    states = [c[1] for c in cache[:3]]
    with pytest.raises(ValueError, match=r"\[kv_cache\] expected at most 0 new pages"):
        model(tokens[:, 60:], cache=cache)
    with pytest.raises(ValueError, match="expected inputs of 1 rows; got 2"):
        model(prompt(1, batch=2), cache=cache)
    assert cache[3].offset == 60
    assert all(c[1] is s for c, s in zip(cache[:3], states, strict=True))
    want = model(tokens[:, :64])[:, 60:]
    assert mx.allclose(model(tokens[:, 60:64], cache=cache), want, atol=1e-5)


def test_formats_follow_the_activations():
    formats = {}
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        model = accelerate(build("qwen3_5", dtype=dtype))
        formats[dtype] = {c.pool.kv_format for c in model.make_cache() if hasattr(c, "pool")}
        assert adapter.default_kv_format(model) in formats[dtype]
        assert model(prompt(9), cache=model.make_cache()).dtype == dtype
    assert formats == {mx.float32: {"f32"}, mx.float16: {"f16"}, mx.bfloat16: {"bf16"}}
    quantised = build("qwen3_5", dtype=mx.bfloat16)
    nn.quantize(quantised, group_size=32, bits=4)
    assert adapter.default_kv_format(accelerate(quantised)) == "bf16"


@pytest.mark.parametrize("kv_format", ["bf16", "q8_0", "q8_0/bf16"])
def test_lossy_pages_stay_close(kv_format: str):
    model = accelerate(build("qwen3_5"))
    tokens = prompt(100)
    want = model(tokens)
    cache = chunkdelta.make_cache(model, max_tokens=100, kv_format=kv_format)
    got = mx.concatenate([model(tokens[:, i : i + 30], cache=cache) for i in range(0, 100, 30)], 1)
    error = mx.linalg.norm(got - want) / mx.linalg.norm(want)
    assert 1e-6 < error.item() < 1e-2


def test_a_copied_model_has_pools_of_its_own():
    model = accelerate(build("qwen3_5"))
    cache = model.make_cache()
    twin = copy.deepcopy(model)
    assert is_accelerated(twin)
    assert twin.make_cache()[3].pool is not cache[3].pool
    assert model.make_cache()[3].pool is cache[3].pool


def test_memory_shape_counts_what_the_caches_hold():
    from chunkdelta.loop.memory import state_bytes

    for name in ARCHITECTURES:
        model = accelerate(build(name))
        cache = model.make_cache()
        mx.eval(model(prompt(5), cache=cache))
        held = sum(c.nbytes for c in cache if isinstance(c, ArraysCache))
        assert state_bytes(model.memory_shape()) == held


def test_sharded_layers_run_on_their_heads():
    """A group of one: mlx-lm's own sharding first, then accelerate."""
    model = build("qwen3_5")
    tokens = prompt(40)
    want = model(tokens)
    model.shard(mx.distributed.init())
    got = accelerate(model)(tokens, cache=model.make_cache())
    assert mx.allclose(got, want, atol=1e-4)
    assert mx.allclose(model.head(model.body(tokens, model.make_cache())), want, atol=1e-4)


TRANSFORMATIONS = {
    "compile": lambda model, tokens: mx.compile(lambda t: model(t))(tokens),
    "grad": lambda model, tokens: nn.value_and_grad(model, lambda m, t: m(t).sum())(model, tokens),
    "vmap": lambda model, tokens: mx.vmap(lambda t: model(t[None]))(tokens),
}


@pytest.mark.parametrize("transform", TRANSFORMATIONS)
def test_transformations_are_refused(transform: str):
    model = accelerate(build("qwen3_5"))
    with pytest.raises(ValueError, match=r"outside mx.compile, mx.grad and mx.vmap"):
        TRANSFORMATIONS[transform](model, prompt(10))
    assert model(prompt(10)).shape == (1, 10, 128)
