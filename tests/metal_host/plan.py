"""Executing a launch plan on NumPy arrays.

A plan is the plain data of src/core/launch_plan.h: what the macOS encoder executes through MLX, this
module executes on the real .metal sources. Plans are taken by their field names (``launches[].source``,
``.kernel``, ``.constants``, ``.buffers``, ``.params``, ``.threadgroup_memory``, ``.grid``,
``.threadgroup``, and ``scratch``, ``host_data``), whatever Python type holds them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .constants import Constant
from .flatten import METAL_ROOT, flatten
from .memory import READ, READ_WRITE, WRITE, Memory, Options
from .report import UNWRITTEN_OUTPUT, BarrierSite, Counters, MetalError, Report
from .run import DEFAULT, Array, LaunchResult, Library, Mutation, refuse_overlap

MAX_PARAMS_BYTES = 4096  # of setBytes


class PlanLaunch(Protocol):
    """The fields of Launch in src/core/launch_plan.h."""

    source: str
    kernel: str
    constants: Iterable[Any]
    buffers: Iterable[Any]
    params: Iterable[Any]
    threadgroup_memory: Iterable[Any]
    grid: Sequence[int]
    threadgroup: Sequence[int]


class Plan(Protocol):
    """The fields of Plan in src/core/launch_plan.h."""

    op: str
    launches: Sequence[PlanLaunch]
    scratch: Iterable[Any]
    host_data: Iterable[Any]


@dataclass(frozen=True)
class PlanResult:
    """What came of a plan.

    Attributes:
      arrays: a new array for every role of the caller's that some launch may write.
      launches: reports, counters and barrier sites of each launch.
      reports: all of them, and outputs that were not written.
    """

    arrays: dict[str, Array]
    launches: tuple[LaunchResult, ...]
    reports: tuple[Report, ...]

    @property
    def counters(self) -> Counters:
        """The work of all launches."""
        return functools.reduce(lambda a, b: a + b, (launch.counters for launch in self.launches))

    @property
    def barrier_sites(self) -> tuple[BarrierSite, ...]:
        """The barriers that any launch passed."""
        return tuple(site for launch in self.launches for site in launch.barrier_sites)


@functools.lru_cache(maxsize=256)
def plan_library(root: Path, source: str, kernel: str, mode: str, flattened: bool) -> Library:
    """The library that a launch names, with that one kernel: the others would compile for nothing.

    Args:
      root: the directory of Metal sources.
      source: path below it, without suffix.
      kernel: host name.
      mode: "check" or "fast".
      flattened: compile one text without an include path, as MLX's JIT does, else the files.
    """
    path = root / f"{source}.metal"
    if flattened:
        text = flatten(path, [root])
        return Library(text, mode=mode, name=path.name, only=re.escape(kernel))
    return Library(path, mode=mode, include=[root], only=re.escape(kernel))


def execute_plan(
    plan: Plan,
    arrays: Mapping[str, Array],
    *,
    outputs: Collection[str] = (),
    partial_outputs: Collection[str] = (),
    mode: str = "check",
    root: Path = METAL_ROOT,
    flattened: bool = False,
    options: Options = DEFAULT,
    mutation: Mutation | None = None,
    raise_errors: bool = True,
) -> PlanResult:
    """Executes a launch plan on the host.

    Args:
      plan: made by a plan function of ``chunkdelta._ext.plans``.
      arrays: an array for every role that is neither scratch nor host data. They are not changed:
        results come as new arrays. Roles that hold the same array are one buffer.
      outputs: roles that have no content before; each byte must be written by some launch.
      partial_outputs: roles that have no content before and may be written in part.
      mode: "check" or "fast".
      root: directory of the Metal sources.
      flattened: compile each source as one text without an include path.
      options: thread order, poison, limits.
      mutation: a barrier to weaken in every launch that has it.
      raise_errors: raise MetalError if there are reports, else only return them.

    Raises:
      MetalError: a launch broke a rule, wrote a role that the plan binds for reading, or left an
        output unwritten. The launches after the first that broke one are not executed.
      ValueError: the arrays are not those that the plan names.

    Example:
      >>> from chunkdelta import _ext
      >>> plan = _ext.plans.causal_conv1d(
      ...     "float32", 8, 4, [0, 5], bias=False, initial_state=False, mask=False, silu=True)
      >>> arrays = {
      ...     "x": np.ones((1, 5, 8), np.float32), "weight": np.ones((8, 4), np.float32),
      ...     "y": np.empty((1, 5, 8), np.float32), "state": np.empty((1, 3, 8), np.float32)}
      >>> result = execute_plan(plan, arrays, outputs=["y", "state"])
      >>> " ".join(f"{y:.2f}" for y in result.arrays["y"][0, :, 0])  # silu(1), ... silu(4), silu(4)
      '0.73 1.76 2.86 3.93 3.93'
    """
    launches = list(plan.launches)
    scratch = {s.role: s.bytes for s in plan.scratch}
    host_data = {h.role: bytes(h.bytes) for h in plan.host_data}
    _check_roles(plan.op, launches, arrays, {*scratch, *host_data}, {*outputs, *partial_outputs})

    written = {b.role for launch in launches for b in launch.buffers if _access(b.access) & WRITE}
    refuse_overlap(arrays, written)
    memory = Memory(mode == "check", options)
    numbers: dict[str, int] = {}
    shared: dict[tuple[int, int], int] = {}
    for role, array in arrays.items():
        key = (array.ctypes.data, array.nbytes)
        if key not in shared or not array.nbytes:
            defined = role not in outputs and role not in partial_outputs
            shared[key] = memory.add(array, f"'{role}'", defined=defined)
        numbers[role] = shared[key]
    for role, size in scratch.items():
        numbers[role] = memory.allocate(size, f"scratch '{role}'", defined=False)
    for role, content in host_data.items():
        numbers[role] = memory.add_bytes(content, f"host data '{role}'")

    results: list[LaunchResult] = []
    reports: list[Report] = []
    for i, launch in enumerate(launches):
        library = plan_library(root, launch.source, launch.kernel, mode, flattened)
        bindings = [
            (b.index, numbers[b.role], b.offset_bytes, _access(b.access)) for b in launch.buffers
        ]
        for params in launch.params:
            content = bytes(params.bytes)
            if len(content) > MAX_PARAMS_BYTES:
                text = f"params of {len(content)} bytes, the limit is {MAX_PARAMS_BYTES}"
                reports.append(Report("limit", text))
            number = memory.add_bytes(content, f"params({params.index}) of launch {i}")
            bindings.append((params.index, number, 0, READ))
        _check_indices(plan.op, launch.kernel, bindings)
        result = library.launch(
            memory,
            launch.kernel,
            launch.grid,
            launch.threadgroup,
            bindings,
            constants={c.index: _typed(c) for c in launch.constants},
            threadgroup_memory={t.index: t.bytes for t in launch.threadgroup_memory},
            options=options,
            mutation=mutation,
        )
        results.append(result)
        reports += result.reports
        if reports:
            break
    finished = len(results) == len(launches) and not reports
    for role in outputs if finished else ():
        count, first = memory.undefined(numbers[role])
        if count:
            text = f"{count} bytes of '{role}' were never written, the first at byte {first}"
            reports.append(Report(UNWRITTEN_OUTPUT, text))
    if reports and raise_errors:
        raise MetalError(reports)

    out = {}
    for role in written & arrays.keys():
        out[role] = np.empty(arrays[role].shape, arrays[role].dtype)
        memory.read_into(numbers[role], out[role])
    return PlanResult(out, tuple(results), tuple(reports))


_CONSTANT_TYPES = {"bool": np.bool_, "int": np.int32, "uint": np.uint32, "float": np.float32}


def _typed(constant: Any) -> Constant:
    """The value in the type that the plan gives it, which must be the declared one."""
    value: Constant = _CONSTANT_TYPES[constant.type](constant.value)
    return value


def _access(access: Any) -> int:
    name = getattr(access, "name", str(access)).rsplit(".", 1)[-1]
    try:
        return {"Read": READ, "Write": WRITE, "ReadWrite": READ_WRITE}[name]
    except KeyError:
        raise ValueError(
            f"[execute_plan] expected access Read, Write or ReadWrite; got {access!r}"
        ) from None


def _check_roles(
    op: str,
    launches: Sequence[PlanLaunch],
    arrays: Mapping[str, Array],
    own: Collection[str],
    outputs: Collection[str],
) -> None:
    named = {b.role for launch in launches for b in launch.buffers}
    written = {b.role for launch in launches for b in launch.buffers if _access(b.access) & WRITE}
    needed = named - set(own)
    if needed != set(arrays):
        raise ValueError(
            f"[execute_plan] expected arrays for the roles of {op}, {sorted(needed)};"
            f" got {sorted(arrays)}"
        )
    if not set(outputs) <= written & set(arrays):
        raise ValueError(
            f"[execute_plan] expected outputs among the roles that {op} writes,"
            f" {sorted(written & set(arrays))}; got {sorted(outputs)}"
        )


def _check_indices(op: str, kernel: str, bindings: Sequence[tuple[int, int, int, int]]) -> None:
    indices = [b[0] for b in bindings]
    if len(set(indices)) != len(indices):
        raise ValueError(
            f"[execute_plan] expected one binding for each index of {kernel} in {op};"
            f" got {sorted(indices)}"
        )
