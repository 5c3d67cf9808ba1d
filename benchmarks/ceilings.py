"""What this machine can do, measured in the same process as the kernels: one core's fp32 GEMM
(NumPy's OpenBLAS) and one core's copy bandwidth."""

from __future__ import annotations

import time

import numpy as np


def _best(work, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def gemm_gflops(repeats: int = 5) -> float:
    """GFLOP/s of a 1024^3 fp32 product on as many threads as OPENBLAS_NUM_THREADS allows."""
    n = 1024
    a, b = (np.random.default_rng(i).random((n, n), np.float32) for i in (0, 1))
    out = np.empty((n, n), np.float32)
    return 2 * n**3 / _best(lambda: np.matmul(a, b, out=out), repeats) / 1e9


def copy_gbps(repeats: int = 5) -> float:
    """GB/s read plus written of a copy that does not fit any cache."""
    source = np.ones(64 << 20, np.float32)
    target = np.empty_like(source)
    return 2 * source.nbytes / _best(lambda: np.copyto(target, source), repeats) / 1e9
