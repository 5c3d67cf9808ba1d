"""What a launch has to say: findings with file and line, counters, barrier sites."""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Kind of runtime/report.h, in its order.
KINDS = (
    "out-of-bounds",
    "data-race",
    "uninitialised-read",
    "barrier-divergence",
    "simd-divergence",
    "private-memory",
    "undefined-behaviour",
    "fault",
    "limit",
    "binding",
    "read-only-write",
    "unset-constant",
    "hang",
)
# Found by Python after the launch.
UNWRITTEN_OUTPUT = "unwritten-output"


@dataclass(frozen=True)
class Report:
    """One finding.

    Attributes:
      kind: one of KINDS or "unwritten-output".
      text: what happened, in a sentence.
      where: ``file:line`` of the access or call, and of the other access of a race; empty where the
        text names its place or there is none.
      count: how often it happened at this place.
      thread: index in the threadgroup of the first thread that did it, None outside any thread.
      threadgroup: position in the grid of its threadgroup.
    """

    kind: str
    text: str
    where: tuple[str, ...] = ()
    count: int = 1
    thread: int | None = None
    threadgroup: tuple[int, ...] | None = None

    def __str__(self) -> str:
        place = " and ".join(self.where)
        times = f" ({self.count} times)" if self.count > 1 else ""
        who = "" if self.thread is None else f" [thread {self.thread} of {self.threadgroup}]"
        return f"{self.kind}: {place + ': ' if place else ''}{self.text}{times}{who}"


class MetalError(RuntimeError):
    """A launch broke a rule; ``reports`` has the findings."""

    def __init__(self, reports: Iterable[Report]):
        self.reports = tuple(reports)
        super().__init__("\n".join(str(r) for r in self.reports))


@dataclass(frozen=True)
class Counters:
    """Work of a launch, counted; none of it depends on the machine.

    Collectives are counted once per simdgroup, barriers once per threadgroup. Bytes are what the
    instructions of all threads ask for after the compiler's own reuse (level-1 traffic, not DRAM);
    they are None in fast mode, which does not see accesses.
    """

    mma: int = 0  # 8x8x8 matrix products
    simd_reductions: int = 0  # simd_sum, simd_max, prefix sums ...
    simd_shuffles: int = 0
    simd_votes: int = 0  # simd_ballot, simd_all, simd_any
    quad_functions: int = 0
    matrix_loads: int = 0
    matrix_stores: int = 0
    simdgroup_barriers: int = 0
    threadgroup_barriers: int = 0
    device_bytes_read: int | None = None
    device_bytes_written: int | None = None
    threadgroup_bytes_read: int | None = None
    threadgroup_bytes_written: int | None = None
    threadgroup_memory: int = 0  # peak bytes of one threadgroup

    def __add__(self, other: Counters) -> Counters:
        """The work of two launches: sums, and the larger threadgroup memory."""
        mine, theirs = asdict(self), asdict(other)
        total: dict[str, Any] = {k: _sum(v, theirs[k]) for k, v in mine.items()}
        total["threadgroup_memory"] = max(self.threadgroup_memory, other.threadgroup_memory)
        return Counters(**total)


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


@dataclass(frozen=True)
class BarrierSite:
    """A barrier of the source that the launch passed.

    Attributes:
      kind: "threadgroup_barrier" or "simdgroup_barrier".
      flags: bits of the memory it orders: 1 device, 2 threadgroup.
      hits: how often it was passed, once per threadgroup or simdgroup.
    """

    file: str
    line: int
    column: int
    kind: str
    flags: int
    hits: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}:{self.column} {self.kind}"


class LineTable:
    """Maps offsets in a shared object to source lines, by its DWARF line programs."""

    def __init__(self, path: Path):
        from elftools.elf.elffile import ELFFile

        rows: list[tuple[int, str]] = []
        with path.open("rb") as stream:
            dwarf = ELFFile(stream).get_dwarf_info()
            for unit in dwarf.iter_CUs():
                program = dwarf.line_program_for_CU(unit)
                if program is not None:
                    rows += _rows(program)
        rows.sort(key=lambda row: row[0])
        self._addresses = [address for address, _ in rows]
        self._places = [place for _, place in rows]

    def place(self, offset: int) -> str:
        """``file:line`` of the instruction at ``offset``, or the offset itself."""
        i = bisect.bisect_right(self._addresses, offset) - 1
        return self._places[i] if i >= 0 and self._places[i] else hex(offset)


def _rows(program: object) -> list[tuple[int, str]]:
    header = program.header  # type: ignore[attr-defined]
    first = 0 if header["version"] >= 5 else 1  # DWARF 5 counts files from 0
    files = [os.path.basename(f.name.decode()) for f in header["file_entry"]]
    rows = []
    for entry in program.get_entries():  # type: ignore[attr-defined]
        state = entry.state
        if state is None:
            continue
        if state.end_sequence:
            rows.append((state.address, ""))
        elif state.line:
            rows.append((state.address, f"{files[state.file - first]}:{state.line}"))
    return rows


@functools.lru_cache(maxsize=16)
def line_table(path: Path) -> LineTable:
    """The line table of a shared object, read once."""
    return LineTable(path)
