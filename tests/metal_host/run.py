"""Libraries of kernels and their launches."""

from __future__ import annotations

import ctypes as C
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .build import build
from .constants import Constant, encode_constants
from .memory import READ, READ_WRITE, Memory, Options
from .native import Entry, runtime
from .report import (
    KINDS,
    UNWRITTEN_OUTPUT,
    BarrierSite,
    Counters,
    MetalError,
    Report,
    line_table,
)
from .toolchain import scratch_file

Array = npt.NDArray[np.generic]
Buffer = Array | np.generic | bytes | None
DEFAULT = Options()


@dataclass(frozen=True)
class Mutation:
    """A barrier to weaken while a kernel runs, without compiling it anew.

    Attributes:
      file, line, column: of the barrier, as a BarrierSite has them.
      skip: it is not executed at all.
      drop_flags: bits taken off its memory flags: 1 device, 2 threadgroup.
    """

    file: str
    line: int
    column: int
    skip: bool = False
    drop_flags: int = 0

    def __str__(self) -> str:
        names = {1: "mem_device", 2: "mem_threadgroup"}
        change = "skipped" if self.skip else f"without {names.get(self.drop_flags, 'flags')}"
        return f"{Path(self.file).name}:{self.line}:{self.column} {change}"


@dataclass(frozen=True)
class LaunchResult:
    """What came of a launch; the arrays given as outputs hold its results."""

    reports: tuple[Report, ...]
    counters: Counters
    barrier_sites: tuple[BarrierSite, ...]
    seconds: float


class Library:
    """The kernels of one .metal source, compiled for the host.

    Args:
      source: path of a .metal file, or the text itself (anything with a line break in it).
      mode: "check" finds races, accesses out of bounds, uninitialised reads, divergence, undefined
        behaviour and broken limits; "fast" is for numbers: it still has guard pages, divergence
        and limits, and runs 2 to 3 times as fast.
      constants: values of function constants, by index or name; a launch may add to them.
      name: what reports call the source; default its file name, or "kernel.metal".
      include: directories for ``#include "..."``. The JIT form that MLX compiles, one flattened
        text, is tested by giving none.
      defines: preprocessor definitions, ``NAME`` or ``NAME=value``.
      only: regular expression on host names: leaves out the other instantiations, which compile
        for seconds each.
      auto_init: "pattern" or "zero", what private variables hold that the kernel does not
        initialise. Results that depend on it are a mistake of the kernel.

    Raises:
      CompileError, RewriteError: the source is refused, with file and line.

    Example:
      >>> library = Library('''
      ... #include <metal_stdlib>
      ... using namespace metal;
      ... kernel void twice(const device float* x [[buffer(0)]], device float* y [[buffer(1)]],
      ...                   uint i [[thread_position_in_grid]]) { y[i] = 2 * x[i]; }
      ... ''')
      >>> x, y = np.arange(64, dtype=np.float32), np.empty(64, np.float32)
      >>> result = library.run("twice", (2, 1, 1), (32, 1, 1), {0: x, 1: y}, outputs=[1])
      >>> bool((y == 2 * x).all()), result.counters.device_bytes_read
      (True, 256)
    """

    def __init__(
        self,
        source: str | Path,
        *,
        mode: str = "check",
        constants: Mapping[int | str, Constant] | None = None,
        name: str | None = None,
        include: Sequence[str | Path] = (),
        defines: Sequence[str] = (),
        only: str | None = None,
        auto_init: str = "pattern",
    ):
        if mode not in ("check", "fast"):
            raise ValueError(f'[metal_host] expected mode "check" or "fast"; got {mode!r}')
        if isinstance(source, Path) or "\n" not in source:
            path = Path(source)
            source, name = path.read_text(encoding="ascii"), name or path.name
        start = time.perf_counter()
        self.mode = mode
        self.constants: dict[int | str, Constant] = dict(constants or {})
        self._built = build(
            source,
            name=name or "kernel.metal",
            mode=mode,
            include=include,
            defines=defines,
            only=only,
            auto_init=auto_init,
        )
        self.compile_seconds = time.perf_counter() - start
        self._loaded: dict[tuple[tuple[int, bytes], ...], _Module] = {}

    @property
    def kernels(self) -> list[str]:
        """Host names of the entry points."""
        return [e.host_name for e in self._built.entries]

    def run(
        self,
        kernel: str,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        buffers: Mapping[int, Buffer],
        *,
        outputs: Collection[int] = (),
        partial_outputs: Collection[int] = (),
        inout: Collection[int] = (),
        constants: Mapping[int | str, Constant] | None = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        grid_in_threads: bool = False,
        options: Options = DEFAULT,
        mutation: Mutation | None = None,
        raise_errors: bool = True,
    ) -> LaunchResult:
        """Runs one kernel on NumPy arrays.

        Args:
          kernel: host name of the entry point.
          grid: threadgroups in x, y, z (dispatchThreadgroups), or threads if ``grid_in_threads``
            (dispatchThreads, the last threadgroups may be smaller).
          threadgroup: threads in x, y, z.
          buffers: argument of each ``[[buffer(index)]]``: an array, or bytes for a params struct;
            None leaves it unbound. Any dtype; bfloat16 as ml_dtypes' or as uint16. Binding one
            array twice aliases it.
          outputs: indices whose arrays have no content before and must be written completely.
          partial_outputs: indices whose arrays have no content before and may be written in part.
          inout: indices whose arrays are read and written. All other buffers are read-only.
          constants: function constants of this launch, on top of the library's.
          threadgroup_memory: bytes of each ``[[threadgroup(index)]]`` argument.
          options: thread order, poison, limits.
          mutation: a barrier to weaken.
          raise_errors: raise MetalError if there are reports, else only return them.

        Raises:
          MetalError: the launch broke a rule.
          KeyError: there is no such kernel.
          ValueError: an output is not C-contiguous and writeable, two arrays overlap in part, a
            constant does not fit its declaration.
        """
        written = {*outputs, *partial_outputs, *inout}
        _check_arrays(buffers, written)
        memory = Memory(self.mode == "check", options)
        numbers: dict[int, int] = {}
        shared: dict[tuple[int, int], int] = {}
        for index, value in buffers.items():
            if value is None:
                continue
            if isinstance(value, bytes):
                numbers[index] = memory.add_bytes(value, f"buffer({index})")
            elif not isinstance(value, np.ndarray):
                numbers[index] = memory.add(np.asarray(value), f"buffer({index})")
            else:
                key = (value.ctypes.data, value.nbytes)
                if key not in shared or not value.nbytes:
                    undefined = index in outputs or index in partial_outputs
                    shared[key] = memory.add(value, f"buffer({index})", defined=not undefined)
                numbers[index] = shared[key]
        access = {i: READ_WRITE if i in written else READ for i in numbers}
        result = self.launch(
            memory,
            kernel,
            grid,
            threadgroup,
            [(i, number, 0, access[i]) for i, number in numbers.items()],
            constants=constants,
            threadgroup_memory=threadgroup_memory,
            grid_in_threads=grid_in_threads,
            options=options,
            mutation=mutation,
        )
        reports = list(result.reports)
        for index in written & numbers.keys():
            memory.read_into(numbers[index], np.asarray(buffers[index]))
        if not any(r.kind in ("out-of-bounds", "fault", "hang", "limit") for r in reports):
            reports += unwritten(memory, {f"buffer({i})": numbers[i] for i in outputs})
        if reports and raise_errors:
            raise MetalError(reports)
        return LaunchResult(tuple(reports), result.counters, result.barrier_sites, result.seconds)

    def launch(
        self,
        memory: Memory,
        kernel: str,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        bindings: Sequence[tuple[int, int, int, int]],
        *,
        constants: Mapping[int | str, Constant] | None = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        grid_in_threads: bool = False,
        options: Options = DEFAULT,
        mutation: Mutation | None = None,
    ) -> LaunchResult:
        """Runs one kernel on buffers that exist: the layer below ``run`` and ``execute_plan``.

        Args:
          bindings: (index, buffer number of ``memory``, offset in bytes, READ | WRITE bits).
        """
        rt = runtime()
        module = self._module({**self.constants, **(constants or {})})
        if kernel not in module.entries:
            raise KeyError(f"no kernel {kernel!r}; there are: {', '.join(sorted(module.entries))}")
        options.apply()
        rt.mh_unbind_all()
        for binding in bindings:
            memory.bind(*binding)
        for index, size in (threadgroup_memory or {}).items():
            rt.mh_set_threadgroup_argument(index, size)
        module.declare_unset()
        if mutation is None:
            rt.mh_set_mutation(None, 0, 0, 0, 0)
        else:
            rt.mh_set_mutation(
                mutation.file.encode(),
                mutation.line,
                mutation.column,
                mutation.skip,
                mutation.drop_flags,
            )
        threads = (
            [*grid] if grid_in_threads else [a * b for a, b in zip(grid, threadgroup, strict=True)]
        )
        start = time.perf_counter()
        rt.mh_launch(
            module.entries[kernel], (C.c_uint32 * 3)(*threads), (C.c_uint32 * 3)(*threadgroup)
        )
        seconds = time.perf_counter() - start
        return LaunchResult(self._reports(), self._counters(), _barrier_sites(), seconds)

    def _module(self, constants: Mapping[int | str, Constant]) -> _Module:
        values = encode_constants(self._built.rewritten.constants, constants)
        key = tuple(sorted(values.items()))
        if key not in self._loaded:
            self._loaded[key] = _Module(self._built.path, values)
        return self._loaded[key]

    def _reports(self) -> tuple[Report, ...]:
        rt = runtime()
        raw = rt.mh_reports()
        out = []
        for i in range(rt.mh_num_reports()):
            r = raw[i]
            places = [line_table(self._built.path).place(pc) for pc in (r.pc, r.other_pc) if pc]
            out.append(
                Report(
                    kind=KINDS[r.kind],
                    text=r.text.decode(errors="replace"),
                    where=tuple(places),
                    count=r.count,
                    thread=r.thread if r.thread >= 0 else None,
                    threadgroup=tuple(r.threadgroup) if r.thread >= 0 else None,
                )
            )
        return tuple(out)

    def _counters(self) -> Counters:
        raw = runtime().mh_counters().contents
        barrier, reduce, shuffle, vote, mma, load, store, quad = raw.ops
        bytes_moved = {}
        if self.mode == "check":
            bytes_moved = {
                "device_bytes_read": raw.device_bytes_read,
                "device_bytes_written": raw.device_bytes_written,
                "threadgroup_bytes_read": raw.threadgroup_bytes_read,
                "threadgroup_bytes_written": raw.threadgroup_bytes_written,
            }
        return Counters(
            mma=mma,
            simd_reductions=reduce,
            simd_shuffles=shuffle,
            simd_votes=vote,
            quad_functions=quad,
            matrix_loads=load,
            matrix_stores=store,
            simdgroup_barriers=barrier,
            threadgroup_barriers=raw.threadgroup_barriers,
            threadgroup_memory=raw.threadgroup_memory,
            **bytes_moved,
        )


class _Module:
    """A shared object, loaded with one set of function constants.

    The constants are read while it is loaded, so each set needs a copy of its own: dlopen gives the
    same object for the same file.
    """

    def __init__(self, path: Path, constants: Mapping[int, bytes]):
        rt = runtime()
        rt.mh_clear_constants()
        for index, value in constants.items():
            rt.mh_set_constant(index, value, len(value))
        copy = scratch_file(".so")
        try:
            shutil.copyfile(path, copy)
            self._library = C.CDLL(str(copy))
        finally:
            copy.unlink()
        count = C.c_int.in_dll(self._library, "mh_num_entries").value
        table = (Entry * count).in_dll(self._library, "mh_entries")
        base = C.addressof(table)
        self.entries = {e.name.decode(): base + i * C.sizeof(Entry) for i, e in enumerate(table)}
        self._constants = constants

    def declare_unset(self) -> None:
        """Tells the runtime which function constants have no value: nobody may read them."""
        rt = runtime()
        rt.mh_clear_unset_constants()
        declare = self._library.mh_declare_unset_constants
        declare.restype = None
        declare()


def unwritten(memory: Memory, outputs: Mapping[str, int]) -> list[Report]:
    """A report for each of the buffers that was not written completely."""
    reports = []
    for name, number in outputs.items():
        count, first = memory.undefined(number)
        if count:
            text = f"{count} bytes of {name} were never written, the first at byte {first}"
            reports.append(Report(UNWRITTEN_OUTPUT, text))
    return reports


def _check_arrays(buffers: Mapping[int, Buffer], written: Collection[int]) -> None:
    arrays = {i: a for i, a in buffers.items() if isinstance(a, np.ndarray)}
    for index in written:
        a = buffers.get(index)
        if not (isinstance(a, np.ndarray) and a.flags.c_contiguous and a.flags.writeable):
            raise ValueError(
                f"[metal_host] expected a writeable C-contiguous array as output {index};"
                f" got {type(a).__name__}"
            )
    refuse_overlap(arrays, written)


def refuse_overlap(arrays: Mapping[Any, Array], written: Collection[Any]) -> None:
    """Arrays that are written are one with another array, or apart from it.

    Raises:
      ValueError: two of them overlap in part: as separate buffers they would not.
    """
    for index in set(written) & arrays.keys():
        a = arrays[index]
        for other, b in arrays.items():
            same = (a.ctypes.data, a.nbytes) == (b.ctypes.data, b.nbytes)
            if other != index and not same and np.may_share_memory(a, b):
                raise ValueError(
                    f"[metal_host] expected buffers {index} and {other} to be one array or apart;"
                    " got arrays that overlap"
                )


def _barrier_sites() -> tuple[BarrierSite, ...]:
    rt = runtime()
    raw = rt.mh_barrier_sites()
    return tuple(
        BarrierSite(
            file=raw[i].site.file.decode(),
            line=raw[i].site.line,
            column=raw[i].site.column,
            kind="simdgroup_barrier" if raw[i].is_simdgroup else "threadgroup_barrier",
            flags=raw[i].flags,
            hits=raw[i].hits,
        )
        for i in range(rt.mh_num_barrier_sites())
    )
