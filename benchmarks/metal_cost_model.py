"""Predicted times of the two main kernels on Apple GPUs, from counts. Predictions, never measurements.

    python benchmarks/metal_counts.py --json > counts.json
    python benchmarks/metal_cost_model.py counts.json

A core issues one 8x8x8 product in four cycles (four schedulers, 80 % of the FMA rate), moves 64 B a cycle
to and from threadgroup memory and 32 B a cycle from L2 (figures of Apple 7 and 8 cores from public
microbenchmarks; later cores are taken alike). Two bounds are printed: all three overlap perfectly (the
largest counts), or not at all (their sum). Barriers, latencies and occupancy are in neither.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

CYCLES_PER_MMA, THREADGROUP_BYTES, L2_BYTES = 4.0, 64.0, 32.0


@dataclass(frozen=True)
class Chip:
    name: str
    cores: int
    tflops: float  # fp32, as sold

    @property
    def hertz(self) -> float:
        return self.tflops * 1e12 / (self.cores * 128 * 2)


CHIPS = [
    Chip("M1", 8, 2.6),
    Chip("M4", 10, 4.3),
    Chip("M4 Max", 40, 17.0),
    Chip("M3 Ultra", 80, 28.0),
]

# Units of work of one layer of Qwen3.5-9B: per token and value head; per 1,024 visible pairs.
WORK = {
    "gated_delta": ("2,048 tokens, 32 value heads", 2048 * 32),
    "attention_d256": ("512 queries at key 40,960, 16 heads", 512 * (40960 - 256) * 16 / 1024),
}


def cycles(counts: dict[str, float]) -> tuple[float, float]:
    """Core cycles of one unit: perfect overlap, and none."""
    terms = (
        CYCLES_PER_MMA * counts["mma"],
        (counts["threadgroup_read"] + counts["threadgroup_write"]) / THREADGROUP_BYTES,
        (counts["device_read"] + counts["device_write"]) / L2_BYTES,
    )
    return max(terms), sum(terms)


def predictions(counts: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, object]]:
    rows = []
    for op, (work, units) in WORK.items():
        for kernel, c in counts[op].items():
            if not c.get("mma"):
                continue  # a kernel without matrix products is bound by something else
            low, high = cycles(c)
            times = {
                chip.name: [1e3 * units * n / chip.cores / chip.hertz for n in (low, high)]
                for chip in CHIPS
            }
            rows.append({"op": op, "work": work, "kernel": kernel, "cycles": [low, high], **times})
    return rows


@click.command(help=__doc__)
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
def main(path: str) -> None:
    rows = predictions(json.loads(Path(path).read_text()))
    table = Table(title="predicted milliseconds (perfect overlap to none)")
    for name in ("op", "kernel", "core cycles a unit", *(c.name for c in CHIPS)):
        table.add_column(name)
    for row in rows:
        ranges = ["{:.3g} - {:.3g}".format(*row[c.name]) for c in CHIPS]  # type: ignore[misc]
        low, high = row["cycles"]  # type: ignore[misc]
        table.add_row(
            f"{row['op']}: {row['work']}", str(row["kernel"]), f"{low:.0f} - {high:.0f}", *ranges
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    main()
