"""The gated delta rule against the float64 recurrence."""

import os
import subprocess
import sys

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta import _ext
from chunkdelta.ops import naive
from chunkdelta.testing.compare import relative_error, to_float64
from chunkdelta.testing.gated_delta_strategies import GatedDeltaCall

BAR = 1e-6  # relative Frobenius, random unit keys, beta <= 1


def check(arguments, bar=BAR):
    out = chunkdelta.chunk_gated_delta_rule(**arguments)
    expected = GatedDeltaCall.oracle(arguments)
    assert len(out) == len(expected)
    for actual, oracle in zip(out, expected, strict=True):
        assert relative_error(actual, oracle) <= bar
    return out


def equal(a, b):
    return all(mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


CASES = [
    # batch, tokens, key heads, ratio, Dk, Dv
    pytest.param(1, 0, 1, 1, 8, 8, id="empty"),
    pytest.param(0, 5, 1, 1, 8, 8, id="no-sequences"),
    pytest.param(1, 1, 2, 2, 128, 128, id="decode"),
    pytest.param(3, 4, 1, 2, 64, 32, id="B3-T4-last-by-steps"),
    pytest.param(1, 5, 1, 1, 4, 4, id="T5-first-by-chunks"),
    pytest.param(1, 16, 1, 1, 128, 128, id="one-chunk"),
    pytest.param(2, 17, 2, 1, 64, 64, id="B2-T17"),
    pytest.param(1, 65, 3, 1, 60, 100, id="T65-D60-D100"),
    pytest.param(1, 100, 16, 1, 128, 128, id="many-heads"),
    pytest.param(1, 200, 2, 3, 128, 68, id="T200-ratio3"),
    pytest.param(1, 130, 1, 2, 256, 256, id="largest-heads"),
]


@pytest.mark.parametrize(("B", "T", "Hk", "ratio", "Dk", "Dv"), CASES)
@pytest.mark.parametrize("state", [False, True], ids=["zeros", "state"])
def test_matches_the_recurrence(B, T, Hk, ratio, Dk, Dv, state):
    check(GatedDeltaCall(B, T, None, Hk, ratio, Dk, Dv, initial_state=state).arguments())


@pytest.mark.parametrize("chunk_size", [None, 16, 32, 64])
def test_chunk_size_changes_no_meaning(chunk_size):
    call = GatedDeltaCall(tokens=150, ratio=2, head_k_dim=64, head_v_dim=64, initial_state=True)
    check({**call.arguments(), "chunk_size": chunk_size})


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("tokens", [1, 100])
def test_16_bit_activations_cost_one_rounding_of_the_output(dtype, tokens):
    arguments = GatedDeltaCall(tokens=tokens, head_k_dim=128, head_v_dim=128, dtype=dtype)
    arguments = arguments.arguments()
    o, state = chunkdelta.chunk_gated_delta_rule(**arguments)
    expected, expected_state = GatedDeltaCall.oracle(arguments)
    rounded = mx.array(expected.astype(np.float32)).astype(dtype)
    assert o.dtype == dtype
    assert relative_error(o, expected) <= 1.001 * relative_error(rounded, expected) + BAR
    assert relative_error(state, expected_state) <= BAR


def test_beta_may_be_of_the_activations_dtype():
    arguments = GatedDeltaCall(tokens=20, dtype=mx.bfloat16).arguments()
    arguments["beta"] = arguments["beta"].astype(mx.bfloat16)
    full = {**arguments, "beta": arguments["beta"].astype(mx.float32)}
    assert equal(
        chunkdelta.chunk_gated_delta_rule(**arguments), chunkdelta.chunk_gated_delta_rule(**full)
    )


@pytest.mark.parametrize("lengths", [[0], [7, 0, 64, 1, 0, 33], [1, 1, 1], [0, 0], [5, 200]])
def test_packed_sequences(lengths):
    call = GatedDeltaCall(lengths=lengths, num_k_heads=2, ratio=2, initial_state=True)
    check(call.arguments())


MASKS = {
    "left": lambda T: np.arange(T) >= 21,
    "right": lambda T: np.arange(T) < 40,
    "inside": lambda T: np.arange(T) % 5 != 2,
    "whole-chunks": lambda T: np.arange(T) // 16 % 2 == 0,
    "all": lambda T: np.zeros(T, bool),
}


@pytest.mark.parametrize("T", [3, 61])
@pytest.mark.parametrize("kind", list(MASKS))
def test_masked_rows_do_not_exist(kind, T):
    """They hold NaN, their outputs are 0 and the state is that of the other rows."""
    arguments = GatedDeltaCall(batch=2, tokens=T, ratio=2, initial_state=True).arguments()
    mask = np.stack([MASKS[kind](T), np.ones(T, bool)])
    for name in ("q", "k", "v", "g", "beta"):
        poisoned = np.array(arguments[name])
        poisoned[~mask] = np.nan
        arguments[name] = mx.array(poisoned)
    o, state = check({**arguments, "mask": mx.array(mask)})
    assert np.all(np.array(o)[~mask] == 0)
    kept = mx.array(np.flatnonzero(mask[0]))
    rows = {n: a[:1] if n == "initial_state" else a[:1, kept] for n, a in arguments.items()}
    alone = chunkdelta.chunk_gated_delta_rule(**rows)[1]
    assert relative_error(state[:1], alone) <= BAR


def test_a_row_of_nan_reaches_no_earlier_row():
    arguments = GatedDeltaCall(tokens=40, ratio=2).arguments()
    clean, _ = chunkdelta.chunk_gated_delta_rule(**arguments)
    for name in ("q", "k", "v"):
        poisoned = np.array(arguments[name])
        poisoned[:, 23] = np.nan
        arguments[name] = mx.array(poisoned)
    o, _ = chunkdelta.chunk_gated_delta_rule(**arguments)
    assert mx.array_equal(o[:, :23], clean[:, :23]).item()
    assert mx.all(mx.isnan(o[:, 23])).item()


@pytest.mark.parametrize("every", [1, 7, 16, 48, 61, 1000])
def test_checkpoints(every):
    call = GatedDeltaCall(lengths=[61, 0, 3, 100], ratio=2, initial_state=True)
    checkpoints = check({**call.arguments(), "checkpoint_every": every})[2]
    assert checkpoints.shape[0] == sum(n // every for n in call.lengths)


def test_resuming_from_a_checkpoint_gives_the_same_bits():
    arguments = GatedDeltaCall(tokens=130, ratio=2, initial_state=True).arguments()
    every = 40
    o, state, checkpoints = chunkdelta.chunk_gated_delta_rule(**arguments, checkpoint_every=every)
    for i in range(3):
        rows = {n: a[:, (i + 1) * every :] for n, a in arguments.items() if n != "initial_state"}
        rest = chunkdelta.chunk_gated_delta_rule(
            **rows, initial_state=checkpoints[i : i + 1], checkpoint_every=every
        )
        assert equal(rest, (o[:, (i + 1) * every :], state, checkpoints[i + 1 :]))


@pytest.mark.parametrize("T", [1, 4, 33])
def test_l2norm_and_scale(T):
    arguments = GatedDeltaCall(tokens=T, head_k_dim=20, dtype=mx.float32).arguments()
    arguments["q"], arguments["k"] = 3 * arguments["q"], 0.01 * arguments["k"]
    check({**arguments, "qk_l2norm": True, "scale": 0.7})
    zero = {**arguments, "k": mx.zeros_like(arguments["k"]), "qk_l2norm": True}
    assert mx.all(mx.isfinite(chunkdelta.chunk_gated_delta_rule(**zero)[0])).item()


VIEWS = {
    "rows-second-last": lambda a: mx.contiguous(a.swapaxes(1, -2)).swapaxes(1, -2),
    "backwards": lambda a: mx.contiguous(a[:, ::-1])[:, ::-1],
    "last-axis-strided": lambda a: mx.repeat(a, 2, axis=-1)[..., ::2],
    "one-row-for-all": lambda a: mx.broadcast_to(a[:, :1], a.shape),
    "offset": lambda a: mx.concatenate([a[:, :3], a], axis=1)[:, 3:],
}


@pytest.mark.parametrize("T", [2, 40])
@pytest.mark.parametrize("view", list(VIEWS))
def test_any_strides(view, T):
    arguments = GatedDeltaCall(batch=2, tokens=T, num_k_heads=2, ratio=2).arguments()
    arguments["mask"] = mx.array(np.random.default_rng(0).uniform(size=(2, T)) < 0.8)
    views = {name: VIEWS[view](a) for name, a in arguments.items()}
    copies = {name: mx.array(np.array(a)) for name, a in views.items()}
    assert equal(
        chunkdelta.chunk_gated_delta_rule(**views), chunkdelta.chunk_gated_delta_rule(**copies)
    )


@pytest.mark.parametrize("T", [1, 3, 70])
def test_gates_of_minus_infinity_forget(T):
    arguments = GatedDeltaCall(tokens=T, initial_state=True).arguments()
    g = np.array(arguments["g"])
    g[:, T // 2] = -np.inf
    check({**arguments, "g": mx.array(g)})
    check({**arguments, "g": mx.full(g.shape, -np.inf)})


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (GatedDeltaCall(tokens=300, num_k_heads=16, head_k_dim=32, head_v_dim=32), {}),
        (GatedDeltaCall(tokens=300, head_k_dim=64, head_v_dim=132, ratio=2), {}),
        (GatedDeltaCall(lengths=[200, 5, 0, 1, 90], ratio=3), {"checkpoint_every": 23}),
        (GatedDeltaCall(batch=5, tokens=3, head_v_dim=100), {}),
        (GatedDeltaCall(batch=2, tokens=90, masked=0.4), {"chunk_size": 64}),
    ],
    ids=["many-heads", "one-head", "uneven", "steps", "masked"],
)
def test_the_same_bits_for_any_number_of_threads(call, options):
    before = _ext.num_threads()
    arguments = call.arguments()
    try:
        results = []
        for threads in (1, 2, 3, 7):
            _ext.set_num_threads(threads)
            results.append(chunkdelta.chunk_gated_delta_rule(**arguments, **options))
            mx.eval(results[-1])
    finally:
        _ext.set_num_threads(before)
    assert all(equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    if isa not in _ext.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    code = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
import mlx.core as mx, test_gated_delta as t
from chunkdelta import _ext
assert _ext.active_isa() == {isa!r}
for dtype in (mx.float16, mx.bfloat16):
    t.test_16_bit_activations_cost_one_rounding_of_the_output(dtype, 100)
for case in t.CASES:
    t.test_matches_the_recurrence(*case.values, state=True)
t.test_masked_rows_do_not_exist("inside", 61)
t.test_l2norm_and_scale(33)
t.test_any_strides("last-axis-strided", 40)
t.test_gates_match_float64(None, False)
t.test_gates_match_float64(-5.0, True)
"""
    env = {**os.environ, "CHUNKDELTA_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("masked", [False, True])
def test_step_is_the_rule_for_one_token(masked):
    arguments = GatedDeltaCall(batch=3, tokens=1, num_k_heads=2, ratio=2, initial_state=True)
    arguments = arguments.arguments()
    options = {"mask": mx.array([[True], [False], [True]])} if masked else {}
    expected = chunkdelta.chunk_gated_delta_rule(**arguments, **options, qk_l2norm=True)
    state = arguments.pop("initial_state")
    token = {name: a[:, 0] for name, a in {**arguments, **options}.items()}
    o, after = chunkdelta.gated_delta_step(**token, initial_state=state, qk_l2norm=True)
    assert equal((o, after), (expected[0][:, 0], expected[1]))


def test_compiled_and_transformed():
    arguments = GatedDeltaCall(tokens=20).arguments()
    names = list(arguments)

    def f(*arrays):
        return chunkdelta.chunk_gated_delta_rule(**dict(zip(names, arrays, strict=True)))

    compiled = mx.compile(f)
    assert equal(compiled(*arguments.values()), f(*arguments.values()))
    longer = GatedDeltaCall(tokens=33, seed=1).arguments()
    assert equal(compiled(*longer.values()), f(*longer.values()))
    with pytest.raises(ValueError, match=r"vjp.*Not implemented|Not implemented"):
        mx.grad(lambda q: f(q, *list(arguments.values())[1:])[0].sum())(arguments["q"])
    with pytest.raises(ValueError, match="Not implemented"):
        mx.vmap(f)(*(a[None] for a in arguments.values()))


@pytest.mark.parametrize("heads", [1, 16])
def test_extra_memory_is_flat(heads):
    def peak(tokens):
        arguments = GatedDeltaCall(
            tokens=tokens, num_k_heads=heads, ratio=2, head_k_dim=128, head_v_dim=128
        ).arguments()
        mx.eval(arguments)
        _ext.release_workspace()
        _ext.reset_workspace_peak()
        mx.reset_peak_memory()
        base = mx.get_active_memory()
        out = chunkdelta.chunk_gated_delta_rule(**arguments)
        mx.eval(out)
        extra = mx.get_peak_memory() - base - sum(a.nbytes for a in out)
        return extra + _ext.workspace_peak_bytes()

    assert peak(1024) <= 64 << 20  # with all threads
    before = _ext.num_threads()
    try:
        _ext.set_num_threads(1)  # with more, which of them got a task is up to the scheduler
        assert peak(1024) <= peak(256)
    finally:
        _ext.set_num_threads(before)


GATES = [(None, False), (None, True), (-5.0, False), (-5.0, True)]


def projections():
    rng = np.random.default_rng(0)
    a, b = (mx.array(rng.normal(0, 6, (2, 9, 37)).astype(np.float32)) for _ in range(2))
    A_log = mx.array(rng.uniform(-4, 3, 37).astype(np.float32))
    return a, b, A_log, mx.array(rng.normal(0, 2, 37).astype(np.float32))


@pytest.mark.parametrize(("lower_bound", "allow_neg_eigval"), GATES)
def test_gates_match_float64(lower_bound, allow_neg_eigval):
    options = {"lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
    gates = chunkdelta.gated_delta_gates(*projections(), **options)
    oracle = naive.gated_delta_gates(*map(to_float64, projections()), **options)
    for actual, expected in zip(gates, oracle, strict=True):
        np.testing.assert_allclose(to_float64(actual), expected, rtol=3e-6, atol=1e-12)


@pytest.mark.parametrize(("lower_bound", "allow_neg_eigval"), GATES)
def test_gates_match_mlx_lm(lower_bound, allow_neg_eigval):
    from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g

    a, b, A_log, dt_bias = projections()
    g, beta = chunkdelta.gated_delta_gates(
        a, b, A_log, dt_bias, lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval
    )
    if lower_bound is None:
        decay = compute_g(A_log, a, dt_bias)
    else:
        decay = compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    strength = mx.sigmoid(b) * (2 if allow_neg_eigval else 1)
    assert mx.allclose(mx.exp(g), decay, rtol=2e-6, atol=1e-7).item()
    assert mx.allclose(beta, strength, rtol=2e-6, atol=1e-30).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["f16", "bf16"])
def test_gates_of_16_bit_projections_are_not_rounded(dtype):
    rng = np.random.default_rng(1)
    a, b = (mx.array(rng.normal(0, 3, (5, 33)).astype(np.float32)).astype(dtype) for _ in "ab")
    A_log, dt_bias = mx.zeros(33, dtype), mx.array(rng.normal(0, 1, 33)).astype(dtype)
    g, beta = chunkdelta.gated_delta_gates(a, b, A_log, dt_bias)
    expected = naive.gated_delta_gates(*(to_float64(x) for x in (a, b, A_log, dt_bias)))
    assert g.dtype == beta.dtype == mx.float32
    assert relative_error(g, expected[0]) <= 1e-6
    assert relative_error(beta, expected[1]) <= 1e-6


def test_gates_at_the_ends_of_the_range():
    a = mx.array([[-mx.inf, -200.0, -50.0, 0.0, 50.0, mx.inf, mx.nan]])
    g, beta = chunkdelta.gated_delta_gates(a, a, mx.zeros(7), mx.zeros(7))
    expected = [0, 0, -np.exp(-50.0), -np.log(2), -50, -np.inf, np.nan]
    np.testing.assert_allclose(np.array(g)[0], expected, rtol=1e-6)
    expected = [0, 0, np.exp(-50.0), 0.5, 1, 1, np.nan]
    np.testing.assert_allclose(np.array(beta)[0], expected, rtol=1e-6)
