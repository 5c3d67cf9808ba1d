"""Accelerated models against stock mlx-lm, same weights, for every way of cutting a prompt."""

from __future__ import annotations

import functools

import chunkdelta
import mlx.core as mx
import mlx.nn as nn
import pytest
from chunkdelta.models.mlx_lm import accelerate

from tests.integration.tiny_models import ARCHITECTURES, build, prompt, stock, stock_logits

LENGTH = 600
SHORT = 130  # for chunk sizes whose many calls would take long


@functools.cache
def accelerated(name: str) -> nn.Module:
    return accelerate(build(name))


def run(model: nn.Module, tokens: mx.array, chunk: int, cache=None) -> mx.array:
    """Logits of all tokens, ``chunk`` at a time, one evaluation each."""
    if cache is None:
        cache = chunkdelta.make_cache(model, max_tokens=tokens.size + 64 * tokens.shape[0])
    out = []
    for start in range(0, tokens.shape[1], chunk):
        out.append(model(tokens[:, start : start + chunk], cache=cache))
        mx.eval(out[-1], [c.state for c in cache])
    return mx.concatenate(out, axis=1)


def relative(got: mx.array, want: mx.array) -> float:
    """Largest error of a token's logits relative to their norm."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    error = mx.linalg.norm(got - want, axis=-1) / mx.linalg.norm(want, axis=-1)
    return float(error.max().item())


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512, 513, LENGTH])
def test_logits_equal_stock(name: str, chunk: int):
    length = SHORT if chunk < 64 else LENGTH
    got = run(accelerated(name), prompt(LENGTH)[:, :length], chunk)
    assert relative(got, stock_logits(name, LENGTH)[:, :length]) <= 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_without_a_cache(name: str):
    got = accelerated(name)(prompt(LENGTH))
    assert relative(got, stock_logits(name, LENGTH)) <= 1e-5
    batch = prompt(20, seed=6, batch=3)
    assert relative(accelerated(name)(batch), stock(name)(batch)) <= 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decode_after_prefill(name: str):
    """Greedy decoding by both from the same prompt: the same tokens, the same logits."""
    ours, theirs = accelerated(name), stock(name)
    tokens = prompt(LENGTH)[:, :SHORT]
    cache, stock_cache = ours.make_cache(), theirs.make_cache()
    got, want = ours(tokens, cache=cache)[:, -1:], theirs(tokens, cache=stock_cache)[:, -1:]
    for _ in range(12):
        assert relative(got, want) <= 1e-5
        token = mx.argmax(want, axis=-1)
        got, want = ours(token, cache=cache), theirs(token, cache=stock_cache)


# MLX's CPU backend has no bf16 gather_mm: Qwen3-Next runs with dense MLPs, the MoE text model not.
BF16 = {"qwen3_5": {}, "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]}, "olmo_hybrid": {}}


@pytest.mark.parametrize("name", BF16)
def test_bf16_is_no_further_from_exact_than_stock(name: str):
    """Both in bf16, against float32 arithmetic on the same bf16 weights."""
    exact = build(name, dtype=mx.bfloat16, **BF16[name])
    exact.set_dtype(mx.float32)
    tokens = prompt(LENGTH)
    want = exact(tokens, cache=exact.make_cache())
    model = build(name, dtype=mx.bfloat16, **BF16[name])
    stock_error = _rms(model(tokens, cache=model.make_cache()), want)
    accelerate(model)
    for chunk in (64, LENGTH):
        logits = run(model, tokens, chunk)
        assert logits.dtype == mx.bfloat16
        assert _rms(logits, want) <= stock_error


def _rms(got: mx.array, want: mx.array) -> float:
    got = got.astype(mx.float32)
    return float((mx.linalg.norm(got - want) / mx.linalg.norm(want)).item())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batch_of_equal_lengths(name: str):
    tokens = prompt(96, seed=5, batch=3)
    model = accelerated(name)
    got = run(model, tokens, 40)
    for b in range(3):
        want = stock(name)(tokens[b : b + 1])
        assert relative(got[b : b + 1], want) <= 1e-5


PADDINGS = [
    pytest.param([70, 33, 1], id="one-short"),
    pytest.param([64, 64, 64], id="equal"),
    pytest.param([5, 129], id="long-tail"),
    pytest.param([97], id="batch-of-one"),
]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("lengths", PADDINGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(name: str, lengths: list[int], side: str):
    """Each row of a padded batch, and its decoding, equals the row alone in stock mlx-lm."""
    longest = max(lengths)
    rows = [prompt(n, seed=10 + n)[0].tolist() for n in lengths]
    pads = [[3] * (longest - n) for n in lengths]
    tokens = mx.array([p + r if side == "left" else r + p for r, p in zip(rows, pads, strict=True)])
    model = accelerated(name)
    cache = [c.merge([c] * len(rows)) for c in model.make_cache()]
    for c in cache:
        if side == "left":
            c.prepare(left_padding=[len(p) for p in pads])
        else:
            c.prepare(lengths=lengths, right_padding=[len(p) for p in pads])
    got = run(model, tokens, 48, cache)
    for c in cache:
        c.finalize()
    assert not mx.isnan(got).any()
    step = mx.array([[r[-1]] for r in rows])
    after = model(step, cache=cache)
    for b, row in enumerate(rows):
        alone = stock(name)(mx.array([[*row, row[-1]]]))
        first = longest - len(row) if side == "left" else 0
        assert relative(got[b, first : first + len(row)], alone[0, :-1]) <= 1e-5
        assert relative(after[b], alone[0, -1:]) <= 1e-5


def test_quantised_weights():
    """4-bit weights: the same quantised model, stock and accelerated."""
    model = build("qwen3_5", hidden_size=64)
    nn.quantize(model, group_size=32, bits=4)
    want = model(prompt(SHORT))
    assert relative(run(accelerate(model), prompt(SHORT), 64), want) <= 1e-5


def test_embeddings_instead_of_tokens():
    """The body takes the tokens' embeddings too, also where mlx-lm's class takes only tokens."""
    for name in ARCHITECTURES:
        model = accelerated(name)
        tokens = prompt(40)
        embeddings = model.model.embed_tokens(tokens)
        hidden = model.body(embeddings, model.make_cache())
        want = model.body(tokens, model.make_cache())
        assert mx.array_equal(hidden, want)
        assert relative(model.head(hidden), stock(name)(tokens)) <= 1e-5


def test_what_padding_holds_reaches_nothing():
    """NaN embeddings in padding, on both sides at once, with chunks that are padding alone."""
    for name in ARCHITECTURES:
        model = accelerated(name)
        rows = [prompt(n, seed=30 + n) for n in (5, 9)]
        left, columns = [6, 4], 15
        x = mx.full((2, columns, 64), mx.nan)
        for b, row in enumerate(rows):
            x[b, left[b] : left[b] + row.size] = model.model.embed_tokens(row)[0]
        cache = [c.merge([c, c]) for c in model.make_cache()]
        for c in cache:
            c.prepare(
                left_padding=left,
                lengths=[a + r.size for a, r in zip(left, rows, strict=True)],
                right_padding=[4, 2],
            )
        parts = []
        for start in range(0, columns, 4):  # columns 0..3 hold no token at all
            parts.append(model.body(x[:, start : start + 4], cache))
            mx.eval(parts[-1], [c.state for c in cache])
        for c in cache:
            c.finalize()
        hidden = mx.concatenate(parts, axis=1)
        for b, row in enumerate(rows):
            got = model.head(hidden[b : b + 1, left[b] : left[b] + row.size])
            assert relative(got, stock(name)(row)) <= 1e-5
        after = model(mx.array([[1], [2]]), cache=cache)
        for b, row in enumerate(rows):
            whole = mx.concatenate([row, mx.array([[b + 1]])], axis=1)
            assert relative(after[b], stock(name)(whole)[0, -1:]) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid"])
def test_float16(name: str):
    exact = build(name, dtype=mx.float16)
    exact.set_dtype(mx.float32)
    tokens = prompt(200)
    want = exact(tokens)
    model = build(name, dtype=mx.float16)
    stock_error = _rms(model(tokens), want)
    logits = run(accelerate(model), tokens, 64)
    assert logits.dtype == mx.float16
    assert _rms(logits, want) <= stock_error


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_embeddings(rope: dict):
    """The model's own rotary module runs, on plain prompts and on packed ones."""
    config = {
        "rope_parameters": rope | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 512,
    }
    rows = [prompt(n, seed=60 + n) for n in (200, 31)]
    plain = build("qwen3_5", **config)
    want = [plain(row) for row in rows]
    model = accelerate(plain)
    assert relative(run(model, rows[0], 70), want[0]) <= 1e-5
    cache = [c.merge([c, c]) for c in model.make_cache()]
    for c in cache:
        c.prepare(lengths=[200, 31], right_padding=[0, 169])
    both = mx.concatenate([rows[0], mx.pad(rows[1], [(0, 0), (0, 169)])])
    got = run(model, both, 70, cache)
    assert relative(got[:1], want[0]) <= 1e-5
    assert relative(got[1:, :31], want[1]) <= 1e-5
