"""Work of Metal kernels, counted on the host: ours beside MLX's.

    python benchmarks/metal_counts.py                 # every table
    python benchmarks/metal_counts.py gated_delta     # tables whose name contains a word
    python benchmarks/metal_counts.py --quick         # smaller shapes, where a table has them
    python benchmarks/metal_counts.py --json          # numbers per unit, as JSON, instead of tables

Counts are exact and the same on every machine: 8x8x8 matrix products, simdgroup reductions, barriers,
and the bytes that instructions read and write (level-1 traffic, after the compiler's own reuse; not
DRAM). They are not times. MLX's kernels come unmodified from its macOS wheel, which pip downloads.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.metal_host import Counters, Options
from tests.metal_host import gated_delta_case as delta
from tests.metal_host.attention_case import Case, make, relative_error
from tests.metal_host.mlx_kernels import Run, attention, gated_delta

COLUMNS = (
    ("MMA", "mma"),
    ("simd red.", "simd_reductions"),
    ("shuffles", "simd_shuffles"),
    ("barriers", "threadgroup_barriers"),
    ("device read B", "device_bytes_read"),
    ("device write B", "device_bytes_written"),
    ("tg read B", "threadgroup_bytes_read"),
    ("tg write B", "threadgroup_bytes_written"),
)


@dataclass(frozen=True)
class Row:
    """The counters of one kernel (or of all launches of a plan), and what they are divided by."""

    kernel: str
    counters: Counters
    per: float
    key: str = ""  # in the JSON
    error: float | None = None  # relative Frobenius error against float64


@dataclass(frozen=True)
class Table:
    """Kernels on one case. ``rows`` is called when the table is asked for."""

    name: str
    case: str
    unit: str  # what a row's counts are per
    rows: Callable[[bool], Iterator[Row]]  # given whether smaller shapes are asked for


Array = npt.NDArray[np.generic]
DeltaInputs = tuple[Array, Array, Array, Array, Array, Array]


def delta_inputs(length: int, heads_k: int = 1, heads_v: int = 2, dim: int = 128) -> DeltaInputs:
    """q, k [1,T,Hk,D], v [1,T,Hv,D], decay and beta [1,T,Hv], half; state float32 [1,Hv,D,D]."""
    rng = np.random.default_rng(0)
    q, k = (0.09 * rng.standard_normal((1, length, heads_k, dim)) for _ in range(2))
    v = rng.standard_normal((1, length, heads_v, dim))
    decay, beta = (rng.uniform(low, 1, (1, length, heads_v)) for low in (0.7, 0))
    state = rng.standard_normal((1, heads_v, dim, dim)).astype(np.float32)
    halves = [a.astype(np.float16) for a in (q, k, v, decay, beta)]
    return halves[0], halves[1], halves[2], halves[3], halves[4], state


def mlx_gated_delta() -> Iterator[Row]:
    length = 64
    inputs = delta_inputs(length)
    # By the letter fused_chunk has a race within a simdgroup; hardware runs in lockstep.
    run = Run(options=Options(lockstep=True))
    for chunked, kernel in ((False, "gated_delta_seq"), (True, "gated_delta_fused_chunk C=8")):
        key = "mlx_chunk" if chunked else "mlx_seq"
        counters = gated_delta(*inputs, run=run, chunked=chunked)[2].counters
        yield Row(f"MLX {kernel}", counters, 2 * length, key)


def gated_delta_rows(quick: bool) -> Iterator[Row]:
    """Ours through its launch plan, then MLX's two kernels, on the same numbers; errors are the
    state's. A GPU of one core is full with two value heads, as real ones are with a layer's 32."""
    length, heads = 64 if quick else 512, 2
    for cores, key in ((1, "ours"), (8, "ours_few_heads")):
        call = delta.make(delta.Case(tokens=length, dtype="float16", cores=cores))
        result = call.run("check")
        kernels = " + ".join(launch.kernel for launch in call.plan().launches)
        yield Row(kernels, result.done.counters, length * heads, key, result.errors()[1])
    q, k, v = (call.arrays[x].reshape(call.exact[x].shape) for x in ("q", "k", "v"))
    decay, beta = (
        np.exp(call.arrays["g"]).astype(np.float16),
        call.arrays["beta"].astype(np.float16),
    )
    state = call.arrays["initial_state"]
    # By the letter fused_chunk has a race within a simdgroup; hardware runs in lockstep.
    run = Run(options=Options(lockstep=True))
    for chunked, kernel in ((True, "gated_delta_fused_chunk C=8"), (False, "gated_delta_seq")):
        _, end, launch = gated_delta(q, k, v, decay, beta, state, run=run, chunked=chunked)
        error = delta.relative_error(end, call.state)
        key = "mlx_chunk" if chunked else "mlx_seq"
        yield Row(f"MLX {kernel}", launch.counters, length * heads, key, error)


def mlx_attention() -> Iterator[Row]:
    heads, q_len, k_len, dim = 4, 64, 512, 256
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, heads, q_len, dim)).astype(np.float16)
    k, v = (rng.standard_normal((1, 1, k_len, dim)).astype(np.float16) for _ in range(2))
    for block_k in (16, 32):
        _, result = attention(q, k, v, Run(), causal=True, block_k=block_k, warps=(4, 2))
        name = f"MLX attention<half, 32, {block_k}, 256, 256, 4, 2>"
        yield Row(name, result.counters, heads * q_len * k_len / 1024)


def attention_row(shape: tuple[int, int], block_k: int) -> Row:
    """Ours through its launch plan (block_k = 0), or one of MLX's tiles, on the same numbers."""
    q_len, k_len = shape
    heads, dim = 4, 256
    options = Options(cpu_seconds=600)
    call = make(Case((q_len,), (k_len,), heads, 1, dim, "float16", page_size=64))
    pairs = heads * sum(range(k_len - q_len + 1, k_len + 1)) / 1024
    if block_k == 0:
        result = call.run("check", options=options)
        kernels = " + ".join(launch.kernel for launch in call.plan().launches)
        return Row(kernels, result.done.counters, pairs, "ours", result.error())
    q = np.ascontiguousarray(call.arrays["q"].transpose(1, 0, 2)[None])
    k, v = (
        np.ascontiguousarray(x[0].astype(np.float16).transpose(1, 0, 2)[None])
        for x in (call.keys, call.values)
    )
    o, launch = attention(q, k, v, Run(options=options), causal=True, block_k=block_k, warps=(4, 2))
    name = f"MLX attention<half, 32, {block_k}, 256, 256, 4, 2>"
    error = relative_error(o[0].transpose(1, 0, 2), call.o)
    return Row(name, launch.counters, pairs, f"mlx_bk{block_k}", error)


def attention_rows(quick: bool) -> Iterator[Row]:
    """The three kernels, each in a process of its own: together they execute 26 GFLOP, checked."""
    shape = (128, 1024) if quick else (512, 4096)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(functools.partial(attention_row, shape), (0, 16, 32))


TABLES = [
    Table(
        "gated_delta",
        "half, Dk = Dv = 128, Hk = 1, Hv = 2, T = 512 (quick: 64), state in and out",
        "token and value head",
        gated_delta_rows,
    ),
    Table(
        "attention_d256",
        "half, D = 256, 512 queries ending at key 4,096 (quick: 128 at 1,024), 4 q heads on 1 KV head",
        "1,024 visible (query, key, head) pairs",
        attention_rows,
    ),
]


def render(table: Table, rows: list[Row]) -> str:
    """The table in Markdown."""
    heads = ["kernel", *(title for title, _ in COLUMNS), "tg memory B", "error"]
    lines = [
        f"{table.name}: {table.case}; per {table.unit}",
        "",
        " | ".join(["", *heads, ""]).strip(),
    ]
    lines.append("|---" * len(heads) + "|")
    for row in rows:
        counts = asdict(row.counters)
        cells = [_short(counts[key] / row.per) for _, key in COLUMNS]
        error = "" if row.error is None else f"{row.error:.1e}"
        cells = [row.kernel, *cells, f"{row.counters.threadgroup_memory:,}", error]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 or x == 0 else f"{x:.2f}"


def numbers(row: Row) -> dict[str, float | None]:
    """What a row says, per unit, for the JSON."""
    c = row.counters
    return {
        "mma": c.mma / row.per,
        "simd_reductions": c.simd_reductions / row.per,
        "barriers": c.threadgroup_barriers / row.per,
        "device_read": (c.device_bytes_read or 0) / row.per,
        "device_write": (c.device_bytes_written or 0) / row.per,
        "threadgroup_read": (c.threadgroup_bytes_read or 0) / row.per,
        "threadgroup_write": (c.threadgroup_bytes_written or 0) / row.per,
        "threadgroup_bytes": c.threadgroup_memory,
        "error": row.error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("words", nargs="*", help="only tables whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="smaller shapes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    out: dict[str, dict[str, dict[str, float | None]]] = {}
    for table in TABLES:
        if arguments.words and not any(word in table.name for word in arguments.words):
            continue
        rows = list(table.rows(arguments.quick))
        out[table.name] = {row.key or row.kernel: numbers(row) for row in rows}
        if not arguments.json:
            print(render(table, rows))
    if arguments.json:
        print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
