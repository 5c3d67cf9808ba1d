"""Measure ops beside their peers: `python benchmarks/run.py --suite cpu --json results.json`.

Implementations of a case take turns (A B C A B C ...), single-threaded, and are compared by CPU seconds:
on a shared machine wall time measures the neighbours. Ceilings are measured in the same process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Thread counts are read when the libraries load.
THREADS = os.environ.setdefault("CHUNKDELTA_NUM_THREADS", "1")
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = THREADS
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gc
import json
import platform
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import ceilings
from benchmarks.registry import Case, Implementation, Unavailable, load_all

OURS = "chunkdelta"
console = Console() if sys.stdout.isatty() else Console(width=140)


@dataclass
class Row:
    op: str
    case: str
    impl: str
    cpu_s: float  # median CPU seconds of one call
    cpu_spread: float  # (max - min) / median
    wall_s: float
    gflops_per_core: float | None
    fraction_of_ceiling: float
    extra_bytes: int | None  # peak resident memory of the first call beyond inputs and libraries
    ratio_to_ours: float | None  # CPU seconds, theirs over ours
    difference: float | None  # relative Frobenius distance of the output from ours
    runs: int


class PeakMemory:
    """Peak resident bytes of a block, beyond what was resident before (Linux)."""

    status = Path("/proc/self/status")

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self.bytes: int | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._read("VmRSS")
        except OSError:
            self.before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            self.bytes = max(0, self._read("VmHWM") - self.before)

    def _read(self, key: str) -> int:
        line = next(x for x in self.status.read_text().splitlines() if x.startswith(key))
        return int(line.split()[1]) * 1024


def timed(run) -> tuple[float, float]:
    units = getattr(run, "units", 1)
    cpu, wall, n = time.process_time(), time.perf_counter(), 0
    while True:
        run()
        n += units
        spent = time.perf_counter() - wall
        if spent > 0.05:
            return (time.process_time() - cpu) / n, spent / n


def measure(
    case: Case, implementations: list[Implementation], repeats: int, peak: dict[str, float]
) -> list[Row]:
    inputs = case.make()
    prepared, extra, outputs, samples = {}, {}, {}, {}
    for impl in implementations:
        try:
            ready = impl.prepare(inputs)
        except Unavailable as reason:
            console.print(f"[dim]{case.op} | {case.name} | {impl.name}: left out, {reason}[/dim]")
            continue
        with PeakMemory() as memory:
            start_cpu, start = time.process_time(), time.perf_counter()
            out = ready.run()
            first = time.process_time() - start_cpu, time.perf_counter() - start
        extra[impl.name] = memory.bytes
        outputs[impl.name] = np.asarray(ready.fetch(out), np.float64)
        # A call of many seconds is measured once; its warm-up does not matter.
        units = getattr(ready.run, "units", 1)
        samples[impl.name] = [tuple(x / units for x in first)] if first[1] > 5 else []
        prepared[impl.name] = ready.run
    for _ in range(repeats):
        for name, run in prepared.items():
            if not (samples[name] and samples[name][0][1] > 5):
                samples[name].append(timed(run))

    ours = statistics.median(cpu for cpu, _ in samples[OURS]) if OURS in samples else None
    rows = []
    for name, times in samples.items():
        cpu = statistics.median(c for c, _ in times)
        spread = (max(c for c, _ in times) - min(c for c, _ in times)) / cpu
        difference = None
        if OURS in outputs and name != OURS:
            difference = float(
                np.linalg.norm(outputs[name] - outputs[OURS]) / np.linalg.norm(outputs[OURS])
            )
        rows.append(
            Row(
                op=case.op,
                case=case.name,
                impl=name,
                cpu_s=cpu,
                cpu_spread=spread,
                wall_s=statistics.median(w for _, w in times),
                gflops_per_core=case.flops / cpu / 1e9 if case.flops else None,
                fraction_of_ceiling=(
                    case.flops / cpu / 1e9 / peak["gemm_gflops"]
                    if case.flops
                    else case.bytes / cpu / 1e9 / peak["copy_gbps"]
                ),
                extra_bytes=extra[name],
                ratio_to_ours=cpu / ours if ours else None,
                difference=difference,
                runs=len(times),
            )
        )
    return rows


def show(rows: list[Row], peak: dict[str, float]) -> None:
    table = Table(
        title=f"{platform.processor() or platform.machine()}, {THREADS} thread(s); ceilings: "
        f"{peak['gemm_gflops']:.0f} GFLOP/s GEMM, {peak['copy_gbps']:.1f} GB/s copy"
    )
    for name in ("case", "implementation"):
        table.add_column(name)
    for name in ("CPU s", "+-", "GFLOP/s", "of ceiling", "extra MB", "x ours", "differs"):
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        if last not in (None, (row.op, row.case)):
            table.add_section()
        last = row.op, row.case
        table.add_row(
            f"{row.op} {row.case}",
            row.impl,
            f"{row.cpu_s:.4g}",
            f"{row.cpu_spread:.0%}",
            f"{row.gflops_per_core:.1f}" if row.gflops_per_core else "",
            f"{row.fraction_of_ceiling:.0%}",
            f"{row.extra_bytes / 1e6:.0f}" if row.extra_bytes is not None else "",
            f"{row.ratio_to_ours:.2f}" if row.ratio_to_ours else "",
            f"{row.difference:.1e}" if row.difference is not None else "",
        )
    console.print(table)


def compare_with_base(revision: str, arguments: list[str], rounds: int = 3) -> None:
    """Build `revision` beside this checkout and alternate the two; prints CPU-second ratios."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        tree, site = Path(folder) / "tree", Path(folder) / "site"
        subprocess.run(["git", "worktree", "add", "--detach", tree, revision], cwd=root, check=True)
        try:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
            subprocess.run([*pip, str(tree)], check=True)
            times: dict[str, dict[tuple[str, str], list[float]]] = {"base": {}, "here": {}}
            for _ in range(rounds):
                for side in times:
                    out = Path(folder) / "out.json"
                    environment = dict(os.environ)
                    if side == "base":
                        environment["PYTHONPATH"] = str(site)
                    command = [sys.executable, __file__, *arguments, "--impl", OURS, "--json", out]
                    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                    for row in json.loads(out.read_text())["rows"]:
                        times[side].setdefault((row["op"], row["case"]), []).append(row["cpu_s"])
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=root, check=True)
    table = Table("case", f"{revision} CPU s", "here CPU s", "here / base")
    for key, base in times["base"].items():
        here = times["here"].get(key)
        if here:
            a, b = statistics.median(base), statistics.median(here)
            table.add_row(" ".join(key), f"{a:.4g}", f"{b:.4g}", f"{b / a:.3f}")
    console.print(table)


@click.command(help=__doc__)
@click.option("--suite", default="cpu", show_default=True)
@click.option("--op", default=None, help="only this op")
@click.option("--case", "case_filter", default=None, help="only cases whose name contains this")
@click.option("--impl", default=None, help="only this implementation")
@click.option("--repeats", default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write the rows here")
@click.option("--plot", "plot_folder", type=click.Path(file_okay=False), help="write plots here")
@click.option("--base", default=None, help="compare this git revision with the checkout")
def main(suite, op, case_filter, impl, repeats, json_path, plot_folder, base) -> None:
    if base:
        arguments = ["--suite", suite, "--repeats", str(repeats)]
        for flag, value in (("--op", op), ("--case", case_filter)):
            arguments += [flag, value] if value else []
        compare_with_base(base, arguments)
        return
    registry = load_all()
    peak = {"gemm_gflops": ceilings.gemm_gflops(), "copy_gbps": ceilings.copy_gbps()}
    rows: list[Row] = []
    for case in registry.cases:
        if case.suite != suite or (op and case.op != op):
            continue
        if case_filter and case_filter not in case.name:
            continue
        implementations = [
            i
            for i in registry.implementations
            if i.op == case.op and (impl is None or i.name == impl)
        ]
        rows += measure(case, implementations, repeats, peak)
    show(rows, peak)
    result = {
        "machine": platform.platform(),
        "date": time.strftime("%Y-%m-%d"),
        "threads": int(THREADS),
        "ceilings": peak,
        "rows": [asdict(row) for row in rows],
    }
    if json_path:
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
    if plot_folder:
        from benchmarks.plots import plot_attention

        plot_attention(result, Path(plot_folder))


if __name__ == "__main__":
    main()
