"""The tokens of a padded batch as packed rows, and back."""

from __future__ import annotations

import functools
from itertools import accumulate

import mlx.core as mx
import numpy as np

from chunkdelta.cache.padding import Spans


class Packing:
    """Gathers the tokens of ``[B, S, ...]`` columns into ``[1, T, ...]`` packed rows, and back.

    One instance serves all layers of a chunk: :func:`packing` returns the same object for the same
    spans.

    Args:
        columns: S.
        spans: ``(start, stop)`` of each row's tokens among the columns.

    Attributes:
        cu_seqlens: int32 ``[B+1]`` NumPy offsets of the rows in the packed tokens.
        lengths: tokens of each row.
    """

    def __init__(self, columns: int, spans: Spans):
        self.columns = columns
        self.spans = spans
        self.lengths = [stop - start for start, stop in spans]
        self.cu_seqlens = np.array([0, *accumulate(self.lengths)], np.int32)
        where = np.concatenate(
            [np.arange(b * columns + lo, b * columns + hi) for b, (lo, hi) in enumerate(spans)]
        )
        back = np.full(len(spans) * columns, len(where), np.int32)  # padding: the zero row
        back[where] = np.arange(len(where))
        self._where = mx.array(where.astype(np.int32))
        self._back = mx.array(back)

    def pack(self, x: mx.array) -> mx.array:
        """``[B, S, ...]`` to ``[1, T, ...]``."""
        return mx.take(x.reshape(-1, *x.shape[2:]), self._where, axis=0)[None]

    def unpack(self, x: mx.array) -> mx.array:
        """``[1, T, ...]`` to ``[B, S, ...]``; padding becomes zeros."""
        rows = mx.concatenate([x[0], mx.zeros((1, *x.shape[2:]), x.dtype)])
        out = mx.take(rows, self._back, axis=0)
        return out.reshape(len(self.spans), self.columns, *x.shape[2:])


@functools.lru_cache(maxsize=16)
def packing(columns: int, spans: Spans) -> Packing:
    """The packing of these spans, made once for all layers."""
    return Packing(columns, spans)
