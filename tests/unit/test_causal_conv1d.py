import itertools
import os
import subprocess
import sys
import tempfile

import chunkdelta
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from chunkdelta.ops import naive

EPS = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # of one rounding


def f64(a):
    return np.array(a.astype(mx.float32), np.float64)


def make(B, T, C, K, dtype, *, N=None, bias=False, state=False, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {"x": (B, T, C), "weight": (C, K)}
    if bias:
        arrays["bias"] = (C,)
    if state:
        arrays["initial_state"] = (N or B, K - 1, C)
    return {
        name: mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
        for name, shape in arrays.items()
    }


def oracle(arrays, **options):
    return naive.causal_conv1d(**{name: f64(a) for name, a in arrays.items()}, **options)


def check(arrays, **options):
    """The op against float64, within one rounding of the output and K fp32 roundings of the sum."""
    dtype = arrays["x"].dtype
    y, state = chunkdelta.causal_conv1d(**arrays, **options)
    expected, expected_state = oracle(arrays, **options)
    magnitudes, _ = oracle(
        {name: mx.abs(a) for name, a in arrays.items()},
        **{**options, "activation": None},
    )
    assert y.dtype == dtype
    assert state.dtype == dtype
    K = arrays["weight"].shape[1]
    bound = EPS[dtype] * np.abs(expected) + (K + 8) * EPS[mx.float32] * magnitudes
    assert np.all(np.abs(f64(y) - expected) <= bound + 2.0**-25)  # float16 subnormals
    assert np.array_equal(f64(state), expected_state)  # rows are copied, never rounded
    return y, state


CASES = [
    # B, T, C, K, options
    pytest.param(1, 0, 5, 4, {"state": True}, id="empty"),
    pytest.param(1, 0, 5, 4, {}, id="empty-no-state"),
    pytest.param(1, 1, 32, 4, {"state": True}, id="decode"),
    pytest.param(3, 2, 17, 4, {"state": True}, id="shorter-than-taps"),
    pytest.param(2, 63, 33, 4, {"bias": True}, id="bias"),
    pytest.param(1, 64, 16, 2, {}, id="two-taps"),
    pytest.param(2, 65, 7, 3, {"state": True, "bias": True}, id="three-taps"),
    pytest.param(1, 129, 48, 5, {"state": True}, id="five-taps"),
    pytest.param(1, 70, 20, 6, {}, id="six-taps"),
    pytest.param(1, 9, 20, 7, {"state": True}, id="seven-taps"),
    pytest.param(1, 67, 31, 8, {"bias": True}, id="eight-taps"),
    pytest.param(1, 130, 2049, 4, {"state": True}, id="channel-ranges"),
    pytest.param(2, 5, 1, 4, {}, id="one-channel"),
]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(("B", "T", "C", "K", "options"), CASES)
def test_equals_naive(B, T, C, K, options, dtype, activation):
    check(make(B, T, C, K, dtype, **options), activation=activation)


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_packed_sequences(dtype):
    offsets = [0, 0, 1, 3, 3, 75, 203, 204, 204]
    arrays = make(1, 204, 19, 4, dtype, N=8, state=True, bias=True)
    y, state = check(arrays, cu_seqlens=offsets, activation="silu")
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        alone, carried = chunkdelta.causal_conv1d(
            arrays["x"][:, begin:end],
            arrays["weight"],
            arrays["bias"],
            initial_state=arrays["initial_state"][n : n + 1],
            activation="silu",
        )
        assert mx.array_equal(y[:, begin:end], alone)
        assert mx.array_equal(state[n], carried[0])


@pytest.mark.parametrize("as_array", [list, np.array, lambda v: np.array(v, np.int64), mx.array])
def test_cu_seqlens_of_every_kind(as_array):
    arrays = make(1, 9, 4, 4, mx.float32)
    check(arrays, cu_seqlens=[0, 4, 9])
    y, _ = chunkdelta.causal_conv1d(**arrays, cu_seqlens=as_array([0, 4, 9]))
    assert np.allclose(f64(y), oracle(arrays, cu_seqlens=[0, 4, 9])[0], atol=1e-5)


MASKS = {
    "right": lambda T, n: np.arange(T) < n,
    "left": lambda T, n: np.arange(T) >= T - n,
    "holes": lambda T, n: np.random.default_rng(n).random(T) < n / T,
    "none": lambda T, n: np.zeros(T, bool),
}


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("kind", MASKS)
def test_masked_rows_do_not_exist(kind, state, dtype):
    T, C = 150, 24
    mask = np.stack([MASKS[kind](T, n) for n in (0, 1, 2, 77, T)])
    arrays = make(5, T, C, 4, dtype, state=state)
    expected, expected_state = check(arrays, mask=mx.array(mask), activation="silu")
    poisoned = mx.where(mx.array(mask)[..., None], arrays["x"], mx.array(np.nan, dtype))
    y, carried = chunkdelta.causal_conv1d(
        **{**arrays, "x": poisoned}, mask=mx.array(mask), activation="silu"
    )
    assert mx.array_equal(y, expected)
    assert mx.array_equal(carried, expected_state)
    assert not np.any(f64(y)[~mask])


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_is_the_convolution_of_mlx_lm(dtype, padding):
    """qwen3_5.GatedDeltaNet's conv with its cache, two chunks long, padded batches included."""
    B, T, C, K = 3, 40, 24, 4
    arrays = make(B, T, C, K, dtype)
    conv = nn.Conv1d(C, C, K, groups=C, bias=False)
    conv.weight = arrays["weight"][..., None]
    lengths = mx.array([T, 23, 3])
    cache, ours, plain_state = mx.zeros((B, K - 1, C), dtype), None, None
    for begin, end in [(0, 25), (25, T)]:
        x = arrays["x"][:, begin:end]
        S, positions = end - begin, mx.arange(begin, end)
        mask, ends = None, mx.full((B,), S)
        if padding == "right":
            mask = positions < lengths[:, None]
            ends = mx.clip(lengths - begin, 0, S)
        elif padding == "left":
            mask = positions >= T - lengths[:, None]
        rows = x if mask is None else mx.where(mask[..., None], x, 0)
        joined = mx.concatenate([cache, rows], axis=1)
        plain = nn.silu(conv(joined))
        take = (ends[:, None] + mx.arange(K - 1))[..., None]
        cache = mx.take_along_axis(joined, take, axis=1)
        y, ours = chunkdelta.causal_conv1d(
            x, arrays["weight"], initial_state=ours, mask=mask, activation="silu"
        )
        plain_state = cache
        valid = np.ones((B, S), bool) if mask is None else np.array(mask)
        exact, _ = oracle(
            {"x": joined, "weight": arrays["weight"]},
            activation="silu",
        )
        exact = exact[:, K - 1 :]
        error = np.abs(f64(y) - exact)[valid].max()
        assert error <= np.abs(f64(plain) - exact)[valid].max() + EPS[mx.float32]
    assert mx.array_equal(ours, plain_state)


def test_rows_may_be_strided():
    arrays = make(2, 8, 12, 4, mx.float32)
    x = arrays["x"].swapaxes(0, 1)[::2].swapaxes(0, 1)  # [2, 4, 12], not contiguous
    y, _ = chunkdelta.causal_conv1d(x, arrays["weight"].T.reshape(4, 12).T)
    assert np.allclose(f64(y), oracle({**arrays, "x": x})[0], atol=1e-5)


def test_large_sums_saturate_silu():
    x = mx.array([[[-1e4], [1e4], [0.0]]])
    y, _ = chunkdelta.causal_conv1d(x, mx.array([[0.0, 1.0]]), activation="silu")
    assert np.allclose(f64(y).ravel(), [0.0, 1e4, 0.0], atol=1e-30)


def test_compiles():
    arrays = make(2, 9, 8, 4, mx.float32, state=True)

    def run(x, weight, state):
        y, state = chunkdelta.causal_conv1d(x, weight, initial_state=state, activation="silu")
        return y * 2, state

    args = (arrays["x"], arrays["weight"], arrays["initial_state"])
    for ours, expected in zip(mx.compile(run)(*args), run(*args), strict=True):
        assert mx.array_equal(ours, expected)


@pytest.mark.parametrize(
    "setting",
    [
        {"CHUNKDELTA_NUM_THREADS": "3"},
        {"CHUNKDELTA_ISA": "baseline"},
        {"CHUNKDELTA_ISA": "avx2"},
    ],
    ids=lambda s: next(iter(s.values())),
)
def test_other_threads_and_instruction_sets(setting):
    """Bit for bit the same for any thread count; within the same bound on any instruction set."""
    isa = setting.get("CHUNKDELTA_ISA")
    if isa is not None and isa not in chunkdelta._ext.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import mlx.core as mx, chunkdelta, test_causal_conv1d as t\n"
        "for d in t.EPS:\n"
        "  a = t.make(2, 150, 1100, 4, d, state=True, bias=True)\n"
        "  y, s = t.check(a, activation='silu')\n"
        "  mx.save(sys.argv[2] + str(d).split('.')[-1] + '.npy', y.astype(mx.float32))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", code, os.path.dirname(__file__), folder + "/"],
            env={**os.environ, **setting},
            check=True,
            timeout=120,
        )
        for dtype in EPS:
            arrays = make(2, 150, 1100, 4, dtype, state=True, bias=True)
            y, _ = chunkdelta.causal_conv1d(**arrays, activation="silu")
            other = mx.load(f"{folder}/{str(dtype).split('.')[-1]}.npy")
            if isa is None:
                assert mx.array_equal(y.astype(mx.float32), other)
            else:
                assert np.allclose(f64(y), f64(other), rtol=2 * EPS[dtype], atol=1e-5)


def wrong(**changes):
    arrays = {"x": mx.zeros((2, 5, 8)), "weight": mx.zeros((8, 4))}
    return {**arrays, **changes}


REFUSED = [
    (wrong(x=mx.zeros((5, 8))), r"x \[B, T, C\].*; got float32 \(5, 8\)"),
    (wrong(x=mx.zeros((2, 5, 8), mx.int32)), r"x in \{float32, float16, bfloat16\}; got int32"),
    (wrong(weight=mx.zeros((8, 9))), r"K in 2..8; got float32 \(8, 9\)"),
    (wrong(weight=mx.zeros((8, 1))), r"K in 2..8; got float32 \(8, 1\)"),
    (wrong(weight=mx.zeros((7, 4))), r"C = 8 .*; got float32 \(7, 4\)"),
    (wrong(weight=mx.zeros((8, 4), mx.float16)), r"weight of x's dtype float32; got float16"),
    (wrong(bias=mx.zeros((7,))), r"bias \[C\] = \(8\); got float32 \(7\)"),
    (wrong(initial_state=mx.zeros((2, 4, 8))), r"initial_state \[N, K-1, C\] = \(2, 3, 8\); got"),
    (wrong(initial_state=mx.zeros((2, 3, 8), mx.float16)), r"initial_state of x's dtype"),
    (wrong(mask=mx.zeros((2, 4), mx.bool_)), r"mask \[B, T\] = \(2, 5\); got bool \(2, 4\)"),
    (wrong(mask=mx.zeros((2, 5))), r"mask of dtype bool; got float32"),
    (wrong(cu_seqlens=[0, 5]), r"x \[1, T, C\] beside cu_seqlens; got float32 \(2, 5, 8\)"),
    (wrong(x=mx.zeros((1, 5, 8)), cu_seqlens=[0, 3, 2, 5]), r"ascending.*got \[0, 3, 2, 5\]"),
    (wrong(x=mx.zeros((1, 5, 8)), cu_seqlens=[0, 4]), r"ending at 5 rows; got \[0, 4\]"),
    (wrong(x=mx.zeros((1, 5, 8)), cu_seqlens=[1, 5]), r"from 0.*got \[1, 5\]"),
    (wrong(x=mx.zeros((1, 5, 8)), cu_seqlens=[0]), r"N >= 1.*got \[0\]"),
    (wrong(x=mx.zeros((1, 5, 8)), cu_seqlens=[]), r"N >= 1.*got \[\]"),
    (wrong(x=mx.zeros((1, 5, 8)), cu_seqlens=[0.0, 5.0]), r"integer dtype; got float64"),
    (wrong(x=mx.zeros((1, 5, 8)), cu_seqlens=[0, 2**40]), r"within int32; got values from 0 to"),
    (
        wrong(x=mx.zeros((1, 5, 8)), cu_seqlens=[0, 5], mask=mx.zeros((1, 5), mx.bool_)),
        r"mask .* or cu_seqlens .*; got both",
    ),
    (wrong(activation="relu"), r"activation in \{None, 'silu'\}; got 'relu'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=r"\[causal_conv1d\] expected .*" + message):
        chunkdelta.causal_conv1d(**arguments)


def test_traced_cu_seqlens_are_refused():
    x, weight = mx.zeros((1, 5, 8)), mx.zeros((8, 4))
    with pytest.raises(ValueError, match="cu_seqlens as host data"):
        mx.compile(lambda c: chunkdelta.causal_conv1d(x, weight, cu_seqlens=c))(mx.array([0, 5]))
