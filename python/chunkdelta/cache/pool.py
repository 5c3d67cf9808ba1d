"""Pools: arrays that ops write in place, made safe under MLX's lazy graphs.

MLX arrays are immutable values and its graphs are lazy; a pool written in place is neither. So a
pool is an object that owns its arrays, and ops take the object:

* a writer's output aliases its input, and the pool holds that output from then on: later reads
  depend on it;
* a reader returns a token beside its results, one byte that exists once the read is done; the
  next write takes the tokens as inputs, so no write overtakes a read;
* what cannot be made right is refused when the graph is built: tracing (``mx.compile``,
  ``mx.grad``, ``mx.vmap``), copies of the object, and arrays that another thread has not evaluated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import mlx.core as mx
import psutil

from chunkdelta import _ext

T = TypeVar("T")


def refuse_beyond_memory(op: str, what: str, nbytes: int) -> None:
    """Raise ValueError for a pool that this machine's memory cannot hold; MLX would crash."""
    total = psutil.virtual_memory().total
    if nbytes > total:
        raise ValueError(
            f"[{op}] expected {what} of at most {total:,} bytes, this machine's memory; "
            f"got {nbytes:,} bytes"
        )


class _Node:
    """An array and the thread that built it (its stream exists in that thread only)."""

    __slots__ = ("array", "thread")

    def __init__(self, array: mx.array):
        self.array = array
        self.thread = threading.get_ident()

    def available(self) -> bool:
        return bool(_ext.is_available(self.array))


class _Core:
    """What all handles of one pool share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.generation = 0
        self.arrays: list[_Node] = []
        self.reads: list[list[_Node]] = []  # tokens of reads since the last write, per array


class Pool:
    """Base of :class:`KVPages` and :class:`StatePool`: owned arrays and a generation number."""

    def __init__(self, arrays: Sequence[mx.array]):
        """Evaluate the arrays and own them."""
        self._core = _Core()
        self._pinned: int | None = None
        self._add_arrays(arrays)

    def _add_arrays(self, arrays: Sequence[mx.array]) -> None:
        self._check(
            type(self).__name__
        )  # a pool made while tracing would be made once, not per call
        mx.eval(*arrays)
        with self._core.lock:
            self._core.arrays += [_Node(a) for a in arrays]
            self._core.reads += [[] for _ in arrays]

    @property
    def generation(self) -> int:
        """How many writes the pool has seen."""
        return self._core.generation

    @property
    def arrays(self) -> list[mx.array]:
        """The pool's arrays as they are now; to be evaluated or measured, never to be written."""
        return [node.array for node in self._core.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays)

    def frozen(self) -> Self:
        """A handle for reading this generation: it refuses once the pool has been written."""
        handle = object.__new__(type(self))
        handle.__dict__.update(self.__dict__)
        handle._pinned = self._core.generation
        return handle

    def __copy__(self) -> Self:
        raise TypeError(
            f"[{type(self).__name__}] expected the pool itself, which all users share; got a copy "
            "(frozen() gives a handle for reading)"
        )

    def __deepcopy__(self, memo: object) -> Self:
        return self.__copy__()

    def __reduce__(self) -> str:
        self.__copy__()
        return ""

    def _check(self, op: str, *, writes: bool = False) -> None:
        if _ext.tracing():
            raise ValueError(
                f"[{op}] expected a call outside mx.compile, mx.grad and mx.vmap: "
                f"a {type(self).__name__} is written in place; got a traced call"
            )
        if writes and self._pinned is not None:
            raise ValueError(f"[{op}] expected the pool itself; got a frozen handle")
        if self._pinned is not None and self._pinned != self._core.generation:
            raise ValueError(
                f"[{op}] expected the pool at generation {self._pinned}, where this handle was "
                f"frozen; got generation {self._core.generation}"
            )

    def _check_threads(self, op: str, nodes: Sequence[_Node], what: str) -> None:
        here = threading.get_ident()
        for node in nodes:
            if node.thread != here and not node.available():
                raise ValueError(
                    f"[{op}] expected {what} of other threads to be evaluated (mx.eval) before "
                    f"this thread uses the pool; got one pending in thread {node.thread}"
                )

    def _read(
        self,
        op: str,
        build: Callable[[list[mx.array]], tuple[T, mx.array]],
    ) -> T:
        """Build a reading node: ``build(arrays)`` returns its results and its token."""
        core = self._core
        with core.lock:
            self._check(op)
            self._check_threads(op, core.arrays, "writes")
            result, token = build([node.array for node in core.arrays])
            node = _Node(token)
            for reads in core.reads:
                if len(reads) >= 64:  # a pool that is only read: forget what is done
                    reads[:] = [r for r in reads if not r.available()]
                reads.append(node)
            return result

    def _write(
        self,
        op: str,
        indices: Sequence[int],
        build: Callable[[int, list[mx.array], list[mx.array]], mx.array],
        reads_others: Callable[[int, int], bool] = lambda written, other: False,
    ) -> None:
        """Build a writing node per array in ``indices``.

        ``build(index, arrays, reads)`` returns the array that takes the place of
        ``arrays[index]`` and waits for ``reads``. Nothing changes if one of them raises. The node
        of ``written`` may read other arrays of the pool too: those where ``reads_others(written,
        other)``, in places that no node of this call writes.
        """
        core = self._core
        with core.lock:
            self._check(op, writes=True)
            self._check_threads(op, core.arrays, "writes")
            for index in indices:
                self._check_threads(op, core.reads[index], "reads")
            arrays = [node.array for node in core.arrays]
            written = [
                _Node(
                    build(
                        index,
                        arrays,
                        [r.array for r in core.reads[index] if not r.available()],
                    )
                )
                for index in indices
            ]
            for index, node in zip(indices, written, strict=True):
                core.arrays[index] = node
                core.reads[index] = []
            for other, reads in enumerate(core.reads):
                reads += [
                    node
                    for index, node in zip(indices, written, strict=True)
                    if index != other and reads_others(index, other)
                ]
            core.generation += 1
