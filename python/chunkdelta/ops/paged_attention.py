"""Softmax attention over keys and values in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chunkdelta import _ext

if TYPE_CHECKING:
    from chunkdelta.cache.pages import KVPages

HostInt32 = Sequence[int] | Sequence[Sequence[int]] | NDArray[np.integer] | mx.array


def attention_metadata(
    *,
    block_table: HostInt32,
    seq_lens: HostInt32,
    cu_seqlens_q: HostInt32,
    page_size: int = 64,
) -> Any:
    """Check the host metadata of a batch once, for :func:`paged_attention` of every layer.

    Args:
        block_table: host int32 ``[N, max_pages]``, the pages of each sequence in order of its
            keys, -1 where unused.
        seq_lens: host int32 ``[N]``, keys of each sequence, those of this chunk included.
        cu_seqlens_q: host int32 ``[N+1]``, offsets of the sequences' queries in ``[0, T]``.
        page_size: keys of a page. Default: ``64``.

    Returns:
        An opaque object for ``paged_attention(..., metadata=...)``.

    Raises:
        ValueError: shapes that do not agree, offsets that descend, a key without a page.

    Example:
        >>> import chunkdelta
        >>> chunkdelta.attention_metadata(
        ...     block_table=[[3, 0], [1, -1]], seq_lens=[70, 5], cu_seqlens_q=[0, 2, 3]
        ... ).num_tokens
        3
    """
    return _ext.AttentionMetadata(
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        page_size=page_size,
    )


def paged_attention(
    q: mx.array,
    pages: KVPages,
    *,
    block_table: HostInt32 | None = None,
    seq_lens: HostInt32 | None = None,
    cu_seqlens_q: HostInt32 | None = None,
    metadata: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    return_lse: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attend from packed queries to the keys and values of their sequences in ``pages``.

    ``o = softmax(scale * q K^T) V`` per sequence and head, computed as FlashAttention-2 does
    (arXiv 2307.08691) over segments of at most 4,096 keys, each gathered and decoded once: no
    array grows with the context. Scores, sums and outputs are float32 inside. q head ``h`` reads
    KV head ``h // (Hq // Hkv)``. The causal mask is aligned bottom right: the last query of a
    sequence sees its last key (docs/concepts/causal.md). A query that sees no key gives output
    0 and LSE -inf. Which page a key lies in does not change a bit of the result, nor does the
    number of threads.

    Args:
        q: queries ``[T, Hq, D]``; float32, float16 or bfloat16; ``Hq`` a multiple of the pool's
            ``Hkv``; ``T`` may be 0.
        pages: the pool, with this chunk's keys already appended.
        block_table: host int32 ``[N, max_pages]`` (a list, a NumPy array, or an ``mx.array``,
            which costs one eval): the pages of each sequence in order of its keys, -1 where
            unused.
        seq_lens: host int32 ``[N]``, keys of each sequence, those of this chunk included.
        cu_seqlens_q: host int32 ``[N+1]``, offsets of the sequences' queries, from 0 to ``T``.
        metadata: what :func:`attention_metadata` made of these three once for all layers,
            instead of them. Default: ``None``.
        scale: factor on ``q k``. Default: ``D ** -0.5``.
        causal: whether a query sees only keys up to its own. Default: ``True``.
        window: a query sees its last ``window`` keys, its own included; needs ``causal``.
            Default: ``None``, all of them.
        softcap: scores become ``softcap * tanh(score / softcap)``. Default: ``None``.
        sinks: ``[Hq]``, a logit per q head that joins the softmax (and the LSE) without a value.
            Default: ``None``.
        return_lse: also return the log-sum-exp of each row. Default: ``False``.
        stream: stream or device to run on. Default: ``None``, the current one.

    Returns:
        ``o [T, Hq, D]`` in ``q``'s dtype; with ``return_lse`` also ``lse [T, Hq]``, float32,
        natural log, for :func:`merge_states`.

    Raises:
        ValueError: shapes, dtypes or metadata that do not fit, page ids outside the pool, a
            traced call, a pool with writes pending in another thread.

    Example:
        >>> import mlx.core as mx, chunkdelta
        >>> pages = chunkdelta.KVPages(2, 1, 64, page_size=16)
        >>> k, v = mx.random.normal((2, 20, 1, 64))
        >>> pages = chunkdelta.append_kv(pages, k, v, list(range(20)))
        >>> q = mx.random.normal((3, 4, 64))  # the last 3 positions, 4 q heads
        >>> o = chunkdelta.paged_attention(
        ...     q, pages, block_table=[[0, 1]], seq_lens=[20], cu_seqlens_q=[0, 3]
        ... )
        >>> o.shape
        (3, 4, 64)
    """
    op = "paged_attention"
    attend = getattr(pages, "_attend", None)
    if attend is None:
        raise ValueError(f"[{op}] expected pages a KVPages; got {type(pages).__name__}")
    parts = (block_table, seq_lens, cu_seqlens_q)
    if (metadata is None) == any(part is None for part in parts) or (
        metadata is not None and any(part is not None for part in parts)
    ):
        raise ValueError(
            f"[{op}] expected block_table, seq_lens and cu_seqlens_q, or metadata instead; got "
            f"{'both' if metadata is not None else 'not all of the three'}"
        )
    if metadata is None:
        metadata = _ext.AttentionMetadata(
            block_table=block_table,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            page_size=pages.page_size,
        )
    elif not isinstance(metadata, _ext.AttentionMetadata):
        raise ValueError(
            f"[{op}] expected metadata from attention_metadata(); got {type(metadata).__name__}"
        )
    options = (scale, causal, window, softcap, sinks, return_lse)
    results = attend(q, metadata, options, stream)
    return (results[0], results[1]) if return_lse else results[0]
