"""merge_states against the float64 oracle, and attention split over keys against the whole."""

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.ops import naive
from chunkdelta.testing.attention import PagedBatch


def f64(a):
    return np.array(a.astype(mx.float32), np.float64)


def relative(a, b):
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 7, 3, 64), (5, 300, 2, 80)], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_against_the_oracle(shape, dtype):
    rng = np.random.default_rng(0)
    outs = mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)
    lses = mx.array(rng.standard_normal(shape[:3], np.float32) * 20)
    o, lse = chunkdelta.merge_states(outs, lses)
    expected, expected_lse = naive.merge_states(f64(outs), f64(lses))
    plain = (outs * mx.softmax(lses, axis=0)[..., None].astype(dtype)).sum(axis=0)
    assert o.dtype == dtype
    assert relative(f64(o), expected) <= 2 * relative(f64(plain), expected) + 1e-7
    assert np.abs(f64(lse) - expected_lse).max() <= 2e-6 * np.abs(expected_lse).max()


def test_a_state_without_keys_is_not_read():
    outs = mx.array(np.array([[np.nan, 1, np.nan], [2, 3, np.nan]], np.float32))[..., None, None]
    outs = mx.broadcast_to(outs, (2, 3, 1, 20))
    lses = mx.array(np.array([[-np.inf, 0, -np.inf], [5, 0, -np.inf]], np.float32))[..., None]
    o, lse = chunkdelta.merge_states(outs, lses)
    assert o[:, 0, 3].tolist() == [2.0, 2.0, 0.0]
    assert lse[:, 0].tolist() == pytest.approx([5.0, np.log(2), -np.inf])


def test_a_nan_lse_is_not_hidden():
    outs, lses = mx.ones((3, 1, 1, 4)), mx.array([0.0, float("nan"), 1.0])[:, None, None]
    o, lse = chunkdelta.merge_states(outs, lses)
    assert np.isnan(np.array(o)).all()
    assert np.isnan(lse.item())


@pytest.mark.parametrize("cut", [16, 160, 304])
def test_attention_split_over_keys_is_the_whole(cut):
    batch = PagedBatch(q_lens=[9], seq_lens=[320])
    sinks = mx.linspace(-1, 2, 4)
    table = batch.block_table
    parts = [
        chunkdelta.paged_attention(
            batch.q,
            batch.pages,
            block_table=part,
            seq_lens=[part.shape[1] * 16],
            cu_seqlens_q=[0, 9],
            causal=False,
            return_lse=True,
            sinks=part_sinks,
        )
        for part, part_sinks in ((table[:, : cut // 16], sinks), (table[:, cut // 16 :], None))
    ]
    outs, lses = zip(*parts, strict=True)
    o, lse = chunkdelta.merge_states(mx.stack(outs), mx.stack(lses))
    expected, expected_lse = batch.naive(causal=False, sinks=np.array(sinks))
    plain = relative(batch.plain(causal=False, sinks=sinks), expected)
    assert relative(f64(o), expected) <= 2 * plain
    assert np.abs(f64(lse) - expected_lse).max() < 2e-6 * np.abs(expected_lse).max()


def test_inside_compile():
    outs, lses = mx.random.normal((2, 5, 3, 16)), mx.random.normal((2, 5, 3))
    expected = chunkdelta.merge_states(outs, lses)[0]
    for shapeless in (False, True):
        merged = mx.compile(chunkdelta.merge_states, shapeless=shapeless)(outs, lses)[0]
        assert mx.array_equal(merged, expected)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        (mx.zeros((3, 1, 4)), mx.zeros((3, 1)), r"outs \[S, T, Hq, D\]; got float32 \(3, 1, 4\)"),
        (mx.zeros((0, 2, 1, 4)), mx.zeros((0, 2, 1)), r"outs \[S, T, Hq, D\]"),
        (mx.zeros((2, 3, 1, 4)), mx.zeros((2, 3)), r"lses \[S, T, Hq\] = \(2, 3, 1\)"),
        (mx.zeros((2, 3, 1, 4)), mx.zeros((2, 3, 1), mx.float16), "lses float32; got float16"),
        (mx.zeros((2, 3, 1, 4), mx.int32), mx.zeros((2, 3, 1)), "outs in {float32, float16"),
    ],
)
def test_refusals(outs, lses, message):
    with pytest.raises(ValueError, match=r"\[merge_states\] expected " + message):
        chunkdelta.merge_states(outs, lses)
