"""Which positions of a padded batch hold tokens, counted on the host.

mlx-lm describes padding by arrays and hands the layers a boolean mask, ``[B, 1, C, L]`` for
attention: 512 bytes for each token of the context at chunk 512. The caches here keep two integers
a row instead, and the layers run on the rows' tokens alone, packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Spans = tuple[tuple[int, int], ...]


def host_ints(values: Any) -> list[int]:
    """Python integers from a list, a NumPy array or an ``mx.array`` (which costs one eval)."""
    return [int(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]


class Padding:
    """Left and right padding that the rows of a batch have still to come.

    ``left[b]`` columns from now on are padding in row ``b``; ``lengths[b]`` columns from now on
    exist at all, left padding included, and later ones are padding (None: all exist).

    Args:
        rows: Number of rows, or None until a batch is seen.
        left: Padding columns on the left of each row. Default: none.
    """

    def __init__(self, rows: int | None = None, left: Sequence[int] | None = None):
        self.rows = len(left) if left is not None else rows
        self.left: list[int] | None = None if left is None else host_ints(left)
        self.lengths: list[int] | None = None

    def copy(self) -> Padding:
        other = Padding(self.rows)
        other.left = None if self.left is None else list(self.left)
        other.lengths = None if self.lengths is None else list(self.lengths)
        return other

    def prepare(
        self,
        *,
        rows: int,
        left_padding: Any = None,
        lengths: Any = None,
        right_padding: Any = None,
        op: str,
    ) -> None:
        """Announce the padding of the columns to come, as mlx-lm's ``prepare`` does."""
        given = {"left_padding": left_padding, "lengths": lengths, "right_padding": right_padding}
        host = {name: host_ints(value) for name, value in given.items() if value is not None}
        for name, value in host.items():
            if len(value) != rows or min(value, default=0) < 0:
                raise ValueError(f"[{op}] expected {name} of {rows} rows, each >= 0; got {value}")
        if "right_padding" in host and "lengths" not in host and any(host["right_padding"]):
            raise ValueError(
                f"[{op}] expected lengths beside right_padding; got right_padding alone"
            )
        self.rows = rows
        if "left_padding" in host:
            old = self.left or [0] * rows
            self.left = [a + b for a, b in zip(old, host["left_padding"], strict=True)]
        if "lengths" in host:
            self.lengths = host["lengths"]

    def finalize(self) -> None:
        """Forget the padding: the columns to come are tokens in every row."""
        self.left = self.lengths = None

    def spans(self, columns: int) -> Spans | None:
        """``(start, stop)`` of each row's tokens among the next ``columns``; None if all are."""
        if self.left is None and self.lengths is None:
            return None
        rows = len(self.lengths if self.left is None else self.left)  # type: ignore[arg-type]
        left = [0] * rows if self.left is None else self.left
        lengths = [columns] * rows if self.lengths is None else self.lengths
        starts = [min(n, columns) for n in left]
        stops = [min(n, columns) for n in lengths]
        spans = tuple((a, max(a, b)) for a, b in zip(starts, stops, strict=True))
        return None if all(span == (0, columns) for span in spans) else spans

    def advance(self, columns: int) -> None:
        """``columns`` have passed."""
        if self.left is not None:
            self.left = [max(0, n - columns) for n in self.left]
            if not any(self.left):
                self.left = None
        if self.lengths is not None:
            self.lengths = [max(0, n - columns) for n in self.lengths]

    def filter(self, keep: Iterable[int]) -> None:
        keep = list(keep)
        self.rows = len(keep)
        self.left = None if self.left is None else [self.left[i] for i in keep]
        self.lengths = None if self.lengths is None else [self.lengths[i] for i in keep]

    def extend(self, other: Padding) -> None:
        """Append another batch's rows; only between prompts (a row without lengths has no end)."""
        mine, theirs = self.rows or 0, other.rows or 0
        if (self.lengths is None) != (other.lengths is None):
            raise ValueError(
                "[cache] expected batches that are both being prepared or neither; got one with "
                f"lengths {self.lengths or other.lengths}: call finalize() first"
            )
        if self.lengths is not None and other.lengths is not None:
            self.lengths = self.lengths + other.lengths
        if self.left is not None or other.left is not None:
            self.left = (self.left or [0] * mine) + (other.left or [0] * theirs)
        self.rows = mine + theirs
