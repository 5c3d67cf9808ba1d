"""Gated delta calls of any shape against float64, and the laws that hold between calls."""

import itertools
import os

import chunkdelta
import mlx.core as mx
import numpy as np
from chunkdelta.testing.compare import to_float64
from chunkdelta.testing.gated_delta_strategies import GatedDeltaCall, gated_delta_calls
from hypothesis import given, settings
from hypothesis import strategies as st

# CHUNKDELTA_FUZZ is read by the tests only: the number of cases of a long run.
FUZZ = int(os.environ.get("CHUNKDELTA_FUZZ", "60"))

ROUNDING = {mx.float32: 0.0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # of one value


def assert_near(actual, expected, natural, rounding=0.0):
    """Within 3e-6 (near-repeated keys) of the natural size, and one rounding of each value."""
    actual = to_float64(actual)
    assert actual.shape == expected.shape
    bound = 3e-6 * (np.linalg.norm(expected) + natural) + rounding * np.linalg.norm(expected)
    bound += 2.0**-25 * np.sqrt(expected.size) * bool(rounding)  # float16 subnormals
    assert np.linalg.norm(actual - expected) <= bound


@given(gated_delta_calls())
@settings(max_examples=FUZZ, deadline=None)
def test_any_call_matches_float64(call):
    arguments = call.arguments()
    out = chunkdelta.chunk_gated_delta_rule(**arguments)
    expected = GatedDeltaCall.oracle(arguments)
    assert out[0].dtype == call.dtype
    v = np.nan_to_num(to_float64(arguments["v"]))
    start = to_float64(arguments.get("initial_state", mx.zeros(1)))
    natural = np.linalg.norm(v) + np.linalg.norm(start)
    scale = call.options["scale"] or call.head_k_dim**-0.5
    assert_near(out[0], expected[0], scale * natural, ROUNDING[call.dtype])
    for actual, oracle in zip(out[1:], expected[1:], strict=True):
        assert actual.dtype == mx.float32
        assert_near(actual, oracle, natural)


@given(gated_delta_calls(), st.lists(st.integers(0, 80), max_size=3))
@settings(max_examples=FUZZ // 2, deadline=None)
def test_cuts_change_no_meaning(call, cuts):
    """prefill(T) = prefill(T1), then prefill(T2) ... with the states carried along."""
    call.lengths, call.dtype = None, mx.float32
    call.options = {"qk_l2norm": True}
    arguments = call.arguments()
    whole = chunkdelta.chunk_gated_delta_rule(**arguments)
    state = arguments.pop("initial_state", None)
    edges = [0, *sorted(min(cut, call.tokens) for cut in cuts), call.tokens]
    parts = []
    for begin, end in itertools.pairwise(edges):
        rows = {
            name: a[:, begin:end] if isinstance(a, mx.array) else a for name, a in arguments.items()
        }
        o, state = chunkdelta.chunk_gated_delta_rule(**rows, initial_state=state)
        parts.append(to_float64(o))
    v = np.linalg.norm(np.nan_to_num(to_float64(arguments["v"]))) + 1.0
    assert_near(whole[1], to_float64(state), v)
    assert_near(whole[0], np.concatenate(parts, axis=1), v)


@given(gated_delta_calls())
@settings(max_examples=FUZZ // 2, deadline=None)
def test_a_packed_sequence_is_the_sequence_alone(call):
    """Bit for bit: neighbours in the batch change nothing."""
    call.lengths = call.lengths or [call.tokens, 3]
    call.batch = 1
    call.options.pop("checkpoint_every", None)
    arguments = call.arguments()
    o, states = chunkdelta.chunk_gated_delta_rule(**arguments)
    offsets = arguments.pop("cu_seqlens")
    initial = arguments.pop("initial_state", None)
    for i, (begin, end) in enumerate(itertools.pairwise(offsets)):
        rows = {
            name: a[:, begin:end] if isinstance(a, mx.array) else a for name, a in arguments.items()
        }
        alone, state = chunkdelta.chunk_gated_delta_rule(
            **rows, initial_state=None if initial is None else initial[i : i + 1]
        )
        assert mx.array_equal(o[:, begin:end], alone).item()
        assert mx.array_equal(states[i], state[0]).item()


@given(gated_delta_calls(), st.integers(0, 3))
@settings(max_examples=FUZZ // 2, deadline=None)
def test_a_pool_is_the_states_in_an_array(call, spare):
    """Bit for bit, in any slots, and no other slot is touched."""
    arguments = call.arguments()
    functional = chunkdelta.chunk_gated_delta_rule(**arguments)
    initial = arguments.pop("initial_state", None)
    states = functional[1]
    N = states.shape[0]
    pool = chunkdelta.StatePool(N + spare, *states.shape[1:])
    slots = np.random.default_rng(call.seed).permutation(N + spare)[:N]
    for slot in range(N + spare):
        pool.write(slot, mx.full(pool.state_shape, mx.nan))
    for i, slot in enumerate(slots.tolist()):
        pool.write(slot, mx.zeros(pool.state_shape) if initial is None else initial[i])
    pooled = chunkdelta.chunk_gated_delta_rule(**arguments, state_pool=pool, state_indices=slots)
    assert pooled[1] is None
    assert mx.array_equal(pooled[0], functional[0]).item()
    for i, slot in enumerate(slots.tolist()):
        assert mx.array_equal(pool.read(slot), states[i]).item()
    for slot in set(range(N + spare)) - set(slots.tolist()):
        assert mx.all(mx.isnan(pool.read(slot))).item()
