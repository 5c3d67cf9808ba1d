"""The Metal kernel of causal_conv1d through its launch plan: equal to the float64 oracle and to the
CPU op, and silent in check mode."""

import itertools
from pathlib import Path

import chunkdelta
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta import _ext
from chunkdelta.ops import naive

from tests.metal_host import METAL_ROOT, Options, execute_plan, typecheck

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EPS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of one rounding


def to_mlx(a):
    return mx.array(np.asarray(a, np.float32)).astype(getattr(mx, a.dtype.name))


def make(T, C, K, dtype, *, N=1, bias=False, state=False, mask=None, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {"x": (1, T, C), "weight": (C, K)}
    if bias:
        arrays["bias"] = (C,)
    if state:
        arrays["initial_state"] = (N, K - 1, C)
    arrays = {
        name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in arrays.items()
    }
    if mask is not None:
        arrays["mask"] = (rng.random((1, T)) < mask).reshape(1, T)
    return arrays


def run(arrays, dtype, cu_seqlens, *, silu=True, mode="check", **options):
    _, T, C = arrays["x"].shape
    K = arrays["weight"].shape[1]
    plan = _ext.plans.causal_conv1d(
        dtype,
        C,
        K,
        cu_seqlens,
        bias="bias" in arrays,
        initial_state="initial_state" in arrays,
        mask="mask" in arrays,
        silu=silu,
    )
    outputs = {
        "y": np.empty((1, T, C), DTYPES[dtype]),
        "state": np.empty((len(cu_seqlens) - 1, K - 1, C), DTYPES[dtype]),
    }
    result = execute_plan(
        plan, {**arrays, **outputs}, outputs=list(outputs), mode=mode, options=Options(**options)
    )
    return result.arrays["y"], result.arrays["state"], plan


def check(arrays, dtype, cu_seqlens, y, state, silu):
    def oracle(arrays, activation):
        # The oracle's mask is of a padded batch; here it is one of packed rows.
        y, carried = [], []
        for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens)):
            part = {k: v[:, a:b] if k in ("x", "mask") else v for k, v in arrays.items()}
            if "initial_state" in part:
                part["initial_state"] = part["initial_state"][n : n + 1]
            out, end = naive.causal_conv1d(**part, activation=activation)
            y.append(out)
            carried.append(end)
        return np.concatenate(y, axis=1), np.concatenate(carried)

    expected, expected_state = oracle(arrays, "silu" if silu else None)
    magnitudes, _ = oracle({k: abs(v) for k, v in arrays.items()}, None)
    K = arrays["weight"].shape[1]
    bound = EPS[dtype] * abs(expected) + (K + 8) * EPS["float32"] * magnitudes + 2.0**-25
    assert np.all(abs(y.astype(np.float64) - expected) <= bound)
    assert np.array_equal(state.astype(np.float64), expected_state)


CASES = [
    # cu_seqlens, C, K, options
    pytest.param([0, 1], 8, 4, {"state": True}, id="decode"),
    pytest.param([0, 0], 8, 4, {"state": True}, id="empty"),
    pytest.param([0, 0], 8, 4, {}, id="empty-no-state"),
    pytest.param([0, 16], 36, 4, {"bias": True}, id="one-block"),
    pytest.param([0, 17], 5, 4, {"state": True, "bias": True}, id="scalar-channels"),
    pytest.param([0, 0, 1, 3, 3, 40, 57], 12, 4, {"state": True, "N": 6}, id="ragged"),
    pytest.param([0, 33], 4, 2, {}, id="two-taps"),
    pytest.param([0, 2, 35], 7, 3, {"N": 2, "state": True}, id="three-taps"),
    pytest.param([0, 5, 30], 8, 8, {"N": 2, "state": True}, id="eight-taps"),
    pytest.param([0, 40], 8, 4, {"mask": 0.5, "state": True}, id="mask"),
    pytest.param([0, 40], 8, 5, {"mask": 0.1}, id="sparse-mask"),
    pytest.param([0, 7, 7, 60], 8, 4, {"mask": 0.0, "N": 3, "state": True}, id="all-masked"),
    pytest.param([0, 3], 516, 4, {}, id="two-threadgroups"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cu_seqlens", "C", "K", "options"), CASES)
def test_equals_naive_and_the_cpu_op(cu_seqlens, C, K, options, dtype):
    arrays = make(cu_seqlens[-1], C, K, dtype, **options)
    silu = K != 3
    y, state, _ = run(arrays, dtype, cu_seqlens, silu=silu)
    check(arrays, dtype, cu_seqlens, y, state, silu)
    again, _, _ = run(arrays, dtype, cu_seqlens, silu=silu, order=7, poison=0x7F)
    assert np.array_equal(again, y)

    if len(cu_seqlens) > 2 and "mask" in arrays:
        return  # the op takes a mask with a padded batch only
    more = {} if "mask" in arrays else {"cu_seqlens": cu_seqlens}
    cpu, cpu_state = chunkdelta.causal_conv1d(
        **{k: mx.array(v) if v.dtype == bool else to_mlx(v) for k, v in arrays.items()},
        activation="silu" if silu else None,
        stream=mx.cpu,
        **more,
    )
    # The same sums; exp differs by an ulp, and a rounding may then fall on the other side.
    cpu = np.array(cpu.astype(mx.float32))
    assert np.allclose(y.astype(np.float32), cpu, rtol=2.1 * EPS[dtype], atol=1e-6)
    assert np.array_equal(state.astype(np.float32), np.array(cpu_state.astype(mx.float32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_rows_are_not_read(dtype):
    arrays = make(50, 8, 4, dtype, mask=0.4, state=True)
    y, state, _ = run(arrays, dtype, [0, 50], mode="fast")
    poisoned = {**arrays, "x": np.where(arrays["mask"][..., None], arrays["x"], np.nan)}
    poisoned["x"] = poisoned["x"].astype(DTYPES[dtype])
    again, state_again, _ = run(poisoned, dtype, [0, 50], mode="fast")
    assert np.array_equal(again, y)
    assert np.array_equal(state_again, state)
    assert not y[~arrays["mask"]].any()


@pytest.mark.parametrize("cut", [1, 2, 16, 29])
def test_a_cut_gives_the_same_bits(cut):
    arrays = make(48, 12, 4, "bfloat16", state=True)
    y, state, _ = run(arrays, "bfloat16", [0, 48], mode="fast")
    first = {**arrays, "x": np.ascontiguousarray(arrays["x"][:, :cut])}
    a, carried, _ = run(first, "bfloat16", [0, cut], mode="fast")
    rest = {**arrays, "x": np.ascontiguousarray(arrays["x"][:, cut:]), "initial_state": carried}
    b, end, _ = run(rest, "bfloat16", [0, 48 - cut], mode="fast")
    assert np.array_equal(np.concatenate([a, b], axis=1), y)
    assert np.array_equal(end, state)


def test_long_calls_are_split_into_bounded_launches():
    """40,960 rows of Qwen3.5's widest convolution, three launches of at most 2^27 elements."""
    plan = _ext.plans.causal_conv1d("bfloat16", 8192, 4, [0, 40_960])
    rows = [launch.grid[1] * 16 for launch in plan.launches]
    assert sum(rows) == 40_960
    assert max(rows) * 8192 <= 2**27
    firsts = [np.frombuffer(launch.params[0].bytes, np.int32)[1] for launch in plan.launches]
    assert firsts == [0, *np.cumsum([launch.grid[1] for launch in plan.launches])[:-1]]


def test_rows_are_read_little_more_than_once():
    arrays = make(512, 64, 4, "float16")
    plan = _ext.plans.causal_conv1d("float16", 64, 4, [0, 512], silu=True)
    outputs = {"y": np.empty_like(arrays["x"]), "state": np.empty((1, 3, 64), np.float16)}
    counters = execute_plan(plan, {**arrays, **outputs}, outputs=["y", "state"]).counters
    useful = arrays["x"].nbytes
    assert counters.device_bytes_written == useful + outputs["state"].nbytes
    # For 16 rows: 19, weights worth 4 of them, and the block's description for each thread.
    assert counters.device_bytes_read <= useful * 1.7


def test_type_checks():
    assert typecheck(Path(METAL_ROOT / "conv/causal_conv1d.metal"), include=[METAL_ROOT]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float64", 8, 4, [0, 4]), "dtype in .*; got 'float64'"),
        (("float32", 8, 9, [0, 4]), "2 to 8 taps; got 9"),
        (("float32", 0, 4, [0, 4]), "channels >= 1; got 0"),
        (("float32", 8, 4, [0, 4, 3]), "ascending"),
        (("float32", 8, 4, [1, 4]), "from 0"),
        (("float32", 8, 4, [0]), "N >= 1"),
    ],
)
def test_plan_refuses(arguments, message):
    with pytest.raises(ValueError, match=r"\[causal_conv1d\] expected .*" + message):
        _ext.plans.causal_conv1d(*arguments)
