"""MLX held to a plan: the memory limit that bounds how far its evaluator runs ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from chunkdelta.loop.memory import ChunkPlan


class _Limits:
    """MLX's two limits, which belong to the process, shared by the prefills that run in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: dict[object, tuple[int, int]] = {}
        self._before = (0, 0)

    def enter(self, owner: object, memory: int, cache: int) -> None:
        with self._lock:
            first = not self._wanted
            self._wanted[owner] = (memory, cache)
            old = self._apply()
            if first:
                self._before = old

    def leave(self, owner: object) -> None:
        with self._lock:
            del self._wanted[owner]
            self._apply()

    def _apply(self) -> tuple[int, int]:
        wanted = self._wanted.values() or [self._before]
        memory, cache = (max(limits) for limits in zip(*wanted, strict=True))
        return mx.set_memory_limit(memory), mx.set_cache_limit(cache)


_limits = _Limits()


@contextmanager
def enforce_limit(chunk: ChunkPlan) -> Iterator[int]:
    """Hold MLX's evaluator to a chunk's transients, on top of what is allocated now.

    MLX's evaluator runs ahead of the kernels: it allocates outputs as long as active memory is
    below the memory limit, then waits for kernels to finish and free their inputs. So a limit at
    the plan less the largest single output makes the plan an upper bound of the peak. The limit on
    cached free buffers keeps the resident size near it as well. Both are settings of the process;
    they are restored when the last of several overlapping prefills ends.

    Yields:
        The planned peak of MLX's active memory.
    """
    peak = mx.get_active_memory() + chunk.total_bytes
    if not chunk.workspace_in_mlx:
        peak -= chunk.workspace_bytes
    owner = object()
    _limits.enter(owner, peak - chunk.largest_op_bytes, chunk.largest_op_bytes)
    try:
        yield peak
    finally:
        _limits.leave(owner)
