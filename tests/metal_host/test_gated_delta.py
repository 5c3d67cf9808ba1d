"""The gated delta kernels: their launch plans executed on the host, against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta._ext import plans
from chunkdelta.testing.compare import relative_error

from tests.metal_host.gated_delta_case import DTYPES, RAGGED, Case, as_mlx, make, pack, unpack

CASES = [
    # lengths around the chunk and the crossover to the sequential kernel, ratios of heads
    *(Case(tokens=t) for t in (1, 2, 15, 16, 17, 31, 32, 100)),
    Case(tokens=9, value_heads=5),
    Case(tokens=40, key_heads=2, value_heads=2),
    Case(tokens=40, key_heads=2, value_heads=12, batch=2),
    # head dims of the kernels, and between them
    *(Case(tokens=t, key_dim=k, value_dim=v) for k, v in ((64, 96), (96, 128)) for t in (5, 40)),
    *(Case(tokens=t, key_dim=k, value_dim=v) for k, v in ((192, 64), (256, 256)) for t in (5, 40)),
    *(Case(tokens=t, key_dim=k, value_dim=v) for k, v in ((80, 72), (255, 3)) for t in (5, 40)),
    Case(tokens=40, key_dim=128, value_dim=192),
    Case(tokens=40, key_dim=1, value_dim=1),
    # 16 columns per simdgroup
    Case(tokens=40, value_heads=4, cores=1),
    Case(tokens=40, value_heads=8, key_dim=96, value_dim=96, cores=1),
    Case(tokens=40, value_heads=8, key_dim=64, value_dim=72, cores=1),
    # ragged batches, pools, checkpoints
    Case(tokens=77, cu_seqlens=RAGGED),
    Case(tokens=77, cu_seqlens=RAGGED, initial=False),
    Case(tokens=77, cu_seqlens=RAGGED, slots=(6, 3, 0, 4, 1, 5, 8), num_slots=9),
    Case(tokens=90, cu_seqlens=(0, 40, 41, 90), slots=(3, 0, 5), num_slots=7, every=7),
    Case(tokens=1, batch=3, slots=(2, 0, 3), num_slots=4),
    *(Case(tokens=100, every=e) for e in (1, 16, 10, 25, 64, 101)),
    Case(tokens=12, every=5),
    Case(tokens=100, cu_seqlens=(0, 30, 30, 100), every=25, initial=False),
    # padded batches: what the masked rows hold is NaN
    *(Case(tokens=t, batch=2, mask=m) for t in (1, 9, 50) for m in (0.0, 0.5, 0.9)),
    Case(tokens=50, batch=2, mask=0.5, slots=(4, 1), num_slots=6, every=16),
    # norms in the kernel, rows of wider arrays, another scale
    *(Case(tokens=t, l2norm=True) for t in (3, 40)),
    *(Case(tokens=t, l2norm=True, mask=0.7, key_dim=256) for t in (9, 40)),
    *(Case(tokens=t, batch=2, padding=12) for t in (3, 40)),
    *(Case(tokens=t, padding=p, apart=a) for t in (3, 40) for p, a in ((1, 1), (6, 3))),
    Case(tokens=40, scale=1.0),
    # segments: two chunks' scratch at a time
    Case(tokens=77, cu_seqlens=RAGGED, every=10, scratch_bytes=2 * 2 * 1744),
]


def rounding(x, dtype):
    """Relative error of the exact result rounded to dtype."""
    return relative_error(unpack(pack(x, dtype), dtype), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_recurrence_in_float64(case, dtype):
    call = make(replace(case, dtype=dtype))
    result = call.run()
    o, state, checkpoints = result.errors()
    assert o <= 1.1 * rounding(call.o, dtype) + 1e-6
    assert state <= 1e-6
    assert checkpoints <= 1e-6
    if case.slots:
        others = np.setdiff1d(np.arange(case.num_slots), case.slots)
        assert np.isnan(result.pool[others]).all(), "a slot of nobody was written"
    if case.mask is not None:
        assert not result.o_bits[~call.arrays["mask"]].any(), "masked rows give 0"


def test_one_layer_at_real_shape():
    """Qwen3-Next's layer, a chunk of 512 tokens, in the form that is compiled just in time."""
    case = Case(tokens=512, key_heads=16, value_heads=32, dtype="bfloat16", cores=10)
    call = make(case)
    o, state, _ = call.run(flattened=True).errors()
    assert o <= 1.1 * rounding(call.o, "bfloat16") + 1e-6
    assert state <= 1e-6


# ------------------------------------------------------------------ accuracy where it is hard


def textbook(call, chunk=16):
    """The chunk form of Yang et al. in plain fp32 NumPy: W, U, cumulative gates by cumsum."""
    f = np.float32
    q, k, v, g, beta = (call.exact[x].astype(f) for x in ("q", "k", "v", "g", "beta"))
    start = call.arrays["initial_state"]
    g = np.maximum(g, f(-1e4))
    group = v.shape[2] // k.shape[2]
    o, states = np.zeros(v.shape, f), start.copy()
    scale = f(call.arguments["scale"])
    for h in range(v.shape[2]):
        S = start[0, h].T.copy()
        for t in range(0, v.shape[1], chunk):
            Q, K, V = (
                x[0, t : t + chunk, y] for x, y in ((q, h // group), (k, h // group), (v, h))
            )
            b, G = beta[0, t : t + chunk, h, None], np.cumsum(g[0, t : t + chunk, h], dtype=f)
            n = len(G)
            lower = np.tril(np.ones((n, n), bool))
            gam = np.where(lower, np.exp(np.where(lower, G[:, None] - G[None], 0)), 0).astype(f)
            L = np.tril(b * (K @ K.T) * gam, -1)
            inverse = np.eye(n, dtype=f)
            for i in range(1, n):
                inverse[i, :i] = -(L[i, :i] @ inverse[:i, :i])
            new = inverse @ (b * V) - inverse @ (b * np.exp(G)[:, None] * K) @ S
            o[0, t : t + chunk, h] = scale * (np.exp(G)[:, None] * (Q @ S) + (Q @ K.T * gam) @ new)
            S = np.exp(G[-1]) * S + K.T @ (np.exp(G[-1] - G)[:, None] * new)
        states[0, h] = S.T
    return relative_error(o, call.o), relative_error(states, call.state)


HARD = [  # case, absolute bar (design: relative Frobenius, D = 128, the op in fp32)
    (Case(tokens=512), 1e-6),
    (Case(tokens=512, keys="near"), 3e-6),
    (Case(tokens=512, keys="near", beta=1.99), 3e-5),
    (Case(tokens=512, keys="near", beta=2.0), 6e-4),
    (Case(tokens=512, gates="rare"), 1e-6),
    (Case(tokens=512, gates="infinite"), 1e-6),
    *((Case(tokens=512, gates=str(10**n)), 1e-6) for n in range(6)),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "bar"), HARD, ids=[str(case) for case, _ in HARD])
def test_no_worse_than_the_textbook_form(case, bar, dtype):
    # Of eight heads together: the error of one head with near-repeated keys is mostly luck.
    call = make(replace(case, dtype=dtype, key_heads=8, value_heads=8))
    o, state, _ = call.run().errors()
    plain_o, plain_state = textbook(call)
    assert state <= min(bar, 1.5 * plain_state)
    assert o <= rounding(call.o, dtype) * 1.01 + min(bar, 1.5 * plain_o)


@pytest.mark.parametrize("case", [case for case, _ in HARD], ids=str)
def test_token_by_token_is_the_same_rule(case):
    """Decode and prefill take different kernels: T * 3e-8 apart at most, beyond the oracle's bar."""
    bar = dict(HARD)[case]
    call = make(replace(case, tokens=96))
    state = call.arrays["initial_state"]
    whole = call.run()
    o = np.zeros_like(whole.o)
    one = make(replace(case, tokens=1))
    for t in range(96):
        for name in ("q", "k", "v", "g", "beta"):
            one.arrays[name] = call.arrays[name].reshape(1, 96, -1)[:, t].copy()
        one.arrays["initial_state"] = state
        step = one.run()
        o[:, t], state = step.o[:, 0], step.state
    assert relative_error(state, whole.state.astype(np.float64)) <= bar + 96 * 3e-8
    assert relative_error(o, whole.o) <= bar + 96 * 3e-8


def test_forty_thousand_tokens():
    """T > 32,767, 2,500 chunks in several segments, near-repeated keys: the bar is 8e-6."""
    call = make(
        Case(
            tokens=40_000,
            value_heads=1,
            key_dim=64,
            value_dim=64,
            keys="near",
            scratch_bytes=1 << 20,
        )
    )
    assert len(call.plan().launches) > 2
    assert max(call.run().errors()) <= 8e-6


# ------------------------------------------------------------------ invariance, bit for bit


def rows_of(call, begin, end):
    """The arrays of a call, cut to some rows of its single batch."""
    cut = dict(call.arrays)
    for name in ("q", "k", "v", "g", "beta"):
        cut[name] = np.ascontiguousarray(call.arrays[name].reshape(call.case.tokens, -1)[begin:end])
    return cut


def run_rows(call, begin, end, state):
    part = make(replace(call.case, tokens=end - begin, initial=True))
    part.arrays.update(rows_of(call, begin, end))
    part.arrays["o"] = np.zeros_like(call.arrays["o"][:, begin:end])
    part.arrays["initial_state"] = state
    result = part.run()
    return result.o_bits, result.state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [32, 48, 64])
def test_a_prompt_cut_between_chunks_gives_the_same_bits(dtype, cut):
    call = make(Case(tokens=100, dtype=dtype))
    whole = call.run()
    first, state = run_rows(call, 0, cut, call.arrays["initial_state"])
    second, state = run_rows(call, cut, 100, state)
    assert np.concatenate([first, second], 1).tobytes() == whole.o_bits.tobytes()
    assert state.tobytes() == whole.state.tobytes()


@pytest.mark.parametrize("cut", [1, 7, 45, 99])
def test_a_prompt_cut_anywhere_gives_the_same_numbers(cut):
    call = make(Case(tokens=100))
    first, state = run_rows(call, 0, cut, call.arrays["initial_state"])
    second, state = run_rows(call, cut, 100, state)
    assert relative_error(np.concatenate([first, second], 1), call.o) <= 1e-6
    assert relative_error(state, call.state) <= 1e-6


@pytest.mark.parametrize("chunks", [1, 2, 3, 100])
def test_segments_do_not_change_a_bit(chunks):
    case = Case(tokens=130, cu_seqlens=(0, 50, 50, 130), every=20, value_heads=3)
    whole = make(case).run()
    cut = make(replace(case, scratch_bytes=chunks * 3 * 1744)).run()
    assert cut.bits() == whole.bits()
    assert chunks == 100 or len(cut.done.launches) > len(whole.done.launches)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_is_the_state_of_a_shorter_prompt(dtype):
    call = make(Case(tokens=100, every=24, dtype=dtype))
    saved = call.run().checkpoints
    state = call.arrays["initial_state"]
    for i in range(4):
        begin = 24 * i
        short = replace(call.case, every=0)
        part = make(replace(short, tokens=24))
        part.arrays.update(rows_of(call, begin, begin + 24), initial_state=state)
        part.arrays["o"] = np.zeros_like(call.arrays["o"][:, :24])
        state = part.run().state
        assert state[0].tobytes() == saved[i].tobytes()


def test_ragged_sequences_do_not_see_each_other():
    call = make(Case(tokens=77, cu_seqlens=RAGGED))
    together = call.run()
    for n, (begin, end) in enumerate(itertools.pairwise(RAGGED)):
        if begin == end:
            assert together.state[n].tobytes() == call.arrays["initial_state"][n].tobytes()
            continue
        alone = make(replace(call.case, cu_seqlens=(), tokens=end - begin))
        alone.arrays.update(rows_of(call, begin, end))
        alone.arrays["initial_state"] = call.arrays["initial_state"][n : n + 1]
        alone.arrays["o"] = np.zeros_like(call.arrays["o"][:, begin:end])
        result = alone.run()
        assert result.o_bits.tobytes() == together.o_bits[:, begin:end].tobytes()
        assert result.state[0].tobytes() == together.state[n].tobytes()


def test_a_pool_is_the_functional_form_in_place():
    case = Case(tokens=90, cu_seqlens=(0, 40, 41, 90), every=16)
    functional = make(case).run()
    pooled = make(replace(case, slots=(3, 0, 5), num_slots=7)).run()
    assert pooled.o_bits.tobytes() == functional.o_bits.tobytes()
    assert pooled.state.tobytes() == functional.state.tobytes()
    assert pooled.checkpoints.tobytes() == functional.checkpoints.tobytes()


@pytest.mark.parametrize("tokens", [9, 40])
def test_unit_gates_and_zero_beta_leave_the_state_alone(tokens):
    call = make(Case(tokens=tokens, beta=0.0))
    result = call.run()
    assert result.state.tobytes() == call.arrays["initial_state"].tobytes()


def test_all_rows_masked_leave_the_state_alone():
    call = make(Case(tokens=40, mask=0.0))
    result = call.run()
    assert result.state.tobytes() == call.arrays["initial_state"].tobytes()
    assert not result.o_bits.any()


@pytest.mark.parametrize("tokens", [9, 40])
def test_masked_rows_give_zero_whatever_the_state_holds(tokens):
    call = make(Case(tokens=tokens, mask=0.5))
    call.arrays["initial_state"][:] = np.inf
    assert not call.run().o_bits[~call.arrays["mask"]].any()


def test_nan_stays_in_its_sequence():
    call = make(Case(tokens=80, cu_seqlens=(0, 40, 80)))
    clean = call.run()
    for name in ("q", "k", "v", "g", "beta"):
        call.arrays[name].reshape(80, -1)[:40] = np.nan
    spoilt = call.run()
    assert np.isnan(spoilt.o[0, :40]).all()
    assert spoilt.o_bits[:, 40:].tobytes() == clean.o_bits[:, 40:].tobytes()
    assert spoilt.state[1].tobytes() == clean.state[1].tobytes()


# ------------------------------------------------------------------ beside the CPU op


EQUAL = [
    Case(tokens=100, key_heads=2, value_heads=6),
    Case(tokens=9),
    Case(tokens=77, cu_seqlens=RAGGED, every=10),
    Case(tokens=50, batch=2, mask=0.5, l2norm=True),
    Case(tokens=200, keys="near"),
    Case(tokens=200, gates="rare"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_equals_the_cpu_op(case, dtype):
    """One rounding of the output apart at most, states at most two oracle bars."""
    call = make(replace(case, dtype=dtype))
    a = call.arrays
    shapes = {x: call.exact[x].shape for x in ("q", "k", "v")}
    o, state, *saved = chunkdelta.chunk_gated_delta_rule(
        *(as_mlx(a[x].reshape(shapes[x]), dtype) for x in ("q", "k", "v")),
        mx.array(a["g"]),
        mx.array(a["beta"]),
        initial_state=mx.array(a["initial_state"]),
        cu_seqlens=case.cu_seqlens or None,
        mask=mx.array(a["mask"]),
        checkpoint_every=case.every or None,
        qk_l2norm=case.l2norm,
        stream=mx.cpu,
    )
    result = call.run()
    bar = 2e-6 if case.keys == "random" else 6e-6
    assert relative_error(result.state, state) <= bar
    ulp = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert relative_error(result.o, o) <= bar + ulp / 4
    if case.every:
        assert relative_error(result.checkpoints, saved[0]) <= bar


# ------------------------------------------------------------------ work


def test_counts():
    """Per token and value head of a half layer with two value heads to a key head; MLX's kernel
    takes 204 products and reads 25,384 bytes (benchmarks/metal_counts.py)."""
    counters = make(Case(tokens=512, dtype="float16", cores=1)).run("check").done.counters
    per = 512 * 2
    assert counters.mma / per <= 106
    assert counters.device_bytes_read / per <= 2_100
    assert counters.threadgroup_bytes_read / per <= 9_000
    assert counters.simd_reductions == 0
    assert counters.threadgroup_memory <= 10_500


# ------------------------------------------------------------------ the plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_v_heads": 3, "num_k_heads": 2}, "value heads in groups"),
        ({"head_k_dim": 257}, "head dims of 1 to 256"),
        ({"head_v_dim": 0}, "head dims of 1 to 256"),
        ({"q": [2**31, 128, 1]}, "strides of less than"),
        ({"cu_seqlens": [0, 5]}, "cu_seqlens from 0 to 33"),
        ({"cu_seqlens": [0, 9, 5, 33]}, "do not decrease"),
        ({"pooled": True, "num_slots": 4, "state_indices": [4]}, "state_indices in 0..3"),
        ({"pooled": True, "num_slots": 4, "state_indices": [-1]}, "state_indices in 0..3"),
        ({"pooled": True, "num_slots": 4, "state_indices": []}, "1 state_indices"),
        ({"checkpoint_every": -1}, "positive checkpoint_every"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_plan_refuses(change, message):
    arguments = make(Case(initial=False)).arguments
    with pytest.raises(ValueError, match=message):
        plans.gated_delta(**{**arguments, **change})


@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim", "cores", "kernel", "threads"),
    [
        (32, 128, 128, 10, "gated_delta_scan_float_d128_n16", 128),
        (32, 128, 128, 40, "gated_delta_scan_float_d128_n8", 256),
        (32, 96, 96, 8, "gated_delta_scan_float_d96_n16", 96),
        (32, 256, 256, 8, "gated_delta_scan_float_d256_n8", 128),
        (32, 72, 72, 8, "gated_delta_scan_float_d96_n16", 96),
    ],
)
def test_tile(heads, key_dim, value_dim, cores, kernel, threads):
    arguments = make(Case(tokens=17, initial=False)).arguments
    arguments.update(num_v_heads=heads, head_k_dim=key_dim, head_v_dim=value_dim, gpu_cores=cores)
    scan = plans.gated_delta(**arguments).launches[-1]
    assert scan.kernel == kernel.replace("float", "f32")
    assert scan.threadgroup == (threads, 1, 1)


def test_batches_mix_both_kernels():
    case = Case(tokens=41, cu_seqlens=(0, 40, 41), initial=False)
    plan = make(case).plan()
    assert [launch.kernel for launch in plan.launches] == [
        "gated_delta_prep_f32_d128",
        "gated_delta_scan_f32_d128_n8",
        "gated_delta_sequential_f32_d128",
    ]
    assert "sequential for 1 of 2 sequences" in plan.why


def test_nothing_to_do_plans_nothing():
    arguments = make(Case(initial=False)).arguments
    arguments.update(tokens=0, pooled=True, num_slots=1, state_indices=[0])
    assert not plans.gated_delta(**arguments).launches


def test_scratch_is_bounded():
    """131,072 tokens of 32 heads: segments of at most 16 MB and 1.5e10 FLOP each."""
    arguments = make(Case(initial=False)).arguments
    arguments.update(tokens=131_072, num_k_heads=16, num_v_heads=32)
    plan = plans.gated_delta(**arguments)
    assert sum(s.bytes for s in plan.scratch) <= 16 << 20
    chunks = [x.grid[0] for x in plan.launches if "prep" in x.kernel]
    assert sum(chunks) == 131_072 // 16
    assert max(chunks) * 32 * 1024 * 1680 <= 1.5e10
