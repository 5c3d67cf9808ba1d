"""The Metal kernel of the gates through its launch plan, against float64 and the CPU op."""

import chunkdelta
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta import _ext
from chunkdelta.ops import naive

from tests.metal_host import METAL_ROOT, Options, execute_plan, typecheck

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def inputs(rows, heads, dtype, kind="normal"):
    rng = np.random.default_rng(rows + heads)
    scale, shift = {"normal": (1, 0), "remembers": (1, -8), "forgets": (20, 20), "far": (60, 0)}[
        kind
    ]
    a = (scale * rng.standard_normal((rows, heads)) + shift).astype(DTYPES[dtype])
    b = (scale * rng.standard_normal((rows, heads))).astype(DTYPES[dtype])
    a_log = rng.uniform(-6, 3, heads).astype(np.float32)
    dt_bias = rng.standard_normal(heads).astype(np.float32)
    return {"a": a, "b": b, "A_log": a_log, "dt_bias": dt_bias}


def run(arrays, *, lower_bound=None, allow_neg_eigval=False, mode="check", **options):
    rows, heads = arrays["a"].shape
    plan = _ext.plans.gated_delta_gates(
        arrays["a"].dtype.name,
        rows,
        heads,
        lower_bound=lower_bound,
        allow_neg_eigval=allow_neg_eigval,
    )
    if not plan.launches:
        return np.zeros((rows, heads)), np.zeros((rows, heads))
    outputs = {name: np.empty((rows, heads), np.float32) for name in ("g", "beta")}
    done = execute_plan(
        plan, {**arrays, **outputs}, outputs=list(outputs), mode=mode, options=Options(**options)
    )
    return done.arrays["g"], done.arrays["beta"]


@pytest.mark.parametrize(
    "options", [{}, {"lower_bound": -5.0}, {"allow_neg_eigval": True}], ids=str
)
@pytest.mark.parametrize("kind", ["normal", "remembers", "forgets", "far"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads"), [(0, 4), (1, 1), (37, 32), (9, 48)], ids=str)
def test_equals_naive(rows, heads, dtype, kind, options):
    arrays = inputs(rows, heads, dtype, kind)
    g, beta = run(arrays, **options)
    exact_g, exact_beta = naive.gated_delta_gates(
        *(np.asarray(arrays[n], np.float64) for n in ("a", "b", "A_log", "dt_bias")), **options
    )
    # x = a + dt_bias is rounded once: half an ulp of x, times the slope of softplus in log space.
    x = np.abs(np.asarray(arrays["a"], np.float64) + arrays["dt_bias"])
    slack = 2e-6 + 2.0**-23 * x * (1 + np.exp(arrays["A_log"]) * ("lower_bound" in options))
    assert np.all(np.abs(g - exact_g) <= slack * np.abs(exact_g) + 1e-37)
    assert np.all(np.abs(beta - exact_beta) <= 1e-6 * np.abs(exact_beta) + 1e-37)


@pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0}], ids=str)
def test_equals_the_cpu_op(options):
    arrays = inputs(64, 32, "bfloat16")
    g, beta = run(arrays, mode="fast", **options)
    names = ("a", "b", "A_log", "dt_bias")
    on_device = [
        mx.array(arrays[n].view(np.uint16)).view(mx.bfloat16) if n in "ab" else mx.array(arrays[n])
        for n in names
    ]
    cpu_g, cpu_beta = chunkdelta.gated_delta_gates(*on_device, stream=mx.cpu, **options)
    np.testing.assert_allclose(g, np.array(cpu_g), rtol=3e-6)
    np.testing.assert_allclose(beta, np.array(cpu_beta), rtol=3e-6)


def test_extremes():
    far = np.float32([[-np.inf, -200.0, 200.0, np.inf, np.nan]])
    zeros = np.zeros(5, np.float32)
    g, beta = run({"a": far, "b": far, "A_log": zeros, "dt_bias": zeros})
    np.testing.assert_array_equal(beta, [[0, 0, 1, 1, np.nan]])
    np.testing.assert_array_equal(g, [[0, 0, -200, -np.inf, np.nan]])


def test_thread_order_changes_nothing():
    arrays = inputs(50, 16, "float16")
    first = run(arrays)
    for order in (1, 7):
        again = run(arrays, order=order, poison=0xFF)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_source_passes_the_type_check():
    assert not typecheck(METAL_ROOT / "gated_delta/gates.metal", include=[METAL_ROOT])


def test_plan_refuses():
    with pytest.raises(ValueError, match=r"\[gated_delta_gates\] expected heads >= 1"):
        _ext.plans.gated_delta_gates("float32", 5, 0)
    with pytest.raises(ValueError, match=r"fewer than 2\^32 elements; got 4294967296 rows of 2"):
        _ext.plans.gated_delta_gates("float32", 2**32, 2)
