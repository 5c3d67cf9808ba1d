"""The command line: ``chunkdelta prefill``, ``plan``, ``doctor`` and ``selftest``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

DEFAULT_TOKENS = 40960
COMPARE_TOKENS = 16384
STOCK_STEP_SIZE = 2048  # mlx-lm's default
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT


class Refused(click.ClickException):
    """Something that was asked for cannot be done: one sentence and exit code 2."""

    exit_code = EXIT_REFUSED

    def show(self, file: Any = None) -> None:
        click.echo(f"chunkdelta: {self.message}", err=True)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the library's errors about what was asked into refusals."""
    try:
        yield
    except (ValueError, MemoryError, OSError) as error:
        raise Refused(" ".join(str(error).split())) from error
    except ImportError as error:
        raise Refused(f"{error} (pip install 'chunkdelta[lm]')") from error


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed; a second press interrupts at once."""
    pressed = False

    def on_sigint(signum: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def _stop(message: str) -> NoReturn:
    click.echo(f"chunkdelta: {message}", err=True)
    sys.exit(EXIT_INTERRUPTED)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="chunkdelta")
def commands() -> None:
    """Long-prompt prefill for hybrid models on MLX, in memory known in advance."""


@commands.command()
@click.option("--model", metavar="PATH", help="An mlx-lm model directory.")
@click.option("--text", metavar="FILE", help="The prompt's text (UTF-8).")
@click.option("--tokens", type=click.IntRange(1), help="Prompt length. [default: 40960]")
@click.option("--chunk-size", type=click.IntRange(1), default=512, show_default=True)
@click.option(
    "--max-context",
    type=click.IntRange(1),
    default=131072,
    show_default=True,
    help="Longest context admitted; memory is taken for the prompt and new tokens only.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    help="Tokens to decode after the prompt.",
)
@click.option(
    "--kv-format", metavar="K[/V]", help="Such as f32, bf16, q8_0. [default: the model's]"
)
@click.option("--save-prefix", metavar="FILE", help="Keep the prompt's caches (*.safetensors).")
@click.option("--load-prefix", metavar="FILE", help="Start from caches kept with --save-prefix.")
@click.option("--compare", is_flag=True, help="Run stock mlx-lm too. [default of --tokens: 16384]")
@click.option("--plot", metavar="FILE.png", help="Draw memory and tokens/s per chunk.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prefill(
    model: str | None,
    text: str | None,
    tokens: int | None,
    chunk_size: int,
    max_context: int,
    max_tokens: int,
    kv_format: str | None,
    save_prefix: str | None,
    load_prefix: str | None,
    compare: bool,
    plot: str | None,
    as_json: bool,
) -> None:
    """Prefill a long prompt in chunks and hold its memory against the plan.

    Without options: 40,960 tokens of Python's own documentation, through a real Qwen tokenizer and
    an embedded model of the Qwen3.5 architecture with seeded weights.
    """
    from chunkdelta.loop.memory import plan_memory
    from chunkdelta.loop.prefill import PrefillCancelled
    from chunkdelta.measure import Job, available_bytes, run_prefill, run_stock

    count = tokens or (COMPARE_TOKENS if compare else DEFAULT_TOKENS)
    with _refusals(), _interruptible() as pressed:
        if count + max_tokens > max_context:
            raise ValueError(
                f"expected prompt and new tokens to fit into --max-context {max_context:,}; "
                f"got {count:,} + {max_tokens:,}"
            )
        if save_prefix is not None and not save_prefix.endswith(".safetensors"):
            raise ValueError(f"expected --save-prefix to end in .safetensors; got {save_prefix}")
        job = Job(model, text)
        plan_memory(
            job.shape, count, max_tokens=max_tokens, chunk_size=chunk_size, kv_format=kv_format
        ).require(available_bytes())
        prompt = job.tokenize(count)
        accelerated = _accelerated(job)
        with _progress() as show:
            try:
                run = run_prefill(
                    accelerated,
                    prompt,
                    chunk_size=chunk_size,
                    max_tokens=max_tokens,
                    kv_format=kv_format,
                    load_prefix_from=load_prefix,
                    save_prefix_to=save_prefix,
                    fingerprint=job.fingerprint(),
                    on_chunk=show,
                    should_stop=pressed,
                )
            except PrefillCancelled as stop:
                _stop(f"stopped after {stop.done:,} of {stop.total:,} tokens")
        stock = []
        if compare:
            from chunkdelta.models.mlx_lm import restore

            for step in sorted({chunk_size, STOCK_STEP_SIZE}):
                if pressed():
                    break
                click.echo(f"stock mlx-lm, step size {step} ...", err=True)
                stock.append(run_stock(restore(accelerated), prompt, step_size=step))
        if pressed():
            _stop("stopped after the prefill")
        if plot is not None:
            from chunkdelta.report import plot_run

            plot_run(run, plot)

    if as_json:
        result = run.to_json()
        if stock:
            result["stock"] = [other.to_json() for other in stock]
        click.echo(json.dumps(result))
        return
    from chunkdelta.report import run_table

    console = Console()
    console.print(run_table(run, stock))
    if run.continuation:
        continuation = job.tokenizer.decode(run.continuation)
        console.print(f"{len(run.continuation)} tokens more: {continuation!r}", markup=False)


def _accelerated(job: Any) -> Any:
    from chunkdelta.models.mlx_lm import accelerate

    return accelerate(job.load())


@contextmanager
def _progress() -> Iterator[Callable[[Any, Any], None]]:
    """A progress bar on stderr: tokens, tokens/s, memory now against planned."""
    from chunkdelta.loop.memory import format_bytes

    bar = Progress(
        TextColumn("prefill"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TextColumn("{task.fields[now]} of {task.fields[planned]} planned"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task: Any = None
        last = 0

        def show(sample: Any, plan: Any) -> None:
            nonlocal task, last
            fields = {
                "speed": (sample.done - last) / sample.seconds,
                "now": format_bytes(sample.peak_bytes),
                "planned": format_bytes(plan.total_bytes),
            }
            last = sample.done
            if task is None:
                task = bar.add_task("prefill", total=plan.prompt_tokens, **fields)
            bar.update(task, completed=sample.done, **fields)

        yield show


@commands.command()
@click.argument("target", metavar="MODEL")
@click.option("--tokens", type=click.IntRange(1), default=131072, show_default=True)
@click.option("--max-tokens", type=click.IntRange(0), default=0, show_default=True)
@click.option("--chunk-size", type=click.IntRange(1), default=512, show_default=True)
@click.option("--page-size", type=click.IntRange(16), default=64, show_default=True)
@click.option(
    "--kv-format", metavar="K[/V]", help="Such as f32, bf16, q8_0. [default: the model's]"
)
@click.option(
    "--bits",
    type=click.Choice(["2", "3", "4", "5", "6", "8", "16"]),
    default="4",
    show_default=True,
    help="Bits per weight of a named shape.",
)
@click.option(
    "--memory",
    type=click.FloatRange(0, min_open=True),
    metavar="GB",
    help="To fit in. [default: this machine's]",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Keep a state for prefix reuse so often. [default: none]",
)
@click.option(
    "--prefix-budget", type=click.FloatRange(0), default=0, metavar="GB", help="For other prompts."
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    help="Whose kernels run; gpu is a Mac's. [default: this machine's]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    target: str,
    tokens: int,
    max_tokens: int,
    chunk_size: int,
    page_size: int,
    kv_format: str | None,
    bits: str,
    memory: float | None,
    device: str | None,
    checkpoint_every: int | None,
    prefix_budget: float,
    as_json: bool,
) -> None:
    """Print the memory plan of MODEL: a model directory, or a named shape.

    Named shapes: qwen3.5-9b, qwen3.5-27b, qwen3.5-35b-a3b, qwen3-next-80b (also 9b, 27b, ...).
    Nothing is loaded.
    """
    import psutil

    from chunkdelta.loop.memory import plan_memory
    from chunkdelta.models.shapes import named_shape, shape_from_directory
    from chunkdelta.report import plan_table, verdict

    with _refusals():
        if Path(target).is_dir():
            shape = shape_from_directory(target)
        else:
            shape = named_shape(target, bits=int(bits))
        planned = plan_memory(
            shape,
            tokens,
            max_tokens=max_tokens,
            chunk_size=chunk_size,
            page_size=page_size,
            kv_format=kv_format,
            device=device,
            checkpoints=0 if checkpoint_every is None else (tokens - 1) // checkpoint_every,
            prefix_bytes=round(prefix_budget * 1e9),
        )
    limit = psutil.virtual_memory().total if memory is None else round(memory * 1e9)
    if as_json:
        click.echo(json.dumps(planned.to_json() | planned.against(limit)))
        return
    console = Console()
    console.print(plan_table(planned))
    console.print(verdict(planned, limit))
    one_call = planned.one_call_bytes / 1e9
    console.print(f"One stock call on the whole prompt would need {one_call:,.1f} GB.")


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show versions, backend, ABI match and kernels; exit code 1 if something is wrong."""
    from chunkdelta.env import diagnose

    findings = diagnose()
    if as_json:
        click.echo(json.dumps({f.name: f.value for f in findings}))
    else:
        table = Table(show_header=False)
        for finding in findings:
            mark = "[green]ok[/]" if finding.ok else "[red]wrong[/]"
            table.add_row(finding.name, finding.value, mark)
        Console().print(table)
    if not all(f.ok for f in findings):
        sys.exit(1)


@commands.command()
def selftest() -> None:
    """Run the parity checks of every kernel on this machine's backend."""
    from chunkdelta.selftest import main as run_selftest

    sys.exit(run_selftest())


def main() -> None:
    """Entry point of the ``chunkdelta`` script."""
    try:
        commands(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _stop("interrupted")
