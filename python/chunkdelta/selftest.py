"""``chunkdelta selftest``: every op on this machine's backend against float64.

On a Mac this is the one place where the Metal kernels meet Apple's compiler and a real GPU; elsewhere
it checks the CPU kernels of the instruction set in use. Small sizes, under a minute.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import mlx.core as mx
from rich import box
from rich.console import Console
from rich.table import Table

from chunkdelta import _ext
from chunkdelta.env import diagnose
from chunkdelta.selftest_cases import Case, cases
from chunkdelta.testing.compare import relative_error


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    case: Case
    error: float
    bar: float
    kernel: str
    failure: str = ""  # the exception, if there was one
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the error is within its bar."""
        return not self.failure and self.error <= self.bar


def main(console: Console | None = None) -> int:
    """Run all cases on the default device and print the table.

    Args:
        console: where to print. Default: ``None``, standard output.

    Returns:
        0, or 1 if a case failed: the exit code of ``chunkdelta selftest``.
    """
    console = console or Console()
    results = []
    with console.status("") as status:
        for case in cases():
            status.update(f"{case.op} {case.dtype} {case.shape}")
            results.append(check(case))
    console.print(_table(results))
    console.print(paste_block(results), markup=False, highlight=False, soft_wrap=True)
    return 0 if all(r.ok for r in results) else 1


def check(case: Case) -> Result:
    """Run one case; an exception is a failure, not the end of the run.

    Example:
        >>> check(next(cases())).ok
        True
    """
    kernel, start = "", time.perf_counter()
    try:
        kernel = _kernel(case)
        # The output that is furthest beyond its bar, or closest to it, speaks for the case.
        _, error, bar = max(
            (error / max(part.bar, 1e-30), error, part.bar)
            for part in case.run()
            for error in [relative_error(part.actual, part.expected)]
        )
        return Result(case, error, bar, kernel, seconds=time.perf_counter() - start)
    except Exception as failure:
        text = f"{type(failure).__name__}: {failure}"
        return Result(case, float("nan"), 0.0, kernel, text, time.perf_counter() - start)


def paste_block(results: list[Result]) -> str:
    """What to paste into an issue: the machine, the totals, the failures in full."""
    lines = ["```", *(f"{f.name}: {f.value}" for f in diagnose())]
    lines.append(f"device: {mx.default_device()} {mx.device_info()}")
    failed = [r for r in results if not r.ok]
    seconds = sum(r.seconds for r in results)
    lines.append(
        f"selftest: {len(results) - len(failed)} passed, {len(failed)} failed, {seconds:.0f} s"
    )
    for r in failed:
        what = r.failure or f"error {r.error:.2e}, allowed {r.bar:.2e}"
        lines.append(f"FAILED {r.case.op} {r.case.dtype} {r.case.shape} [{r.kernel}]: {what}")
    return "\n".join([*lines, "```"])


def _table(results: list[Result]) -> Table:
    table = Table(title="chunkdelta selftest", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("op, shape")
    table.add_column("dtype", no_wrap=True)
    for column in ("error", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for op, group in itertools.groupby(results, lambda r: r.case.op):
        table.add_row(f"[bold]{op}[/]")
        for r in group:
            verdict = "[green]ok[/]" if r.ok else "[red]FAILED[/]"
            error, bar = ("-", "-") if r.failure else (f"{r.error:.1e}", f"{r.bar:.1e}")
            table.add_row(f"  {r.case.shape}", r.case.dtype, error, bar, verdict, r.kernel)
    return table


def _kernel(case: Case) -> str:
    if mx.default_device().type == mx.cpu:
        return f"cpu {_ext.active_isa()}"
    if case.plan is None:
        return "metal"
    names = dict.fromkeys(launch.kernel for launch in case.plan().launches)
    return " + ".join(names) or "none"
