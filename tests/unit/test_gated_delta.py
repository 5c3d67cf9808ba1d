"""The gated delta rule against the float64 recurrence."""

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.ops import naive
from chunkdelta.testing.compare import relative_error


def make(B, T, Hk, Hv, Dk, Dv, *, seed=0, state=None):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, B, T, Hk, Dk))
    arrays = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((B, T, Hv, Dv)),
        "g": -0.1 * np.abs(rng.standard_normal((B, T, Hv))),
        "beta": rng.uniform(0, 1, (B, T, Hv)),
    }
    if state is not None:
        arrays["initial_state"] = rng.standard_normal((state, Hv, Dv, Dk))
    return {name: mx.array(a.astype(np.float32)) for name, a in arrays.items()}


def check(arrays, bar=1e-6, **options):
    out = chunkdelta.chunk_gated_delta_rule(**arrays, **options)
    options.pop("chunk_size", None)
    expected = naive.chunk_gated_delta_rule(
        **{name: np.array(a) for name, a in arrays.items()}, **options
    )
    assert len(out) == len(expected)
    for actual, oracle in zip(out, expected, strict=True):
        assert relative_error(actual, oracle) <= bar
    return out


@pytest.mark.parametrize(
    ("B", "T", "Hk", "Hv", "Dk", "Dv"),
    [
        pytest.param(1, 0, 1, 1, 8, 8, id="empty"),
        pytest.param(1, 1, 2, 4, 128, 128, id="decode"),
        pytest.param(3, 4, 1, 2, 64, 32, id="B3-T4"),
        pytest.param(1, 5, 1, 1, 4, 4, id="smallest-heads"),
        pytest.param(2, 63, 2, 2, 64, 64, id="B2-T63"),
        pytest.param(1, 64, 1, 3, 128, 128, id="one-chunk"),
        pytest.param(1, 65, 3, 3, 60, 100, id="T65-D60-D100"),
        pytest.param(1, 200, 2, 6, 128, 68, id="T200-ratio3"),
        pytest.param(1, 130, 1, 2, 256, 256, id="largest-heads"),
    ],
)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
def test_matches_the_recurrence(B, T, Hk, Hv, Dk, Dv, state):
    check(make(B, T, Hk, Hv, Dk, Dv, state=B if state else None))


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_size_changes_no_meaning(chunk_size):
    check(make(1, 100, 1, 2, 64, 64, state=1), chunk_size=chunk_size)
