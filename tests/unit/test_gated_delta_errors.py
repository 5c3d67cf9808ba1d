"""What the gated delta ops refuse, and in which words."""

import gc

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta import _ext
from chunkdelta.testing.gated_delta_strategies import GatedDeltaCall

B, T, HK, HV, DK, DV = 2, 6, 2, 4, 8, 12


def arguments(**changes):
    call = GatedDeltaCall(B, T, None, HK, HV // HK, DK, DV)
    return {**call.arguments(), **changes}


def zeros(*shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)


def pool(slots=3, shape=(HV, DV, DK)):
    return chunkdelta.StatePool(slots, *shape)


REFUSED = {
    "q-ndim": ({"q": zeros(T, HK, DK)}, r"expected q \[B, T, Hk, Dk\]; got float32 \(6, 2, 8\)"),
    "k-shape": ({"k": zeros(B, T, HK, 4)}, r"expected k of q's shape .* = \(2, 6, 2, 8\); got"),
    "v-ndim": ({"v": zeros(B, T, DV)}, r"expected v \[B, T, Hv, Dv\]; got"),
    "v-rows": ({"v": zeros(B, 5, HV, DV)}, r"expected v .* = \(2, 6, 4, 12\); got .*\(2, 5, 4"),
    "v-heads": (
        {"v": zeros(B, T, 3, DV)},
        r"expected Hv value heads in equal groups per key head, Hk = 2; got float32 \(2, 6, 3, 12",
    ),
    "Dk": (
        {"q": zeros(B, T, HK, 6), "k": zeros(B, T, HK, 6)},
        r"expected Dk a multiple of 4 in 4\.\.256; got float32 \(2, 6, 2, 6\)",
    ),
    "Dv": ({"v": zeros(B, T, HV, 260)}, r"expected Dv a multiple of 4 in 4\.\.256; got"),
    "q-dtype": ({"q": zeros(B, T, HK, DK, dtype=mx.int32)}, r"expected q in \{float32, float16"),
    "k-dtype": ({"k": zeros(B, T, HK, DK, dtype=mx.float16)}, r"expected k of q's dtype"),
    "v-dtype": ({"v": zeros(B, T, HV, DV, dtype=mx.bfloat16)}, r"expected v of q's dtype"),
    "g-per-channel": (
        {"g": zeros(B, T, HV, DK)},
        r"expected g \[B, T, Hv\], one gate per head \(per-channel gates, as KDA has them",
    ),
    "g-shape": ({"g": zeros(B, T, HK)}, r"expected g \[B, T, Hv\] = \(2, 6, 4\); got"),
    "g-dtype": (
        {"g": zeros(B, T, HV, dtype=mx.bfloat16)},
        r"expected g float32, the log of the decay; got bfloat16 \(2, 6, 4\)",
    ),
    "beta-shape": ({"beta": zeros(B, T)}, r"expected beta \[B, T, Hv\] = \(2, 6, 4\); got"),
    "beta-dtype": (
        {"beta": zeros(B, T, HV, dtype=mx.float16)},
        r"expected beta float32 or of q's dtype; got float16",
    ),
    "mask-shape": ({"mask": zeros(B, 5, dtype=mx.bool_)}, r"expected mask \[B, T\] = \(2, 6\)"),
    "mask-dtype": ({"mask": zeros(B, T)}, r"expected mask of dtype bool; got float32"),
    "state-shape": (
        {"initial_state": zeros(B, HV, DK, DV)},
        r"expected initial_state \[N, Hv, Dv, Dk\] = \(2, 4, 12, 8\); got float32 \(2, 4, 8, 12\)",
    ),
    "state-dtype": (
        {"initial_state": zeros(B, HV, DV, DK, dtype=mx.float16)},
        r"expected initial_state float32; got float16",
    ),
    "chunk-size": ({"chunk_size": 48}, r"expected chunk_size in \{16, 32, 64\}; got 48"),
    "checkpoint-every": ({"checkpoint_every": 0}, r"expected checkpoint_every >= 1; got 0"),
    "cu-seqlens-batch": ({"cu_seqlens": [0, 6]}, r"expected batch 1 beside cu_seqlens; got batch"),
    "pool-and-state": (
        {
            "initial_state": zeros(B, HV, DV, DK),
            "state_pool": pool(),
            "state_indices": [0, 1],
        },
        r"expected initial_state or state_pool; got both",
    ),
    "pool-alone": (
        {"state_pool": pool()},
        r"state_pool and state_indices together; got no state_i",
    ),
    "slots-alone": ({"state_indices": [0, 1]}, r"together; got no state_pool"),
    "pool-shape": (
        {"state_pool": pool(shape=(HV, DK, DV)), "state_indices": [0, 1]},
        r"expected a state pool of \[Hv, Dv, Dk\] = \(4, 12, 8\); got float32 \(3, 4, 8, 12\)",
    ),
    "slots-count": (
        {"state_pool": pool(), "state_indices": [0]},
        r"expected state_indices \[N\] = \(2,\), each a slot of its own in 0\.\.2; got \[0\] \(1,\)",
    ),
    "slots-range": ({"state_pool": pool(), "state_indices": [0, 3]}, r"0\.\.2; got \[0, 3\]"),
    "slots-negative": ({"state_pool": pool(), "state_indices": [-1, 0]}, r"got \[-1, 0\]"),
    "slots-twice": ({"state_pool": pool(), "state_indices": [1, 1]}, r"got \[1, 1\]"),
    "slots-float": (
        {"state_pool": pool(), "state_indices": np.array([0.0, 1.0])},
        r"expected state_indices of an integer dtype",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_rule_refuses(case):
    changes, message = REFUSED[case]
    call = arguments(**changes)
    mx.eval([a for a in call.values() if isinstance(a, mx.array)])
    gc.collect()  # not while the memory is being watched
    before = mx.get_active_memory(), _ext.workspace_bytes()
    with pytest.raises(ValueError, match=r"^\[chunk_gated_delta_rule\] ") as error:
        chunkdelta.chunk_gated_delta_rule(**call)
    assert error.match(message)
    assert (mx.get_active_memory(), _ext.workspace_bytes()) == before


@pytest.mark.parametrize(
    "offsets", [[0, 4], [1, 6], [0, 4, 3, 6], [0], [], [[0, 6]]], ids=lambda o: str(o)
)
def test_offsets_are_checked_by_value(offsets):
    call = GatedDeltaCall(tokens=6).arguments()
    with pytest.raises(ValueError, match=r"expected cu_seqlens \[N\+1\] of N >= 1 sequences"):
        chunkdelta.chunk_gated_delta_rule(**call, cu_seqlens=offsets)


@pytest.mark.parametrize("kind", [list, np.array, mx.array])
def test_host_metadata_of_any_kind(kind):
    call = GatedDeltaCall(tokens=6, ratio=2).arguments()
    states = chunkdelta.StatePool(4, 2, 16, 16)
    o, _ = chunkdelta.chunk_gated_delta_rule(
        **call, cu_seqlens=kind([0, 2, 6]), state_pool=states, state_indices=kind([3, 0])
    )
    expected, after = chunkdelta.chunk_gated_delta_rule(**call, cu_seqlens=[0, 2, 6])
    assert mx.array_equal(o, expected).item()
    assert mx.array_equal(states.read(3), after[0]).item()


def test_an_mx_array_as_host_metadata_is_refused_while_tracing():
    call = GatedDeltaCall(tokens=6).arguments()

    def f(offsets):
        return chunkdelta.chunk_gated_delta_rule(**call, cu_seqlens=offsets)

    with pytest.raises(ValueError, match="cu_seqlens as host data"):
        mx.compile(f)(mx.array([0, 6]))


def test_step_names_itself():
    token = {name: a[:, 0] for name, a in arguments().items()}
    with pytest.raises(ValueError, match=r"\[gated_delta_step\] expected q \[B, Hk, Dk\]; got"):
        chunkdelta.gated_delta_step(**{**token, "q": zeros(B, 1, HK, DK)})
    with pytest.raises(ValueError, match=r"\[gated_delta_step\] expected g \[B, Hv\] = \(2, 4\)"):
        chunkdelta.gated_delta_step(**{**token, "g": zeros(B, HK)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": zeros(B, 3)}, r"expected b of a's shape = \(2, 4\); got"),
        ({"b": zeros(B, 4, dtype=mx.float16)}, r"expected b of a's dtype"),
        ({"A_log": zeros(3)}, r"expected A_log \[Hv\] = \(4\); got"),
        ({"dt_bias": zeros(4, dtype=mx.int32)}, r"expected dt_bias in \{float32"),
        ({"a": mx.array(0.0), "b": mx.array(0.0)}, r"expected a \[\.\.\., Hv\]; got"),
        ({"lower_bound": -np.inf}, r"expected a finite lower_bound"),
    ],
)
def test_gates_refuse(changes, message):
    call = {"a": zeros(B, 4), "b": zeros(B, 4), "A_log": zeros(4), "dt_bias": zeros(4), **changes}
    with pytest.raises(ValueError, match=r"^\[gated_delta_gates\] ") as error:
        chunkdelta.gated_delta_gates(**call)
    assert error.match(r".*" + message)
