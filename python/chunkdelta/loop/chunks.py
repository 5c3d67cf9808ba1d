"""Where a prompt is cut into chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


def plan_chunks(
    start: int, stop: int, *, chunk_size: int = 512, cut_points: Iterable[int] = ()
) -> list[tuple[int, int]]:
    """Cut the positions ``[start, stop)`` into balanced chunks.

    Every position in ``cut_points`` that lies inside ends a chunk; each stretch between cuts is
    divided into the fewest chunks that hold at most ``chunk_size`` positions, of lengths that differ
    by at most one, longer ones first. So no chunk is shorter than half of ``chunk_size`` unless its
    whole stretch is: a short tail chunk would read the whole KV cache for a few queries (a
    141-token remainder took three times as long as a full chunk of 1,024 in mlx-swift-lm#470).

    Args:
        start: First position, in tokens from the start of the context (>= 0): the number of tokens
            that the cache already holds.
        stop: One past the last position; >= ``start``.
        chunk_size: Most tokens in a chunk (>= 1). Default: ``512``.
        cut_points: Positions of the context, in any order, where a chunk must end (state
            checkpoints, message ends). Those outside ``(start, stop)`` change nothing.

    Returns:
        ``[(begin, end), ...]`` in order, covering ``[start, stop)`` exactly; empty if nothing is left.

    Raises:
        ValueError: If ``start`` is negative or above ``stop``, or ``chunk_size`` below 1.

    Example:
        >>> plan_chunks(0, 1165, chunk_size=512)
        [(0, 389), (389, 777), (777, 1165)]
        >>> plan_chunks(100, 700, chunk_size=512, cut_points=[128, 4096])
        [(100, 128), (128, 414), (414, 700)]
    """
    if start < 0 or stop < start:
        raise ValueError(
            f"[plan_chunks] expected 0 <= start <= stop; got start={start}, stop={stop}"
        )
    if chunk_size < 1:
        raise ValueError(f"[plan_chunks] expected chunk_size >= 1; got {chunk_size}")
    if start == stop:
        return []
    edges = [start, *sorted({p for p in cut_points if start < p < stop}), stop]
    chunks = []
    for low, high in itertools.pairwise(edges):
        count = -(-(high - low) // chunk_size)
        size, longer = divmod(high - low, count)
        for i in range(count):
            end = low + size + (1 if i < longer else 0)
            chunks.append((low, end))
            low = end
    return chunks
