"""Hypothesis strategies of paged batches and of attention's options."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from chunkdelta.testing.attention import PagedBatch


@st.composite
def paged_batches(draw: st.DrawFn) -> PagedBatch:
    """Ragged batches of any lengths, heads, head dims, page sizes, dtypes and formats."""
    count = draw(st.integers(1, 3))
    lengths = st.integers(0, 20) | st.integers(0, 150)
    formats = st.sampled_from(["f32", "f16", "bf16", "q8_0"])
    num_kv_heads = draw(st.integers(1, 3))
    return PagedBatch(
        q_lens=[draw(lengths) for _ in range(count)],
        seq_lens=[draw(lengths) for _ in range(count)],
        num_q_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=4 * draw(st.integers(1, 12))
        if draw(st.booleans())
        else draw(st.sampled_from([64, 80, 96, 128, 192, 256])),
        page_size=16 * draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from([mx.float32, mx.float16, mx.bfloat16])),
        k_format=draw(formats),
        v_format=draw(formats),
        slabs=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def attention_options(num_q_heads: int) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments of ``paged_attention`` and of its oracle."""
    return st.one_of(
        st.just({"causal": False}),
        st.fixed_dictionaries(
            {},
            optional={
                "window": st.integers(1, 200),
                "softcap": st.sampled_from([1.0, 30.0]),
                "scale": st.sampled_from([0.05, 0.5]),
                "sinks": st.integers(0, 2**32 - 1).map(
                    lambda seed: mx.array(
                        np.random.default_rng(seed).standard_normal(num_q_heads), mx.float32
                    )
                ),
            },
        ),
    )
