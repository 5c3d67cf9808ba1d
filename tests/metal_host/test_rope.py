"""The Metal kernel of rope through its launch plan: equal to the float64 oracle, exact far out."""

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


def run(x, positions, *, dims, base=1e4, sections=None, interleaved=True, traditional=False, **o):
    """The kernel's output and the oracle's."""
    tokens, heads, head_dim = x.shape
    pairs = dims // 2
    inv_freq = (1.0 / base ** (np.arange(0, dims, 2) / dims)).astype(np.float32)
    axis = np.zeros(pairs, int)
    if sections and interleaved:
        for a in (1, 2):
            axis[a : 3 * sections[a] : 3] = a
    elif sections:
        axis = np.repeat([0, 1, 2], sections)
    plan = _ext.plans.rope(
        x.dtype.name, tokens, heads, head_dim, inv_freq.tolist(), axis.tolist(), traditional
    )
    positions = np.asarray(positions, np.int32)
    arrays = {"x": x, "positions": positions, "out": np.empty_like(x)} if plan.launches else {}
    outputs = ["out"] if plan.launches else []
    mode = o.pop("mode", "check")
    result = execute_plan(plan, arrays, outputs=outputs, mode=mode, options=Options(**o))
    expected = naive.rope(
        x,
        positions,
        dims=dims,
        base=base,
        traditional=traditional,
        mrope_sections=sections,
        mrope_interleaved=interleaved,
    )
    return result.arrays.get("out", x), expected


CASES = [
    # positions' axes, tokens, heads, head_dim, options
    pytest.param(1, 0, 2, 64, {"dims": 64}, id="empty"),
    pytest.param(1, 1, 1, 64, {"dims": 64}, id="one-token"),
    pytest.param(1, 9, 5, 256, {"dims": 64, "base": 1e7}, id="partial"),
    pytest.param(1, 6, 9, 128, {"dims": 128, "traditional": True}, id="traditional"),
    pytest.param(1, 5, 3, 20, {"dims": 12}, id="odd-width"),
    pytest.param(3, 7, 2, 256, {"dims": 64, "sections": [11, 11, 10]}, id="mrope"),
    pytest.param(
        3, 4, 1, 64, {"dims": 64, "sections": [8, 12, 12], "interleaved": False}, id="mrope-qwen2"
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("axes", "tokens", "heads", "head_dim", "options"), CASES)
def test_equals_naive(axes, tokens, heads, head_dim, options, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, heads, head_dim)).astype(DTYPES[dtype])
    positions = rng.integers(-(2**20), 2**20, (axes, tokens)[axes == 1 :])
    out, expected = run(x, positions, **options)
    assert np.all(abs(out.astype(np.float64) - expected) <= EPS[dtype] * abs(expected) + 2e-6)
    again, _ = run(x, positions, **options, order=3, poison=0)
    assert np.array_equal(again, out)


def test_far_positions_are_as_exact_as_near_ones():
    """And as exact as the CPU op, which computes angles in double."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 1, 128)).astype(np.float32)
    errors = []
    for first in (0, 131_008, 2**31 - 64):
        positions = np.arange(first, first + 64)
        out, expected = run(x, positions, dims=128, base=1e6, mode="fast")
        cpu = chunkdelta.rope(mx.array(x), mx.array(positions, mx.int32), base=1e6, stream=mx.cpu)
        errors.append(np.abs(out - expected).max())
        assert errors[-1] <= 1.5 * np.abs(np.array(cpu) - expected).max()
    assert max(errors) <= 1.5 * errors[0]


def test_in_place():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((9, 6, 80)).astype(np.float32)
    plan = _ext.plans.rope("float32", 9, 6, 80, [1.0, 0.5, 0.25], [0, 0, 0])
    positions = np.arange(9, dtype=np.int32)
    apart = execute_plan(plan, {"x": x, "positions": positions, "out": np.empty_like(x)})
    same = execute_plan(plan, {"x": x, "positions": positions, "out": x})
    assert np.array_equal(same.arrays["out"], apart.arrays["out"])


def test_turns_are_exact():
    """1 / (2 pi) to 64 bits after the point, for every size of frequency."""
    two_pi = 6.28318530717958647692528676655900576839433879875021
    for frequency in np.float32([1.0, 0.1, 3e-7, 2.0**-60, 7.5, 1e6, -0.25]):
        plan = _ext.plans.rope("float32", 1, 1, 2, [float(frequency)], [0])
        low, high, axis = np.frombuffer(plan.host_data[0].bytes, np.uint32)
        turn = int(low) | int(high) << 32
        expected = float(frequency) / two_pi % 1.0
        assert abs(turn / 2**64 - expected) % 1.0 <= 4e-16 * max(1.0, abs(frequency))
        assert axis == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float32", 1, 1, 4, [1.0] * 3, [0] * 3), "3 pairs"),
        (("float32", 1, 1, 4, [1.0], [3]), r"axes in 0\.\.2; got 3"),
        (("float32", 1, 1, 4, [1.0], []), "an axis per pair; got 0"),
        (("float32", 1, 1, 4, [float("nan")], [0]), "below 2\\^24; got"),
        (("float32", -1, 1, 4, [1.0], [0]), "below 2\\^31; got -1"),
    ],
)
def test_plan_refuses(arguments, message):
    with pytest.raises(ValueError, match=r"\[rope\] expected .*" + message):
        _ext.plans.rope(*arguments)


def test_type_checks():
    assert typecheck(METAL_ROOT / "rope/rope.metal", include=[METAL_ROOT]) == []
