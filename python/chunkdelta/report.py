"""Tables and plots of runs and plans, as the command line shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from chunkdelta.loop.memory import MemoryPlan, format_bytes
from chunkdelta.measure import Run


def run_table(run: Run, stock: Sequence[Run] = ()) -> Table:
    """A measured run beside its plan, and beside stock mlx-lm's runs of the same prompt."""
    table = Table()
    table.add_column("")
    table.add_column("chunkdelta", justify="right")
    for other in stock:
        table.add_column(f"mlx-lm, step {other.chunk_size:,}", justify="right")
    plan = run.plan
    assert plan is not None
    runs = [run, *stock]
    blank = [""] * len(stock)
    table.add_row("tokens", *(f"{r.tokens:,}" for r in runs))
    table.add_row("chunk size", *(f"{r.chunk_size:,}" for r in runs))
    table.add_row("tokens/s", *(f"{r.tokens_per_s:,.0f}" for r in runs))
    table.add_row("planned peak", format_bytes(plan.total_bytes), *blank)
    table.add_row("measured peak", *(format_bytes(r.peak_bytes) for r in runs))
    table.add_row("transient per chunk", format_bytes(plan.chunk.transient_bytes), *blank)
    table.add_row("one call would need", format_bytes(plan.one_call_bytes), *blank)
    return table


def plan_table(plan: MemoryPlan) -> Table:
    """Every term of a memory plan."""
    title = f"{plan.model.name}, {plan.tokens:,} tokens, chunks of {plan.chunk_size:,}"
    table = Table(title=title, show_footer=True)
    table.add_column("", footer="planned peak")
    table.add_column("bytes", justify="right", footer=f"{plan.total_bytes:,}")
    table.add_column("", justify="right", footer=format_bytes(plan.total_bytes))
    for name, size in plan.rows.items():
        label = f"{name} ({plan.kv_format})" if name == "kv pages" else name
        table.add_row(label, f"{size:,}", format_bytes(size))
    return table


def verdict(plan: MemoryPlan, memory_bytes: int) -> str:
    """Whether a plan fits, and the largest context that would, in a sentence."""
    memory = format_bytes(memory_bytes)
    largest = plan.largest_context(memory_bytes)
    if largest == 0:
        return (
            f"Does not fit in {memory}: weights, states and one chunk alone need "
            f"{format_bytes(plan.fixed_bytes)}."
        )
    start = "Fits" if plan.fits(memory_bytes) else "Does not fit"
    limit = "" if largest is None else f"; the largest context that would is {largest:,} tokens"
    return f"{start} in {memory}{limit}."


def plot_run(run: Run, path: str | Path) -> None:
    """Write a picture of a run: memory against the plan, and tokens/s, per chunk.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError, ValueError: If the file cannot be written or its format is unknown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plan = run.plan
    assert plan is not None
    done = [s.done for s in run.samples]
    lengths = [b - a for a, b in zip([0, *done], done, strict=False)]
    figure, (memory, speed) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
    memory.plot(done, [s.peak_bytes / 1e6 for s in run.samples], label="peak of the chunk")
    memory.axhline(plan.total_bytes / 1e6, color="black", linestyle="--", label="planned peak")
    memory.set_ylabel("MB")
    memory.set_ylim(bottom=0)
    memory.legend(loc="lower right")
    speed.plot(done, [n / s.seconds for n, s in zip(lengths, run.samples, strict=True)])
    speed.set_ylabel("tokens/s")
    speed.set_ylim(bottom=0)
    speed.set_xlabel("tokens in the cache")
    figure.suptitle(f"{plan.model.name}: {run.tokens:,} tokens in chunks of {run.chunk_size:,}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
