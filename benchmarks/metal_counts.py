"""Work of Metal kernels, counted on the host: ours beside MLX's.

    python benchmarks/metal_counts.py                 # every table
    python benchmarks/metal_counts.py gated_delta     # tables whose name contains a word
    python benchmarks/metal_counts.py --json counts.json

Counts are exact and the same on every machine: 8x8x8 matrix products, simdgroup reductions, barriers,
and the bytes that instructions read and write (level-1 traffic, after the compiler's own reuse; not
DRAM). They are not times. MLX's kernels come unmodified from its macOS wheel, which pip downloads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.metal_host import Counters, Options
from tests.metal_host.mlx_kernels import Run, attention, gated_delta

COLUMNS = (
    ("MMA", "mma"),
    ("simd red.", "simd_reductions"),
    ("shuffles", "simd_shuffles"),
    ("device read B", "device_bytes_read"),
    ("device write B", "device_bytes_written"),
    ("tg read B", "threadgroup_bytes_read"),
    ("tg write B", "threadgroup_bytes_written"),
)


@dataclass(frozen=True)
class Row:
    """The counters of one kernel, and what they are divided by."""

    kernel: str
    counters: Counters
    per: float


@dataclass(frozen=True)
class Table:
    """Kernels on one case. ``rows`` is called when the table is asked for."""

    name: str
    case: str
    unit: str  # what a row's counts are per
    rows: Callable[[], Iterator[Row]]


def delta_inputs(
    length: int, heads_k: int = 1, heads_v: int = 2, dim: int = 128
) -> tuple[np.ndarray, ...]:
    """q, k [1,T,Hk,D], v [1,T,Hv,D], decay and beta [1,T,Hv], half; state float32 [1,Hv,D,D]."""
    rng = np.random.default_rng(0)
    q, k = (0.09 * rng.standard_normal((1, length, heads_k, dim)) for _ in range(2))
    v = rng.standard_normal((1, length, heads_v, dim))
    decay, beta = (rng.uniform(low, 1, (1, length, heads_v)) for low in (0.7, 0))
    state = rng.standard_normal((1, heads_v, dim, dim)).astype(np.float32)
    return (*(a.astype(np.float16) for a in (q, k, v, decay, beta)), state)


def mlx_gated_delta() -> Iterator[Row]:
    length = 64
    inputs = delta_inputs(length)
    # By the letter fused_chunk has a race within a simdgroup; hardware runs in lockstep.
    run = Run(options=Options(lockstep=True))
    for chunked, kernel in ((False, "gated_delta_seq"), (True, "gated_delta_fused_chunk C=8")):
        yield Row(f"MLX {kernel}", gated_delta(*inputs, run, chunked)[2].counters, 2 * length)


def mlx_attention() -> Iterator[Row]:
    heads, q_len, k_len, dim = 4, 64, 512, 256
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, heads, q_len, dim)).astype(np.float16)
    k, v = (rng.standard_normal((1, 1, k_len, dim)).astype(np.float16) for _ in range(2))
    for block_k in (16, 32):
        _, result = attention(q, k, v, Run(), causal=True, block_k=block_k, warps=(4, 2))
        name = f"MLX attention<half, 32, {block_k}, 256, 256, 4, 2>"
        yield Row(name, result.counters, heads * q_len * k_len / 1024)


TABLES = [
    Table(
        "gated_delta",
        "half, Dk = Dv = 128, Hk = 1, Hv = 2, T = 64, state in and out",
        "token and value head",
        mlx_gated_delta,
    ),
    Table(
        "attention_d256",
        "half, D = 256, 64 queries, 512 keys, 4 q heads on 1 KV head, causal",
        "1,024 (query, key, head) pairs",
        mlx_attention,
    ),
]


def render(table: Table, rows: list[Row]) -> str:
    """The table in Markdown."""
    heads = ["kernel", *(title for title, _ in COLUMNS), "tg memory B"]
    lines = [
        f"{table.name}: {table.case}; per {table.unit}",
        "",
        " | ".join(["", *heads, ""]).strip(),
    ]
    lines.append("|---" * len(heads) + "|")
    for row in rows:
        counts = asdict(row.counters)
        cells = [f"{counts[key] / row.per:,.0f}" for _, key in COLUMNS]
        lines.append(
            f"| {' | '.join([row.kernel, *cells, f'{row.counters.threadgroup_memory:,}'])} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("words", nargs="*", help="only tables whose name contains one of these")
    parser.add_argument("--json", type=Path, help="write the raw counters to this file")
    arguments = parser.parse_args()
    raw = {}
    for table in TABLES:
        if arguments.words and not any(word in table.name for word in arguments.words):
            continue
        rows = list(table.rows())
        print(render(table, rows))
        raw[table.name] = [{"kernel": r.kernel, "per": r.per, **asdict(r.counters)} for r in rows]
    if arguments.json:
        arguments.json.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
