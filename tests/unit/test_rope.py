import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.ops import naive
from hypothesis import given, settings
from hypothesis import strategies as st

EPS = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}


def rotate(x, positions, dtype=mx.float32, **options):
    """The op and its oracle on the same (rounded) input, as float64."""
    x = mx.array(x, dtype)
    out = chunkdelta.rope(x, mx.array(positions, mx.int32), **options)
    assert out.dtype == dtype
    rounded = np.array(x.astype(mx.float32), np.float64)
    return np.array(out.astype(mx.float32), np.float64), naive.rope(rounded, positions, **options)


CASES = [
    # leading shape, heads, head_dim, options
    pytest.param((0,), 2, 64, {}, id="empty"),
    pytest.param((1,), 1, 64, {}, id="one-token"),
    pytest.param((37,), 3, 256, {"dims": 64, "base": 1e7}, id="partial"),
    pytest.param((2, 17), 2, 128, {"traditional": True}, id="traditional"),
    pytest.param((2, 5), 2, 20, {"dims": 12, "scale": 0.25}, id="odd-width"),
    pytest.param((9,), 2, 80, {"dims": 6, "freqs": [1.0, 10.0, 1e6]}, id="freqs"),
    pytest.param((33,), 2, 256, {"dims": 64, "mrope_sections": [11, 11, 10]}, id="mrope"),
    pytest.param((2, 9), 1, 64, {"mrope_sections": [8, 12, 12]}, id="mrope-batch"),
    pytest.param(
        (9,), 1, 64, {"mrope_sections": [8, 12, 12], "mrope_interleaved": False}, id="mrope-qwen2"
    ),
]


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(("leading", "heads", "head_dim", "options"), CASES)
def test_rope_equals_naive(leading, heads, head_dim, options, dtype):
    rng = np.random.default_rng(0)
    axes = (3,) if "mrope_sections" in options else ()
    positions = rng.integers(0, 2**20, axes + leading)
    out, expected = rotate(
        rng.standard_normal((*leading, heads, head_dim)), positions, dtype, **options
    )
    # |a cos - b sin| <= |(a, b)|: one rounding of the output and a few of the fp32 arithmetic.
    assert np.all(np.abs(out - expected) <= EPS[dtype] * 2 * np.abs(expected) + 8e-7 * 5)


def test_rope_of_consecutive_positions_is_mx_fast_rope():
    x = mx.random.normal((2, 3, 65, 128))  # [B, H, T, D]
    stock = mx.fast.rope(x, 32, traditional=False, base=1e5, scale=1.0, offset=7)
    positions = mx.broadcast_to(mx.arange(7, 72, dtype=mx.int32), (2, 65))
    ours = chunkdelta.rope(x.swapaxes(1, 2), positions, dims=32, base=1e5).swapaxes(1, 2)
    assert mx.abs(ours - stock).max().item() < 1e-4


def test_rope_at_far_positions_is_no_worse_than_mx_fast_rope():
    x = np.random.default_rng(0).standard_normal((1, 64, 1, 128)).astype(np.float32)
    positions = np.arange(131_008, 131_072)[None]
    ours, exact = rotate(x, positions, base=1e6)
    stock = mx.fast.rope(
        mx.array(x).swapaxes(1, 2), 128, traditional=False, base=1e6, scale=1.0, offset=131_008
    ).swapaxes(1, 2)
    assert np.abs(ours - exact).max() <= np.abs(np.array(stock) - exact).max()


def test_rope_donates_and_leaves_shared_inputs_alone():
    x = mx.random.normal((4, 2, 64))
    before = np.array(x)
    chunkdelta.rope(x, mx.arange(4, dtype=mx.int32))
    y = chunkdelta.rope(x + 0, mx.arange(4, dtype=mx.int32))
    mx.eval(y)
    np.testing.assert_array_equal(np.array(x), before)
    np.testing.assert_allclose(np.array(y), naive.rope(before, np.arange(4)), atol=1e-5)


def test_rope_takes_strided_inputs():
    x = mx.random.normal((2, 6, 64)).swapaxes(0, 1)
    out = chunkdelta.rope(x, mx.arange(6, dtype=mx.int32))
    np.testing.assert_allclose(np.array(out), naive.rope(np.array(x), np.arange(6)), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    shift=st.integers(0, 2**20),
    tokens=st.integers(1, 40),
    pairs=st.integers(1, 32),
    seed=st.integers(0, 99),
)
def test_rope_depends_on_position_differences_only(shift, tokens, pairs, seed):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, tokens, 1, 64)).astype(np.float32)
    positions = rng.integers(0, 1000, tokens)

    def scores(offset):
        a, b = (
            np.array(
                chunkdelta.rope(
                    mx.array(x), mx.array(positions + offset, mx.int32), dims=2 * pairs
                ),
                np.float64,
            )[:, 0]
            for x in (q, k)
        )
        return a @ b.T

    np.testing.assert_allclose(scores(shift), scores(0), atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "positions", "options", "message"),
    [
        ((4, 64), (4,), {}, r"\[rope\] expected x \[T,H,D\] or \[B,T,H,D\]; got float32 \(4, 64\)"),
        (
            (4, 1, 64),
            (5,),
            {},
            r"\[rope\] expected positions \[\(B,\) T\] = \(4\); got int32 \(5\)",
        ),
        ((4, 1, 64), (4,), {"dims": 7}, r"\[rope\] expected an even dims in 2\.\.D = 64; got 7"),
        ((4, 1, 64), (4,), {"dims": 66}, r"\[rope\] expected an even dims in 2\.\.D = 64; got 66"),
        ((4, 1, 64), (4,), {"freqs": [1.0]}, r"\[rope\] expected freqs \[dims/2\] = \(32,\)"),
        ((4, 1, 64), (4,), {"mrope_sections": [32, 0, 0]}, r"\[rope\] expected positions \[3, "),
        ((4, 1, 64), (3, 4), {"mrope_sections": [8, 8, 8]}, r"add up to dims/2 = 32; got 8 8 8"),
    ],
)
def test_rope_refuses(shape, positions, options, message):
    with pytest.raises(ValueError, match=message):
        chunkdelta.rope(mx.zeros(shape), mx.zeros(positions, mx.int32), **options)


def test_rope_refuses_dtypes():
    with pytest.raises(ValueError, match=r"\[rope\] expected x in \{float32, float16, bfloat16\}"):
        chunkdelta.rope(mx.zeros((4, 1, 64), mx.int32), mx.zeros(4, mx.int32))
    with pytest.raises(ValueError, match=r"\[rope\] expected positions int32; got float32"):
        chunkdelta.rope(mx.zeros((4, 1, 64)), mx.zeros(4))
