"""The states of gated delta layers, many sequences in one array."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from chunkdelta import _ext
from chunkdelta.cache.pool import Pool, refuse_beyond_memory


class StatePool(Pool):
    """Slots of gated delta states ``[Hv, Dv, Dk]``, read and written in place.

    :func:`chunkdelta.chunk_gated_delta_rule` and :func:`chunkdelta.gated_delta_step` take a pool
    and one slot per sequence instead of an ``initial_state``: they start from what the slots
    hold and leave the new states there, without a copy of the pool. A new pool holds zeros.

    Ops on one pool may be built in any number before one ``mx.eval``: each sees what those before
    it left. Function transformations and copies are refused, and so is a second thread while
    the first has work on the pool that is not evaluated (see :mod:`chunkdelta.cache.pool`).

    Args:
        num_slots: states the pool holds, at least 1.
        num_v_heads: value heads ``Hv`` of the layer.
        head_v_dim: value dimension ``Dv`` of a head, a multiple of 4 in 4..256.
        head_k_dim: key dimension ``Dk`` of a head, a multiple of 4 in 4..256.

    Raises:
        ValueError: a size out of its range, or a pool made while a function is being traced.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> pool = chunkdelta.StatePool(2, num_v_heads=4, head_v_dim=64, head_k_dim=64)
        >>> pool.write(1, mx.ones((4, 64, 64)))
        >>> pool.read(1).sum().item(), pool.read(0).sum().item()
        (16384.0, 0.0)
    """

    def __init__(self, num_slots: int, num_v_heads: int, head_v_dim: int, head_k_dim: int) -> None:
        for name, value in (("num_slots", num_slots), ("num_v_heads", num_v_heads)):
            if value < 1:
                raise ValueError(f"[StatePool] expected {name} >= 1; got {value}")
        for name, value in (("head_v_dim", head_v_dim), ("head_k_dim", head_k_dim)):
            if not 4 <= value <= 256 or value % 4:
                raise ValueError(
                    f"[StatePool] expected {name} a multiple of 4 in 4..256; got {value}"
                )
        if _ext.tracing():
            raise ValueError(
                "[StatePool] expected a call outside mx.compile, mx.grad and mx.vmap; got a traced "
                "call"
            )
        self.num_slots = num_slots
        self.state_shape = (num_v_heads, head_v_dim, head_k_dim)
        refuse_beyond_memory("StatePool", "states", 4 * num_slots * math.prod(self.state_shape))
        super().__init__([mx.zeros((num_slots, *self.state_shape), mx.float32)])

    def read(self, slot: int) -> mx.array:
        """Return a copy of a slot, as everything built so far leaves it.

        Args:
            slot: index in ``0..num_slots-1``.

        Returns:
            float32 ``[Hv, Dv, Dk]``. Later writes to the pool do not change it.

        Raises:
            ValueError: a slot out of range, or a use that :class:`StatePool` refuses.
        """
        self._check_slot("StatePool.read", slot)
        return self._read("StatePool.read", lambda arrays: _ext.read_state(arrays[0], slot))

    def write(self, slot: int, state: mx.array) -> None:
        """Put a state into a slot.

        Args:
            slot: index in ``0..num_slots-1``.
            state: float32 ``[Hv, Dv, Dk]``.

        Raises:
            ValueError: a slot out of range, a state of another shape or dtype, or a use that
                :class:`StatePool` refuses.
        """
        op = "StatePool.write"
        self._check_slot(op, slot)
        if tuple(state.shape) != self.state_shape or state.dtype != mx.float32:
            raise ValueError(
                f"[{op}] expected state float32 {self.state_shape}; "
                f"got {state.dtype} {tuple(state.shape)}"
            )
        self.update(op, lambda pool: (_ext.write_state(pool, slot, state),))

    def update(
        self, op: str, build: Callable[[mx.array], tuple[mx.array, ...]]
    ) -> tuple[mx.array, ...]:
        """Build a node that writes the pool; ops call this.

        Args:
            op: name of the op, for messages.
            build: takes the pool's array, ordered after all reads of it, and returns the node's
                outputs, first the written pool.

        Returns:
            The other outputs.

        Raises:
            ValueError: a use that :class:`StatePool` refuses. The pool is as it was then, also
                when ``build`` raises.
        """
        others: tuple[mx.array, ...] = ()

        def ordered(index: int, arrays: list[mx.array], reads: list[mx.array]) -> mx.array:
            nonlocal others
            pool = mx.depends(arrays, reads)[0] if reads else arrays[0]
            written, *rest = build(pool)
            others = tuple(rest)
            return written

        self._write(op, [0], ordered)
        return others

    def reset(self, slot: int) -> None:
        """Put zeros into a slot, the state of a sequence that has not begun.

        Args:
            slot: index in ``0..num_slots-1``.

        Raises:
            ValueError: a slot out of range, or a use that :class:`StatePool` refuses.
        """
        self._check_slot("StatePool.reset", slot)
        self.write(slot, mx.zeros(self.state_shape, mx.float32))

    def _check_slot(self, op: str, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"[{op}] expected a slot in 0..{self.num_slots - 1}; got {slot}")

    def __repr__(self) -> str:
        return (
            f"StatePool(num_slots={self.num_slots}, state_shape={self.state_shape}, "
            f"generation={self.generation})"
        )
