import itertools

import chunkdelta
import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def random(rng, shape, dtype):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    channels=st.integers(1, 40),
    width=st.integers(2, 8),
    dtype=st.sampled_from(DTYPES),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    silu=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_cut_of_packed_sequences_gives_the_same_bits(
    seed, lengths, channels, width, dtype, cuts, silu
):
    """One packed call = each sequence alone = each sequence in pieces through its state."""
    rng = np.random.default_rng(seed)
    T, N = sum(lengths), len(lengths)
    x, weight = random(rng, (1, T, channels), dtype), random(rng, (channels, width), dtype)
    start = random(rng, (N, width - 1, channels), dtype)
    activation = "silu" if silu else None
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    y, state = chunkdelta.causal_conv1d(
        x, weight, initial_state=start, cu_seqlens=offsets, activation=activation
    )
    for n, length in enumerate(lengths):
        carried = start[n : n + 1]
        points = sorted({0, length, *(int(cut * length) for cut in cuts)})
        pieces = []
        for a, b in itertools.pairwise(points):
            piece, carried = chunkdelta.causal_conv1d(
                x[:, offsets[n] + a : offsets[n] + b],
                weight,
                initial_state=carried,
                activation=activation,
            )
            pieces.append(piece)
        if pieces:
            whole = mx.concatenate(pieces, axis=1)
            assert mx.array_equal(whole, y[:, offsets[n] : offsets[n + 1]])
        assert mx.array_equal(carried[0], state[n])


@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 3),
    steps=st.integers(0, 80),
    channels=st.integers(1, 20),
    width=st.integers(2, 8),
    density=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=40, deadline=None)
def test_masked_rows_can_be_left_out(seed, batch, steps, channels, width, density, dtype):
    """A masked batch gives, at its valid rows, what the batch without the masked rows gives."""
    rng = np.random.default_rng(seed)
    x, weight = random(rng, (batch, steps, channels), dtype), random(rng, (channels, width), dtype)
    start = random(rng, (batch, width - 1, channels), dtype)
    mask = rng.random((batch, steps)) < density
    poisoned = mx.where(mx.array(mask)[..., None], x, mx.array(np.nan, dtype))
    y, state = chunkdelta.causal_conv1d(poisoned, weight, initial_state=start, mask=mx.array(mask))
    y = np.array(y.astype(mx.float32))
    assert not y[~mask].any()
    for b in range(batch):
        rows = mx.array(np.array(x[b].astype(mx.float32))[mask[b]][None]).astype(dtype)
        alone, carried = chunkdelta.causal_conv1d(rows, weight, initial_state=start[b : b + 1])
        assert np.array_equal(y[b][mask[b]], np.array(alone[0].astype(mx.float32)))
        assert mx.array_equal(state[b], carried[0])
