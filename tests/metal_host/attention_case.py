"""Calls of paged attention: inputs, the float64 answer, and the launch plan executed on them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from chunkdelta._ext import plans
from chunkdelta.testing import page_formats

from . import PlanResult, execute_plan

Array = npt.NDArray[Any]
FORMAT_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # of dtypes as pages
NAN_BITS = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}


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


def rounded(x: Array, dtype: str) -> Array:
    """The float64 values nearest to x that ``dtype`` has."""
    return unpack(pack(x, dtype), dtype)


def relative_error(x: Array, reference: Array) -> float:
    """Relative Frobenius error; the absolute one if the reference is 0."""
    norm = float(np.linalg.norm(reference))
    error = float(np.linalg.norm(np.asarray(x, np.float64) - reference))
    return error / norm if norm else error


def encode_rows(x: Array, page_format: str) -> tuple[Array, Array]:
    """Rows of x [..., D] as a page holds them, in bytes, and their float64 values."""
    if page_format in NAN_BITS:
        packed = pack(x, page_format)
        return packed.view(np.uint8), unpack(packed, page_format)
    rows = page_formats.encode(page_format, x)
    return rows, page_formats.decode(page_format, rows, x.shape[-1]).astype(np.float64)


@dataclass(frozen=True)
class Case:
    """A call. Fields that differ from the defaults name the test."""

    q_lens: tuple[int, ...] = (40, 0, 17)
    kv_lens: tuple[int, ...] = (100, 5, 17)
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    page_size: int = 16
    k_format: str = ""  # as dtype
    v_format: str = ""
    slabs: int = 1
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    steep: float = 1.0  # of q: large values make the softmax sharp and the maximum climb
    budget_ms: float = 10.0
    gathered_bytes: int = 32 << 20
    cores: int = 8
    seed: int = 0

    def __str__(self) -> str:
        changed = (
            f"{f.name}={value}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default
        )
        return "-".join(changed).replace(" ", "") or "default"


@dataclass
class Call:
    """The arrays of a case by their roles, and the exact results."""

    case: Case
    arrays: dict[str, Array]
    block_table: Array
    slab_pages: list[int]
    keys: list[Array]  # per sequence, float64 [L, Hkv, D], what the pages hold
    values: list[Array]
    o: Array = field(init=False)
    lse: Array = field(init=False)
    plain: Array = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        q = unpack(self.arrays["q"], case.dtype)
        o, lse, plain = [], [], []
        for n, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            k, v = self.keys[n], self.values[n]
            exact = attention(q[begin:end], k, v, self.arrays["sinks"], case)
            o.append(exact[0])
            lse.append(exact[1])
            plain.append(plain_attention(q[begin:end], k, v, self.arrays["sinks"], case))
        self.o, self.lse, self.plain = (np.concatenate(x) for x in (o, lse, plain))

    @property
    def bounds(self) -> list[int]:
        """Offsets of the sequences' queries."""
        return [0, *np.cumsum(self.case.q_lens).tolist()]

    def plan(self) -> Any:
        """The launch plan."""
        case = self.case
        return plans.paged_attention(
            dtype=case.dtype,
            num_q_heads=case.q_heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            page_size=case.page_size,
            k_format=FORMAT_NAMES.get(case.k_format or case.dtype, case.k_format),
            v_format=FORMAT_NAMES.get(case.v_format or case.dtype, case.v_format),
            slab_pages=self.slab_pages,
            block_table=self.block_table,
            seq_lens=list(case.kv_lens),
            cu_seqlens_q=self.bounds,
            scale=case.head_dim**-0.5 if case.scale is None else case.scale,
            causal=case.causal,
            window=case.window,
            softcap=case.softcap,
            sinks=case.sinks,
            return_lse=True,
            milliseconds=case.budget_ms,
            gathered_bytes=case.gathered_bytes,
            gpu_cores=case.cores,
        )

    def run(self, mode: str = "fast", **kwargs: Any) -> Result:
        """Executes the plan; keyword arguments go to ``execute_plan``."""
        plan = self.plan()
        named = {b.role for launch in plan.launches for b in launch.buffers}
        arrays = {role: a for role, a in self.arrays.items() if role in named}
        done = execute_plan(
            plan, arrays, outputs=[r for r in ("o", "lse") if r in named], mode=mode, **kwargs
        )
        return Result(self, done)


class Result:
    """What a plan wrote, and how far it is from the exact results."""

    def __init__(self, call: Call, done: PlanResult):
        self.call = call
        self.done = done
        self.o_bits = done.arrays["o"]
        self.o = unpack(self.o_bits, call.case.dtype)
        self.lse = done.arrays["lse"]

    def error(self) -> float:
        """Relative error of o."""
        return relative_error(self.o, self.call.o)

    def lse_error(self) -> float:
        """Largest error of the LSE, relative where it is large; inf if another row is empty."""
        exact = self.call.lse
        if not np.array_equal(np.isneginf(exact), np.isneginf(self.lse)):
            return float("inf")
        seen = np.isfinite(exact)
        error = np.abs(self.lse[seen] - exact[seen]) / np.maximum(1, np.abs(exact[seen]))
        return float(error.max(initial=0))

    def bits(self) -> tuple[bytes, bytes]:
        return self.o_bits.tobytes(), self.lse.tobytes()


def visible(T: int, L: int, case: Case) -> Array:
    """Which of L keys each of the last T positions sees."""
    position = np.arange(T)[:, None] + L - T
    key = np.arange(L)[None]
    seen = np.ones((T, L), bool)
    if case.causal:
        seen &= key <= position
    if case.window:
        seen &= key > position - case.window
    return seen


def attention(q: Array, k: Array, v: Array, sinks: Array, case: Case) -> tuple[Array, Array]:
    """o and LSE in float64: q [T, Hq, D], k, v [L, Hkv, D]."""
    return _softmax_attention(q, k, v, sinks, case, np.float64, lambda p: p)


def plain_attention(q: Array, k: Array, v: Array, sinks: Array, case: Case) -> Array:
    """The unfused computation: float32 scores and softmax, its weights and o rounded to dtype."""
    o, _ = _softmax_attention(
        q, k, v, sinks, case, np.float32, lambda p: rounded(p, case.dtype).astype(np.float32)
    )
    return rounded(o, case.dtype)


def _softmax_attention(
    q: Array, k: Array, v: Array, sinks: Array, case: Case, real: Any, store: Any
) -> tuple[Array, Array]:
    T, Hq, D = q.shape
    L, Hkv = k.shape[:2]
    q, k, v = (x.astype(real) for x in (q, k, v))
    k, v = np.repeat(k, Hq // Hkv, 1), np.repeat(v, Hq // Hkv, 1)
    s = np.einsum("thd,lhd->htl", q, k) * real(D**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        s = real(case.softcap) * np.tanh(s / real(case.softcap))
    seen = visible(T, L, case)
    s = np.where(seen, s, real(-np.inf))
    top = s.max(-1, keepdims=True, initial=-np.inf)
    column = sinks.astype(real)[:, None, None]
    if case.sinks:
        top = np.maximum(top, column)
    empty = ~seen.any(-1)[None, :, None]
    top = np.where(empty, real(0), top).astype(real)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    if case.sinks:
        total = total + np.exp(column - top)
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, np.log(total) + top)[..., 0].T
    p = store(np.where(empty, real(0), p / np.where(empty, real(1), total)))
    return np.einsum("htl,lhd->thd", p, v), lse


def make(case: Case) -> Call:
    """Draws a case: scattered pages whose unused slots are NaN, and the exact results."""
    r = np.random.default_rng(case.seed)
    size, Hkv, D = case.page_size, case.kv_heads, case.head_dim
    needed = [-(-length // size) for length in case.kv_lens]
    num_pages = sum(needed) + case.slabs
    free = r.permutation(num_pages)
    block_table = np.full((len(needed), max([*needed, 1]) + 1), -1, np.int32)
    for n, pages in enumerate(needed):
        block_table[n, :pages], free = free[:pages], free[pages:]

    arrays: dict[str, Array] = {}
    held: dict[str, list[Array]] = {}
    slab_pages = np.diff(np.linspace(0, num_pages, case.slabs + 1).astype(int)).tolist()
    for name, page_format in (("k", case.k_format), ("v", case.v_format)):
        page_format = page_format or case.dtype
        pool, _ = encode_rows(np.zeros((num_pages, Hkv, size, D)), page_format)
        if page_format not in NAN_BITS:
            pool = np.full_like(pool, 0x7F)  # scales and norms of NaN
        else:
            itemsize = 4 if page_format == "float32" else 2
            pool.view(f"u{itemsize}")[:] = NAN_BITS[page_format]
        held[name] = []
        for n, length in enumerate(case.kv_lens):
            rows, values = encode_rows(r.standard_normal((length or 1, Hkv, D)), page_format)
            at = np.arange(length)
            pool[block_table[n, at // size], :, at % size] = rows[:length]
            # Pages of another format are decoded to dtype.
            held[name].append(rounded(values[:length], case.dtype))
        for slab, rows in enumerate(np.split(pool, np.cumsum(slab_pages)[:-1])):
            arrays[f"{name}_pages" + (f".{slab}" if slab else "")] = np.ascontiguousarray(rows)

    tokens = sum(case.q_lens)
    q = r.standard_normal((tokens, case.q_heads, D)) * case.steep
    arrays["q"] = pack(q, case.dtype)
    arrays["sinks"] = r.uniform(-2, 6, case.q_heads).astype(np.float32)
    arrays["o"] = np.empty_like(arrays["q"])
    arrays["lse"] = np.empty((tokens, case.q_heads), np.float32)
    return Call(case, arrays, block_table, slab_pages, held["k"], held["v"])
