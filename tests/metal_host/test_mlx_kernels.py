"""MLX's own kernels, unmodified, give NumPy's numbers; their barriers are all accounted for."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.metal_host import MetalError, Options, typecheck
from tests.metal_host.mlx_kernels import KERNELS, Run, attention, gated_delta, gemm, softmax
from tests.metal_host.mlx_wheel import UTILS, mlx_include
from tests.metal_host.mutants import outcomes

pytestmark = pytest.mark.mlx_wheel

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
MODES = pytest.mark.parametrize("mode", ["fast", "check"])


def error(got, want):
    """Largest difference, relative to the largest value."""
    return np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()


def normal(seed, *shape, dtype=F32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def softmax_of(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@MODES
@pytest.mark.parametrize(
    ("shape", "dtype", "looped", "bound"),
    [((6, 1000), F32, False, 5e-7), ((2, 5000), BF16, True, 4e-3)],
    ids=["single_row-f32", "looped-bf16"],
)
def test_softmax(mode, shape, dtype, looped, bound):
    x = normal(0, *shape, dtype=dtype)
    out, _ = softmax(x, Run(mode), looped)
    assert error(out, softmax_of(x.astype(np.float64))) < bound


def recurrence(q, k, v, decay, beta, state):
    q, k, v, decay, beta, state = (a.astype(np.float64) for a in (q, k, v, decay, beta, state))
    out = np.zeros(v.shape)
    group = v.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*v.shape[:3]):
        s, key = state[b, h] * decay[b, t, h], k[b, t, h // group]
        state[b, h] = s + np.outer((v[b, t, h] - s @ key) * beta[b, t, h], key)
        out[b, t, h] = state[b, h] @ q[b, t, h // group]
    return out, state


def delta_inputs(length, dtype=F32):
    rng = np.random.default_rng(1)
    q, k, v = normal(2, 1, length, 1, 64), normal(3, 1, length, 1, 64), normal(4, 1, length, 2, 32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, beta = rng.uniform(0.7, 1, (1, length, 2)), rng.uniform(0, 1, (1, length, 2))
    return (*(a.astype(dtype) for a in (0.3 * q, k, v, decay, beta)), normal(5, 1, 2, 32, 64))


@MODES
@pytest.mark.parametrize("chunked", [False, True], ids=["seq", "fused_chunk"])
def test_gated_delta(mode, chunked):
    inputs = delta_inputs(19)
    # The fused kernel rewrites gamma[] without a barrier after its reads: harmless on hardware,
    # where simdgroup functions reconverge, and a race by the letter.
    run = Run(mode, Options(lockstep=chunked))
    y, state, _ = gated_delta(*inputs, run, chunked)
    want, want_state = recurrence(*inputs)
    assert error(y, want) < 1e-6
    assert error(state, want_state) < 1e-6


def test_fused_chunk_race_is_found():
    with pytest.raises(
        MetalError, match=r"data-race: gated_delta_update\.h:\d+ and gated_delta_update"
    ):
        gated_delta(*delta_inputs(19), Run(), True)


def attention_inputs(q_len, k_len, dim, dtype):
    return (
        normal(1, 1, 2, q_len, dim, dtype=dtype),
        normal(2, 1, 1, k_len, dim, dtype=dtype),
        normal(3, 1, 1, k_len, dim, dtype=dtype),
    )


def attention_of(q, k, v, causal):
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        rows, columns = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None]
        scores = np.where(columns <= rows + k.shape[2] - q.shape[2], scores, -np.inf)
    return softmax_of(scores) @ v


ATTENTION = [
    ("f32-causal", 40, 50, 64, F32, True, 16, (4, 1), 1e-6),
    ("f16-full", 64, 64, 128, F16, False, 16, (4, 1), 1e-3),
    ("bf16-causal", 37, 83, 64, BF16, True, 32, (4, 1), 8e-3),
]


@MODES
@pytest.mark.parametrize(
    ("q_len", "k_len", "dim", "dtype", "causal", "block_k", "warps", "bound"),
    [a[1:] for a in ATTENTION],
    ids=[a[0] for a in ATTENTION],
)
def test_steel_attention(mode, q_len, k_len, dim, dtype, causal, block_k, warps, bound):
    inputs = attention_inputs(q_len, k_len, dim, dtype)
    out, _ = attention(*inputs, Run(mode), causal=causal, block_k=block_k, warps=warps)
    assert error(out, attention_of(*inputs, causal)) < bound


@MODES
@pytest.mark.parametrize(
    ("dtype", "transpose_b", "bound"),
    [(F32, False, 1e-6), (F16, True, 1e-3)],
    ids=["nn-f32", "nt-f16"],
)
def test_steel_gemm(mode, dtype, transpose_b, bound):
    a, b = normal(1, 50, 37, dtype=dtype), normal(2, 37, 70, dtype=dtype)
    given = np.ascontiguousarray(b.T) if transpose_b else b
    out, _ = gemm(a, given, Run(mode), transpose_b=transpose_b)
    assert error(out, a.astype(np.float64) @ b.astype(np.float64)) < bound


CHECKED = [
    ("softmax.h", "softmax_single_row, float, float"),
    ("gated_delta_update.h", "gated_delta_fused_chunk, half, 128, 128, 1, 2, 8"),
    (
        "steel/attn/kernels/steel_attention.h",
        "attention, bfloat16_t, 32, 16, 64, 64, 4, 1, bool, float",
    ),
    ("sdpa_vector.h", "sdpa_vector, half, 128"),
]


@pytest.mark.parametrize(("header", "instantiation"), CHECKED, ids=[c[0] for c in CHECKED])
def test_kernels_that_apple_compiles_pass_the_type_check(header, instantiation):
    source = (
        f'{UTILS}#include "{KERNELS}/{header}"\ninstantiate_kernel("kernel", {instantiation})\n'
    )
    assert typecheck(source, include=[mlx_include()]) == []


def test_gemm_reads_an_argument_that_may_be_unbound():
    with pytest.raises(
        MetalError, match=r"out-of-bounds: steel_gemm_fused\.h:168: read of 4 bytes"
    ):
        gemm(normal(1, 32, 16), normal(2, 16, 32), Run(), bind_unused=False)


# Mutants that nothing can notice, by line of the kernel's file, each with its reason.
REDUNDANT = {
    "steel_attention.h:232": "stands before the first use of threadgroup memory",
    "steel_attention.h:312": "mem_none: orders nothing, a hint to the scheduler",
    "steel_attention.h:321": "mem_none",
    "steel_attention.h:541": "mem_none",
}


@pytest.mark.parametrize("kernel", ["softmax", "attention"])
def test_every_barrier_is_needed_or_excused(kernel):
    def run(mutation=None):
        how = Run(mutation=mutation, raise_errors=False)
        if kernel == "softmax":
            return softmax(normal(0, 1, 1000), how)[1]
        return attention(*attention_inputs(40, 100, 64, F32), how, causal=True)[1]

    unchanged = run()
    assert not unchanged.reports
    found = list(outcomes(unchanged.barrier_sites, lambda m: [run(m).reports]))
    survivors = {f"{Path(o.mutation.file).name}:{o.mutation.line}" for o in found if o.survived}
    assert len(found) >= 10
    assert survivors == (set(REDUNDANT) if kernel == "attention" else set())


def test_counts_of_mlx_kernels():
    """The figures that docs/concepts/metal-on-host.md shows, to the byte."""
    from benchmarks.metal_counts import mlx_attention, mlx_gated_delta

    def table(rows, *names):
        return {r.kernel: tuple(getattr(r.counters, n) / r.per for n in names) for r in rows}

    delta = ("mma", "simd_reductions", "device_bytes_read", "device_bytes_written")
    assert table(mlx_gated_delta(), *delta, "threadgroup_bytes_read") == {
        "MLX gated_delta_seq": (0, 256, 165_632, 1_280, 0),
        "MLX gated_delta_fused_chunk C=8": (204, 2, 26_336, 1_280, 2_560),
    }
    moved = ("device_bytes_read", "threadgroup_bytes_read", "threadgroup_bytes_written")
    rows = list(mlx_attention())
    assert table(rows, "mma", *moved) == {
        "MLX attention<half, 32, 16, 256, 256, 4, 2>": (992, 35_136, 166_656, 40_704),
        "MLX attention<half, 32, 32, 256, 256, 4, 2>": (992, 37_120, 134_912, 39_680),
    }
    assert [r.counters.threadgroup_memory for r in rows] == [29_184, 20_482]
