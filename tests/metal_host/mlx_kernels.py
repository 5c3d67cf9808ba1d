"""Launches of MLX's own kernels, unmodified from its wheel, as MLX makes them.

The tests run them against NumPy, the benchmark counts them.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .memory import Options
from .mlx_wheel import UTILS, mlx_include
from .run import DEFAULT, LaunchResult, Library, Mutation

Array = npt.NDArray[np.generic]
KERNELS = "mlx/backend/metal/kernels"
TYPES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "half",
    np.dtype(ml_dtypes.bfloat16): "bfloat16_t",
}


@dataclass(frozen=True)
class Run:
    """How a kernel is executed here: mode, options, mutation."""

    mode: str = "check"
    options: Options = DEFAULT
    mutation: Mutation | None = None
    raise_errors: bool = True


@functools.lru_cache(maxsize=64)
def library(header: str, instantiation: str, mode: str) -> Library:
    """One kernel of one of MLX's headers: ``instantiation`` is "template, argument, ..."."""
    source = (
        f'{UTILS}#include "{KERNELS}/{header}"\ninstantiate_kernel("kernel", {instantiation})\n'
    )
    return Library(source, mode=mode, name=header.split("/")[-1], include=[mlx_include()])


def softmax(x: Array, run: Run, looped: bool = False) -> tuple[Array, LaunchResult]:
    """softmax over the last axis of [rows, n]."""
    name = "softmax_looped" if looped else "softmax_single_row"
    kernel = library("softmax.h", f"{name}, {TYPES[x.dtype]}, float", run.mode)
    threads = 1024 if looped else -(-x.shape[1] // (4 * 32)) * 32
    out = np.empty_like(x)
    result = kernel.run(
        "kernel",
        (x.shape[0], 1, 1),
        (threads, 1, 1),
        {0: x, 1: out, 2: np.int32(x.shape[1])},
        outputs=[1],
        options=run.options,
        mutation=run.mutation,
        raise_errors=run.raise_errors,
    )
    return out, result


def gated_delta(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    state: Array,
    run: Run,
    chunked: bool,
) -> tuple[Array, Array, LaunchResult]:
    """gated_delta_seq, or gated_delta_fused_chunk with C=8.

    Args:
      q, k: [B, T, Hk, Dk]. v: [B, T, Hv, Dv]. decay, beta: [B, T, Hv], all of one dtype; the decay
        is exp of the log gate. state: float32 [B, Hv, Dv, Dk].
    """
    batch, length, num_k, dim_k = q.shape
    num_v, dim_v = v.shape[2:]
    shape = f"{TYPES[q.dtype]}, {dim_k}, {dim_v}, {num_k}, {num_v}"
    name = f"gated_delta_fused_chunk, {shape}, 8" if chunked else f"gated_delta_seq, {shape}, 4"
    kernel = library("gated_delta_update.h", name, run.mode)
    y, new_state = np.empty_like(v), np.empty_like(state)
    result = kernel.run(
        "kernel",
        (32, dim_v // 8 if chunked else dim_v, batch * num_v),
        (32, 4, 1),
        {
            **dict(enumerate((q, k, v, state, decay, beta, y, new_state))),
            8: np.int32(length),
        },
        outputs=[6, 7],
        grid_in_threads=True,
        constants={"save_state": False},
        options=run.options,
        mutation=run.mutation,
        raise_errors=run.raise_errors,
    )
    return y, new_state, result


def attention(
    q: Array,
    k: Array,
    v: Array,
    run: Run,
    *,
    causal: bool,
    block_q: int = 32,
    block_k: int = 16,
    warps: tuple[int, int] = (4, 1),
) -> tuple[Array, LaunchResult]:
    """Steel flash attention on q [B, Hq, Lq, D], k and v [B, Hk, Lk, D], scale D**-0.5."""
    batch, heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    kernel = library(
        "steel/attn/kernels/steel_attention.h",
        f"attention, {TYPES[q.dtype]}, {block_q}, {block_k}, {dim}, {dim}, {warps[0]}, {warps[1]},"
        " bool, float",
        run.mode,
    )
    q_blocks, k_blocks = -(-q_len // block_q), -(-k_len // block_k)
    full_q, full_k = q_len // block_q, k_len // block_k
    q_rest, k_rest = q_len % block_q, k_len % block_k
    params = struct.pack(
        "6if7i12q",
        *(batch, heads, dim, q_len, k_len, heads // kv_heads, dim**-0.5),
        *(q_blocks, k_blocks, full_q, full_k, q_rest, k_rest, k_len - q_len),
        *(heads * q_len * dim, q_len * dim, dim),
        *(kv_heads * k_len * dim, k_len * dim, dim) * 2,
        *(heads * q_len * dim, q_len * dim, dim),
    )
    out = np.empty_like(q)
    result = kernel.run(
        "kernel",
        (q_blocks, heads, batch),
        (32, warps[0] * warps[1], 1),
        {0: q, 1: k, 2: v, 3: out, 4: params},
        outputs=[3],
        constants={
            **{"align_Q": q_rest == 0, "align_K": k_rest == 0, "do_causal": causal},
            **{"has_mask": False, "has_sinks": False, "save_lse": False},
        },
        options=run.options,
        mutation=run.mutation,
        raise_errors=run.raise_errors,
    )
    return out, result


def gemm(
    a: Array, b: Array, run: Run, *, transpose_b: bool = False, bind_unused: bool = True
) -> tuple[Array, LaunchResult]:
    """Steel GEMM: a [M, K] times b [K, N], or b [N, K] transposed.

    The kernel reads the alpha and beta of an optional argument whether it is bound or not;
    ``bind_unused`` binds it.
    """
    m, depth = a.shape
    n = b.shape[0] if transpose_b else b.shape[1]
    tile_m = tile_n = 32
    tile_k = 16
    kernel = library(
        'steel/gemm/gemm.h"\n#include "' + KERNELS + "/steel/gemm/kernels/steel_gemm_fused.h",
        f"gemm, {TYPES[a.dtype]}, {tile_m}, {tile_n}, {tile_k}, 2, 2, false,"
        f" {str(transpose_b).lower()}, float",
        run.mode,
    )
    tiles_m, tiles_n = -(-m // tile_m), -(-n // tile_n)
    params = struct.pack(
        "8i3q4i",
        *(m, n, depth, depth, depth if transpose_b else n, n, tiles_n, tiles_m),
        *(0, 0, 0, 0, depth // tile_k, 0, 0),
    )
    out = np.empty((m, n), a.dtype)
    unused = {5: struct.pack("2iq2f", 0, 0, 0, 1.0, 0.0)} if bind_unused else {}
    result = kernel.run(
        "kernel",
        (tiles_n, tiles_m, 1),
        (32, 2, 2),
        {0: a, 1: b, 3: out, 4: params, **unused},
        outputs=[3],
        constants={
            **{"has_batch": False, "use_out_source": False, "do_axpby": False},
            **{"align_M": m % tile_m == 0, "align_N": n % tile_n == 0},
            **{"align_K": depth % tile_k == 0},
        },
        options=run.options,
        mutation=run.mutation,
        raise_errors=run.raise_errors,
    )
    return out, result
