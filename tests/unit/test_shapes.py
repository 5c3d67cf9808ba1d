"""Shapes from configurations, names and directories."""

import json

import mlx.core as mx
import pytest
from chunkdelta.loop.shapes import AttentionShape, GatedDeltaShape, LayerShape, MlpShape
from chunkdelta.models import embedded
from chunkdelta.models.shapes import (
    NAMED_CONFIGS,
    named_shape,
    parameter_count,
    shape_from_config,
    shape_from_directory,
)
from mlx.utils import tree_flatten

TINY = embedded.CONFIG | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3.5-9b", 9.0),
        ("qwen3.5-27b", 26.9),
        ("qwen3.5-35b-a3b", 34.7),
        ("qwen3-next-80b", 79.7),
    ],
)
def test_parameter_counts_are_those_of_the_names(name, billions):
    assert parameter_count(NAMED_CONFIGS[name]) / 1e9 == pytest.approx(billions, abs=0.06)


def test_parameter_count_is_that_of_the_model_but_for_norms():
    model = embedded.build(**TINY)
    weights = dict(tree_flatten(model.parameters()))
    matrices = sum(w.size for w in weights.values() if w.ndim > 1)
    assert parameter_count(TINY) == matrices


def test_named_shapes():
    shape = named_shape("9B")
    assert shape == named_shape("qwen3.5-9b")
    assert len(shape.layers) == 32
    assert shape.attention_layers == [AttentionShape(16, 4, 256)] * 8
    assert shape.gated_delta_layers == [GatedDeltaShape(16, 32, 128, 128)] * 24
    assert shape.layers[3].mixer == AttentionShape(16, 4, 256)
    # 4 bits and a 16-bit scale and bias for 64 weights: 4.5 bits a weight.
    assert shape.weight_bytes == round(parameter_count(NAMED_CONFIGS["qwen3.5-9b"]) * 4.5 / 8)
    assert named_shape("9b", bits=16).weight_bytes == 2 * parameter_count(
        NAMED_CONFIGS["qwen3.5-9b"]
    )
    with pytest.raises(ValueError, match=r"qwen3\.5-9b, .*; got 'gpt'"):
        named_shape("gpt")


def test_mixture_of_experts():
    shape = named_shape("35b-a3b")
    assert {layer.mlp for layer in shape.layers} == {MlpShape(512, 256, 8, 512)}


def test_layers_follow_layer_types_and_text_config():
    types = ["full_attention", "linear_attention", "full_attention"]
    config = {
        "model_type": "qwen3_5",
        "dtype": "float32",
        "text_config": TINY | {"layer_types": types, "num_hidden_layers": 3},
    }
    shape = shape_from_config(config, weight_bytes=7)
    kinds = [isinstance(layer.mixer, AttentionShape) for layer in shape.layers]
    assert kinds == [True, False, True]
    assert (shape.dtype_bytes, shape.weight_bytes) == (4, 7)
    assert shape.layers[0] == LayerShape(AttentionShape(2, 1, 256), MlpShape(96))


def test_olmo_hybrid_has_no_output_gate_in_attention():
    config = TINY | {"model_type": "olmo_hybrid", "head_dim": None, "num_key_value_heads": None}
    shape = shape_from_config(config, weight_bytes=0)
    assert shape.attention_layers[0] == AttentionShape(2, 2, 32, gated=False)


def test_unsupported_architectures_are_named():
    with pytest.raises(ValueError, match=r"qwen3_5.*; got 'kimi_linear'"):
        shape_from_config({"model_type": "kimi_linear"}, weight_bytes=0)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    weights = {
        "model.embed_tokens.weight": mx.zeros((512, 64), mx.bfloat16),
        "model.visual.patch.weight": mx.zeros((100, 100)),
        "mtp.fc.weight": mx.zeros((100, 100)),
    }
    mx.save_safetensors(str(tmp_path / "model-00001-of-00002.safetensors"), weights)
    mx.save_safetensors(
        str(tmp_path / "model-00002-of-00002.safetensors"), {"model.norm.weight": mx.zeros((64,))}
    )
    return tmp_path


def test_directory(directory):
    shape = shape_from_directory(directory)
    assert shape.weight_bytes == 512 * 64 * 2 + 64 * 4  # vision and multi-token weights left out
    assert shape.name == directory.name
    assert shape.vocab == 512


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda d: (d / "config.json").unlink(), "readable config.json", id="no-config"
        ),
        pytest.param(
            lambda d: (d / "config.json").write_text("{"),
            "readable config.json",
            id="half-a-config",
        ),
        pytest.param(
            lambda d: (d / "config.json").write_text('{"model_type": "qwen3_5"}'),
            "expected 'num_attention_heads' in",
            id="empty-config",
        ),
        pytest.param(
            lambda d: [f.unlink() for f in d.glob("*.safetensors")],
            r"expected model\*.safetensors in",
            id="no-weights",
        ),
        pytest.param(
            lambda d: (d / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 100),
            "expected a safetensors file",
            id="torn-weights",
        ),
        pytest.param(
            lambda d: (d / "model-00002-of-00002.safetensors").write_bytes(b""),
            "expected a safetensors file",
            id="empty-weights",
        ),
    ],
)
def test_unreadable_directories_are_refused_in_a_sentence(directory, spoil, message):
    spoil(directory)
    with pytest.raises(ValueError, match=message) as refusal:
        shape_from_directory(directory)
    assert "\n" not in str(refusal.value)


def test_the_embedded_model_is_the_same_each_time_and_whatever_was_drawn_before():
    first = dict(tree_flatten(embedded.build(**TINY).parameters()))
    mx.random.seed(1234)
    again = dict(tree_flatten(embedded.build(**TINY).parameters()))
    other = dict(tree_flatten(embedded.build(**TINY, seed=1).parameters()))
    assert first.keys() == again.keys()
    assert all(mx.array_equal(first[k], again[k]).item() for k in first)
    assert not mx.array_equal(
        first["language_model.model.embed_tokens.weight"],
        other["language_model.model.embed_tokens.weight"],
    ).item()


def test_the_embedded_model_keeps_the_hard_shapes():
    shape = shape_from_config(embedded.CONFIG, weight_bytes=0)
    assert (shape.hidden, shape.vocab) == (128, 248320)
    assert set(shape.attention_layers) == {AttentionShape(2, 1, 256)}
    assert set(shape.gated_delta_layers) == {GatedDeltaShape(1, 2, 128, 128)}
    assert len(shape.gated_delta_layers) == 3 * len(shape.attention_layers)
