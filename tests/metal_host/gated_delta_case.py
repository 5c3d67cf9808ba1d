"""Calls of the gated delta rule: inputs, the float64 answer, and the launch plan executed on them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from chunkdelta._ext import plans
from chunkdelta.ops import naive
from chunkdelta.testing.compare import relative_error

from tests.metal_host import PlanResult, execute_plan

Array = npt.NDArray[Any]
DTYPES = ("float32", "float16", "bfloat16")
RAGGED = (0, 0, 1, 18, 18, 60, 77, 77)  # empty sequences, single tokens, tails
NAN_BITS = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}
L2NORM_EPS = 1e-6


def pack(x: Array, dtype: str) -> Array:
    """x in ``dtype``, rounded to nearest even; bfloat16 as its bits in uint16."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(x, dtype)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def unpack(x: Array, dtype: str) -> Array:
    """The float64 values of what ``pack`` made."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def nans(shape: tuple[int, ...], dtype: str) -> Array:
    """An array of NaN, as ``pack`` would have it."""
    bits = np.full(shape, NAN_BITS[dtype], np.uint32 if dtype == "float32" else np.uint16)
    return bits if dtype == "bfloat16" else bits.view(dtype)


@dataclass(frozen=True)
class Case:
    """A call. Fields that differ from the defaults name the test."""

    tokens: int = 33
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "float32"
    batch: int = 1
    keys: str = "random"  # near: almost the same key in every row
    beta: float | None = None  # constant, with g = 0
    gates: str = (
        "mild"  # rare: -30 among -0.01; infinite: -inf among them; or a half-life in tokens
    )
    cu_seqlens: tuple[int, ...] = ()
    mask: float | None = None  # the share of rows that count; the others hold NaN
    initial: bool = True
    slots: tuple[int, ...] = ()  # of a pool, whose other slots hold NaN
    num_slots: int = 0
    every: int = 0  # checkpoints
    l2norm: bool = False
    scale: float | None = None
    padding: int = 0  # elements of NaN between the rows of q, k and v
    apart: int = 1  # every so many elements of a row are the array's, the others NaN
    cores: int = 8
    scratch_bytes: int = 16 << 20
    seed: int = 0

    def __str__(self) -> str:
        changed = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        text = "-".join(f"{k}={v}" for k, v in changed.items()) or "default"
        return text.replace(" ", "").replace("_", "")


@dataclass
class Call:
    """A case's arrays by role, the arguments of its plan, and the exact results."""

    case: Case
    arrays: dict[str, Array]
    arguments: dict[str, Any]
    o: Array
    state: Array  # [N, Hv, Dv, Dk]
    checkpoints: Array
    exact: dict[str, Array] = field(default_factory=dict)  # float64 q, k (normalised), v, g, beta

    def plan(self) -> Any:
        return plans.gated_delta(**self.arguments)

    def run(self, mode: str = "fast", **kwargs: Any) -> Result:
        """Executes the plan; keyword arguments go to ``execute_plan``."""
        plan = self.plan()
        named = {b.role for launch in plan.launches for b in launch.buffers}
        arrays = {role: a for role, a in self.arrays.items() if role in named}
        outputs = [r for r in ("o", "checkpoints") if r in named]
        if not self.case.slots and "state" in named:
            outputs.append("state")
        done = execute_plan(plan, arrays, outputs=outputs, mode=mode, **kwargs)
        return Result(self, done)


def as_mlx(x: Array, dtype: str) -> mx.array:
    """What ``pack`` made, as an mx.array."""
    return mx.array(x).view(mx.bfloat16) if dtype == "bfloat16" else mx.array(x)


class Result:
    """What a plan wrote, and how far it is from the exact results."""

    def __init__(self, call: Call, done: PlanResult):
        self.done = done
        self.call = call
        self.o_bits = done.arrays["o"]
        self.o = unpack(self.o_bits, call.case.dtype)
        self.pool = done.arrays["state"]
        self.state = self.pool[list(call.case.slots)] if call.case.slots else self.pool
        self.checkpoints = done.arrays.get("checkpoints", np.zeros(call.checkpoints.shape))

    def errors(self) -> tuple[float, float, float]:
        """Relative errors of o, the states and the checkpoints."""
        call = self.call
        saved = relative_error(self.checkpoints, call.checkpoints) if call.case.every else 0.0
        return relative_error(self.o, call.o), relative_error(self.state, call.state), saved

    def bits(self) -> tuple[bytes, bytes, bytes]:
        return self.o_bits.tobytes(), self.pool.tobytes(), self.checkpoints.tobytes()


def make(case: Case, *, allocate_pool: bool = True) -> Call:
    """Draws a case's inputs and computes its exact results."""
    r = np.random.default_rng(case.seed)
    B, T, Hk, Hv = case.batch, case.tokens, case.key_heads, case.value_heads
    Dk, Dv = case.key_dim, case.value_dim
    q, k = r.standard_normal((B, T, Hk, Dk)), r.standard_normal((B, T, Hk, Dk))
    v = r.standard_normal((B, T, Hv, Dv))
    beta = r.uniform(0, 1, (B, T, Hv))
    g = -r.uniform(0, 0.1, (B, T, Hv))
    if case.keys == "near":
        k = r.standard_normal((B, 1, Hk, Dk)) + 1e-3 * k
        beta = r.uniform(0.9, 1, beta.shape)
        g = np.full(g.shape, -1e-3)
    if case.beta is not None:
        beta, g = np.full(beta.shape, case.beta), np.zeros(g.shape)
    if case.gates in ("rare", "infinite"):
        least = -30.0 if case.gates == "rare" else -np.inf
        g = np.where(r.uniform(size=g.shape) < 0.05, least, -0.01)
    elif case.gates != "mild":
        g = np.full(g.shape, -np.log(2) / float(case.gates))
    q /= np.linalg.norm(q, axis=-1, keepdims=True)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    if case.l2norm:
        q, k = q * r.uniform(0.2, 3, (B, T, 1, 1)), k * r.uniform(0.2, 3, (B, T, 1, 1))
    g, beta = g.astype(np.float32), beta.astype(np.float32)
    live = np.ones((B, T), bool) if case.mask is None else r.uniform(size=(B, T)) < case.mask

    arrays: dict[str, Array] = {}
    exact: dict[str, Array] = {}
    strides = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        x = pack(x, case.dtype)
        exact[name] = unpack(x, case.dtype)
        rows = x.reshape(B * T, -1)
        rows[~live.reshape(-1)] = nans((1,), case.dtype)[0]
        stride = rows.shape[1] * case.apart + case.padding
        wide = nans((B * T, stride), case.dtype)
        wide[:, : rows.shape[1] * case.apart : case.apart] = rows
        arrays[name] = wide
        strides[name] = [stride, x.shape[-1] * case.apart, case.apart]
    if case.l2norm:
        for name in ("q", "k"):
            x = exact[name]
            exact[name] = x / np.sqrt((x * x).sum(-1, keepdims=True) + L2NORM_EPS)
    exact["g"], exact["beta"] = g.astype(np.float64), beta.astype(np.float64)
    arrays["g"] = np.where(live[..., None], g, np.float32(np.nan))
    arrays["beta"] = np.where(live[..., None], beta, np.float32(np.nan))

    N = len(case.cu_seqlens) - 1 if case.cu_seqlens else B
    start = r.standard_normal((N, Hv, Dv, Dk)).astype(np.float32)
    if not case.initial:
        start[:] = 0
    scale = Dk**-0.5 if case.scale is None else case.scale
    o, state, *saved = naive.chunk_gated_delta_rule(
        **exact,
        scale=scale,
        initial_state=start,
        cu_seqlens=case.cu_seqlens or None,
        mask=live,
        checkpoint_every=case.every or None,
    )
    checkpoints = saved[0] if saved else np.zeros((0, Hv, Dv, Dk))

    arrays["o"] = pack(np.zeros((B, T, Hv, Dv)), case.dtype)
    arrays["mask"] = live
    arrays["initial_state"] = start
    arrays["state"] = np.zeros_like(start)
    if case.slots and allocate_pool:
        arrays["state"] = np.full((case.num_slots, Hv, Dv, Dk), np.nan, np.float32)
        arrays["state"][list(case.slots)] = start
    arrays["checkpoints"] = np.zeros(checkpoints.shape, np.float32)
    arguments = {
        "dtype": case.dtype,
        "batch": B,
        "tokens": T,
        "num_k_heads": Hk,
        "num_v_heads": Hv,
        "head_k_dim": Dk,
        "head_v_dim": Dv,
        "scale": scale,
        "qk_l2norm": case.l2norm,
        "mask": case.mask is not None,
        "cu_seqlens": list(case.cu_seqlens),
        "initial_state": case.initial and not case.slots,
        "pooled": bool(case.slots),
        "state_indices": list(case.slots),
        "num_slots": case.num_slots,
        "checkpoint_every": case.every,
        "scratch_bytes": case.scratch_bytes,
        "gpu_cores": case.cores,
        **strides,
    }
    return Call(case, arrays, arguments, o, state, checkpoints, exact)
