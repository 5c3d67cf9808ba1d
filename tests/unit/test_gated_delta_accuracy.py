"""Where chunk forms lose digits: the bars of docs/concepts/gated-delta.md, at D = 128."""

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.testing.compare import assert_close_as, relative_error, to_float64
from chunkdelta.testing.gated_delta import recurrence, textbook_chunk_form

D = 128


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make(T, *, heads=1, beta=None, repeated=False, g=None, seed=0):
    """Random unit keys; or near-repeated ones, a hundredth apart."""
    rng = np.random.default_rng(seed)
    shape = (1, T, heads)
    q, k = unit(rng.standard_normal((2, *shape, D)))
    if repeated:
        k = unit(unit(rng.standard_normal((1, 1, heads, D))) + 0.01 * k)
    v = rng.standard_normal((*shape, D))
    betas = rng.uniform(0, 1, shape) if beta is None else np.full(shape, beta)
    gates = -0.01 * np.abs(rng.standard_normal(shape)) if g is None else g(rng, shape)
    return [a.astype(np.float32) for a in (q, k, v, gates, betas)]


def rare_large(rng, shape):
    return np.where(rng.uniform(size=shape) < 0.05, -30.0, -0.01)


def slow(rng, shape):
    return np.full(shape, -1e-5)


def run(arrays, **options):
    return chunkdelta.chunk_gated_delta_rule(*map(mx.array, arrays), **options)


@pytest.mark.parametrize(
    ("case", "bar"),
    [
        pytest.param({}, 1e-6, id="random-keys"),
        pytest.param({"g": slow}, 1e-6, id="random-keys-slow-decay"),
        pytest.param({"g": rare_large}, 1e-6, id="rare-g-of-minus-30"),
        pytest.param({"repeated": True, "beta": 0.999, "g": slow}, 3e-6, id="repeated"),
        pytest.param({"repeated": True, "beta": 1.0, "g": rare_large}, 3e-6, id="repeated-rare"),
        pytest.param({"repeated": True, "beta": 1.99, "g": slow}, 3e-5, id="repeated-beta-1.99"),
        pytest.param({"repeated": True, "beta": 2.0, "g": slow}, 6e-4, id="repeated-beta-2"),
    ],
)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_bars_and_textbook(case, bar, chunk_size):
    arrays = make(2048, **case)
    plain = textbook_chunk_form(*arrays, chunk_size=chunk_size)
    oracle = recurrence(*arrays)
    for actual, textbook, expected in zip(
        run(arrays, chunk_size=chunk_size), plain, oracle, strict=True
    ):
        assert relative_error(actual, expected) <= bar
        assert_close_as(actual, textbook, expected, ratio=1.5, floor=3e-7)


@pytest.mark.parametrize(
    ("case", "bar"),
    [
        pytest.param({"repeated": True, "beta": 0.999, "g": slow}, 8e-6, id="repeated"),
        pytest.param({"repeated": True, "beta": 2.0, "g": slow}, 6e-4, id="repeated-beta-2"),
    ],
)
def test_40000_rows_in_one_call(case, bar):
    arrays = make(40_000, **case)
    for actual, expected in zip(run(arrays), recurrence(*arrays), strict=True):
        assert relative_error(actual, expected) <= bar


@pytest.mark.parametrize("half_life", [1, 10, 100, 1000, 10_000, 100_000])
def test_bf16_activations_keep_slow_decays(half_life):
    """No worse than rounding inputs and output, though exp(g) rounded to bfloat16 would be 1."""
    arrays = make(1024, g=lambda rng, shape: np.full(shape, -np.log(2) / half_life))
    bf16 = [mx.array(a).astype(mx.bfloat16) for a in arrays[:3]] + list(map(mx.array, arrays[3:]))
    o, state = chunkdelta.chunk_gated_delta_rule(*bf16)
    expected, expected_state = recurrence(*map(to_float64, bf16))
    rounded = mx.array(expected.astype(np.float32)).astype(mx.bfloat16)
    assert relative_error(o, expected) <= 1.001 * relative_error(rounded, expected)
    assert relative_error(state, expected_state) <= 1e-6


def test_decode_agrees_with_prefill():
    T = 512
    arrays = make(T)
    o, state = run(arrays)
    token = [mx.array(a) for a in arrays]
    s, outputs = mx.zeros((1, 1, D, D)), []
    for t in range(T):
        y, s = chunkdelta.gated_delta_step(*(a[:, t] for a in token), initial_state=s)
        outputs.append(y)
    mx.eval(s, outputs)
    assert relative_error(mx.stack(outputs, axis=1), o) <= 1e-6 + T * 3e-8
    assert relative_error(s, state) <= 1e-6 + T * 3e-8
