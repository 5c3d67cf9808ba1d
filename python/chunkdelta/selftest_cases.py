"""The calls that ``chunkdelta selftest`` checks, each beside its float64 oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from chunkdelta import _ext, ops
from chunkdelta.cache.pages import KVPages
from chunkdelta.cache.state_pool import StatePool
from chunkdelta.ops import naive
from chunkdelta.testing import page_formats
from chunkdelta.testing.attention import PagedBatch
from chunkdelta.testing.compare import relative_error, to_float64

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Relative error of rounding a whole array once, at most (half a unit in the last place).
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FP32_SUMS = 5e-7  # of a few hundred roundings in a dot product; docs/concepts, exactness


@dataclass(frozen=True)
class Part:
    """One output of an op beside what it should be."""

    actual: Any
    expected: Any
    bar: float  # relative Frobenius error allowed


@dataclass(frozen=True)
class Case:
    """One call that is checked.

    Attributes:
        op: public name.
        dtype: of the activations.
        shape: what a reader recognises the call by.
        run: makes the inputs, calls the op, and returns its outputs.
        plan: the call's launch plan, to name the kernels on a GPU.
    """

    op: str
    dtype: str
    shape: str
    run: Callable[[], list[Part]]
    plan: Callable[[], Any] | None = None


def cases() -> Iterator[Case]:
    """All cases, op by op, in a fixed order."""
    for make in (
        _causal_conv1d,
        _rope,
        _gated_delta_gates,
        _gated_delta,
        _gated_delta_step,
        _append_kv,
        _copy_pages,
        _paged_attention,
        _merge_states,
    ):
        yield from make()


def _random(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(values).astype(DTYPES[dtype])


def _causal_conv1d() -> Iterator[Case]:
    shapes = [
        # tokens of each sequence, channels, taps, options
        ([1], 256, 4, {"state": True}),
        ([70], 132, 4, {"bias": True}),
        ([0, 40, 2, 25], 36, 4, {"state": True}),
        ([33], 5, 3, {"mask": True}),
        ([50], 64, 8, {"state": True, "mask": True}),
    ]
    for (lengths, C, K, options), dtype in itertools.product(shapes, DTYPES):
        name = f"T={'+'.join(map(str, lengths))} C={C} K={K} {' '.join(options)}"
        yield Case(
            "causal_conv1d",
            dtype,
            name.strip(),
            partial(_run_causal_conv1d, lengths, C, K, options, dtype),
            partial(_plan_causal_conv1d, lengths, C, K, options, dtype),
        )


def _run_causal_conv1d(
    lengths: list[int], C: int, K: int, options: dict[str, bool], dtype: str
) -> list[Part]:
    T, N = sum(lengths), len(lengths)
    x, weight = _random(0, (1, T, C), dtype), _random(1, (C, K), dtype)
    bias = _random(2, (C,), dtype) if "bias" in options else None
    state = _random(3, (N, K - 1, C), dtype) if "state" in options else None
    mask = mx.array(np.random.default_rng(4).random((1, T)) < 0.6) if "mask" in options else None
    offsets = [0, *itertools.accumulate(lengths)] if N > 1 else None
    y, end = ops.causal_conv1d(
        x, weight, bias, initial_state=state, cu_seqlens=offsets, mask=mask, activation="silu"
    )
    expected, expected_end = naive.causal_conv1d(
        to_float64(x),
        to_float64(weight),
        None if bias is None else to_float64(bias),
        initial_state=None if state is None else to_float64(state),
        cu_seqlens=offsets,
        mask=None if mask is None else np.array(mask),
        activation="silu",
    )
    bar = ROUNDING[dtype] + FP32_SUMS
    return [Part(y, expected, bar), Part(end, expected_end, 0.0)]


def _plan_causal_conv1d(
    lengths: list[int], C: int, K: int, options: dict[str, bool], dtype: str
) -> Any:
    return _ext.plans.causal_conv1d(
        dtype,
        C,
        K,
        [0, *itertools.accumulate(lengths)],
        bias="bias" in options,
        initial_state="state" in options,
        mask="mask" in options,
        silu=True,
    )


def _rope() -> Iterator[Case]:
    shapes: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
        ("partial", (37, 5, 256), {"dims": 64, "base": 1e7}),
        ("traditional", (1, 8, 128), {"traditional": True}),
        ("M-RoPE", (9, 3, 256), {"dims": 64, "mrope_sections": [11, 11, 10]}),
    ]
    for (label, shape, options), dtype in itertools.product(shapes, DTYPES):
        name = f"T={shape[0]} H={shape[1]} D={shape[2]} {label}"
        run = partial(_run_rope, shape, options, dtype)
        yield Case("rope", dtype, name, run, partial(_ext.plans.rope, dtype, *shape, [1.0], [0]))


def _run_rope(shape: tuple[int, int, int], options: dict[str, Any], dtype: str) -> list[Part]:
    x = _random(0, shape, dtype)
    axes = (3,) if "mrope_sections" in options else ()
    positions = np.random.default_rng(1).integers(0, 131_072, (*axes, shape[0]))
    out = ops.rope(x, mx.array(positions, mx.int32), **options)
    expected = naive.rope(to_float64(x), positions, **options)
    return [Part(out, expected, ROUNDING[dtype] + FP32_SUMS)]


def _gated_delta_gates() -> Iterator[Case]:
    for dtype in DTYPES:
        yield Case(
            "gated_delta_gates",
            dtype,
            "T=65 Hv=6",
            partial(_run_gates, dtype),
            partial(_ext.plans.gated_delta_gates, dtype, 65, 6),
        )


def _run_gates(dtype: str) -> list[Part]:
    a, b = _random(0, (1, 65, 6), dtype), _random(1, (1, 65, 6), dtype)
    A_log, dt_bias = _random(2, (6,)), _random(3, (6,))
    g, beta = ops.gated_delta_gates(a, b, A_log, dt_bias)
    expected = naive.gated_delta_gates(*map(to_float64, (a, b, A_log, dt_bias)))
    return [Part(g, expected[0], 1e-6), Part(beta, expected[1], 1e-6)]


def _gated_delta_inputs(
    B: int, T: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: str, keys: str
) -> tuple[list[mx.array], list[Any]]:
    """q, k, v, g, beta as the op takes them, and the same values in float64."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, B, T, Hk, Dk))
    if keys == "repeated":  # what breaks a Neumann series: all keys nearly the same
        k = rng.standard_normal((B, 1, Hk, Dk)) + 1e-3 * k
    v = rng.standard_normal((B, T, Hv, Dv))
    g = -np.exp(rng.uniform(-7, -2, (B, T, Hv)))
    g[:, T // 3 :: 41] = -30.0  # a reset among slow decays
    beta = rng.uniform(0.5, 1.0, (B, T, Hv))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    arrays = [mx.array(x.astype(np.float32)).astype(DTYPES[dtype]) for x in (q, k, v)]
    arrays += [mx.array(x.astype(np.float32)) for x in (g, beta)]
    return arrays, [to_float64(a) for a in arrays]


def _gated_delta() -> Iterator[Case]:
    shapes: list[tuple[list[int], str, dict[str, Any]]] = [
        # [B, T, Hk, Hv, Dk, Dv], keys, options
        ([1, 130, 1, 2, 128, 128], "random", {}),
        ([2, 77, 2, 2, 64, 96], "repeated", {"state": True, "mask": True}),
        ([1, 100, 1, 1, 192, 64], "random", {"cu_seqlens": [0, 3, 3, 80, 100]}),
        ([1, 70, 1, 2, 128, 128], "random", {"pool": True, "checkpoints": True}),
        ([1, 7, 1, 2, 256, 256], "random", {"state": True}),
    ]
    for (sizes, keys, options), dtype in itertools.product(shapes, DTYPES):
        B, T, Hk, Hv, Dk, Dv = sizes
        name = f"B={B} T={T} Hk={Hk} Hv={Hv} D={Dk}/{Dv} {keys} {' '.join(options)}"
        yield Case(
            "chunk_gated_delta_rule",
            dtype,
            name.strip(),
            partial(_run_gated_delta, sizes, keys, options, dtype),
            partial(_plan_gated_delta, sizes, options, dtype),
        )


def _run_gated_delta(
    sizes: list[int], keys: str, options: dict[str, Any], dtype: str
) -> list[Part]:
    B, T, Hk, Hv, Dk, Dv = sizes
    arrays, exact = _gated_delta_inputs(B, T, Hk, Hv, Dk, Dv, dtype, keys)
    offsets = options.get("cu_seqlens")
    N = B if offsets is None else len(offsets) - 1
    every = 32 if "checkpoints" in options else None
    start = _random(5, (N, Hv, Dv, Dk)) if {"state", "pool"} & options.keys() else None
    mask = np.random.default_rng(6).random((B, T)) < 0.8 if "mask" in options else None
    expected = naive.chunk_gated_delta_rule(
        *exact,
        initial_state=None if start is None else to_float64(start),
        cu_seqlens=offsets,
        mask=mask,
        checkpoint_every=every,
    )
    shared: dict[str, Any] = {
        "cu_seqlens": offsets,
        "mask": None if mask is None else mx.array(mask),
        "checkpoint_every": every,
    }
    if "pool" in options:
        pool = StatePool(3, num_v_heads=Hv, head_v_dim=Dv, head_k_dim=Dk)
        assert start is not None
        pool.write(2, start[0])
        o, _, *checkpoints = ops.chunk_gated_delta_rule(
            *arrays, state_pool=pool, state_indices=[2], **shared
        )
        state = pool.read(2)[None]
    else:
        o, state, *checkpoints = ops.chunk_gated_delta_rule(*arrays, initial_state=start, **shared)
    bar = 3e-6 if keys == "repeated" else 1e-6
    parts = [Part(o, expected[0], bar + ROUNDING[dtype]), Part(state, expected[1], bar)]
    return parts + [Part(c, e, bar) for c, e in zip(checkpoints, expected[2:], strict=True)]


def _plan_gated_delta(sizes: list[int], options: dict[str, Any], dtype: str) -> Any:
    B, T, Hk, Hv, Dk, Dv = sizes
    pooled = "pool" in options
    return _ext.plans.gated_delta(
        dtype=dtype,
        batch=B,
        tokens=T,
        num_k_heads=Hk,
        num_v_heads=Hv,
        head_k_dim=Dk,
        head_v_dim=Dv,
        scale=Dk**-0.5,
        mask="mask" in options,
        cu_seqlens=options.get("cu_seqlens", []),
        initial_state="state" in options,
        pooled=pooled,
        state_indices=[2] if pooled else [],
        num_slots=3 if pooled else 0,
        checkpoint_every=32 if "checkpoints" in options else 0,
    )


def _gated_delta_step() -> Iterator[Case]:
    for dtype in DTYPES:
        plan = partial(_plan_gated_delta, [3, 1, 2, 4, 128, 128], {"state": True}, dtype)
        yield Case(
            "gated_delta_step", dtype, "B=3 Hk=2 Hv=4 D=128", partial(_run_step, dtype), plan
        )


def _run_step(dtype: str) -> list[Part]:
    arrays, exact = _gated_delta_inputs(3, 1, 2, 4, 128, 128, dtype, "random")
    start = _random(5, (3, 4, 128, 128))
    o, state = ops.gated_delta_step(*(a[:, 0] for a in arrays), initial_state=start)
    expected, expected_state = naive.gated_delta_step(
        *(e[:, 0] for e in exact), initial_state=to_float64(start)
    )
    return [Part(o, expected, 1e-6 + ROUNDING[dtype]), Part(state, expected_state, 1e-6)]


PAGE_FORMATS = {"f32": 0.0, "f16": 0.0, "bf16": 0.0, "q8_0": 0.0, "q4_0": 5e-3, "turbo4": 2e-2}


def _append_kv() -> Iterator[Case]:
    for fmt, dtype in itertools.product(PAGE_FORMATS, DTYPES):
        yield Case(
            "append_kv",
            dtype,
            f"T=21 Hkv=2 D=128 to {fmt}",
            partial(_run_append_kv, fmt, dtype),
            partial(_plan_append_kv, fmt, dtype),
        )


def _run_append_kv(fmt: str, dtype: str) -> list[Part]:
    """The pool's bytes beside those that the CPU op writes, whose own tests know ggml's."""
    slots = [5, -1, *range(20, 39)]
    k = _random(0, (21, 2, 128), dtype)
    slabs = []
    for device in (mx.default_device(), mx.Device(mx.cpu)):
        pages = KVPages(3, 2, 128, page_size=16, k_format="f32", v_format=fmt)
        ops.append_kv(pages, k, k, slots, stream=device)
        slabs.append(_values(pages.arrays[1], fmt))
    return [Part(slabs[0], slabs[1], PAGE_FORMATS[fmt])]


def _plan_append_kv(fmt: str, dtype: str) -> Any:
    return _ext.plans.append_kv(
        dtype, fmt, range(21), num_kv_heads=2, head_dim=128, page_size=16, num_pages=3
    )


def _values(slab: mx.array, fmt: str) -> Any:
    """What a slab of bytes stands for; turbo4 rows stay rotated."""
    if slab.dtype != mx.uint8:
        return to_float64(slab)
    return page_formats.decode(fmt, np.array(slab), 128)


def _copy_pages() -> Iterator[Case]:
    yield Case("copy_pages", "bytes", "3 pages over 2 slabs", _run_copy_pages)


def _run_copy_pages() -> list[Part]:
    pages = KVPages(4, 2, 64, page_size=16, k_format="f16", v_format="q8_0")
    pages.grow(4)
    rows = _random(0, (128, 2, 64))
    ops.append_kv(pages, rows, rows, range(128))
    before = [np.concatenate([to_float64(a) for a in pages.arrays[i::2]]) for i in (0, 1)]
    source, target = [0, 6, 2], [5, 3, 7]
    pages.copy_pages(source, target)
    parts = []
    for i in (0, 1):
        expected = before[i].copy()
        expected[target] = before[i][source]
        actual = np.concatenate([to_float64(a) for a in pages.arrays[i::2]])
        parts.append(Part(actual, expected, 0.0))
    return parts


def _paged_attention() -> Iterator[Case]:
    batches: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("prefill", {"q_lens": [70, 0, 33], "seq_lens": [150, 5, 33]}, {}),
        ("decode", {"q_lens": [1, 1, 4], "seq_lens": [200, 3, 90]}, {}),
        (
            "window softcap sinks",
            {"q_lens": [40], "seq_lens": [130]},
            {"window": 30, "softcap": 20.0, "sinks": True},
        ),
    ]
    heads = [(64, 4, 2), (80, 3, 1), (128, 6, 2), (256, 4, 1)]
    for i, ((label, lens, options), dtype) in enumerate(itertools.product(batches, DTYPES)):
        D, Hq, Hkv = heads[i % len(heads)]
        plain = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
        for kv in (plain, "q8_0"):
            yield Case(
                "paged_attention",
                dtype,
                f"{label} Hq={Hq} Hkv={Hkv} D={D} {kv}",
                partial(_run_paged_attention, D, Hq, Hkv, lens, options, dtype, kv),
                partial(_plan_paged_attention, D, Hq, Hkv, lens, options, dtype, kv),
            )


def _run_paged_attention(
    D: int, Hq: int, Hkv: int, lens: dict[str, Any], options: dict[str, Any], dtype: str, kv: str
) -> list[Part]:
    batch = PagedBatch(
        **lens,
        head_dim=D,
        num_q_heads=Hq,
        num_kv_heads=Hkv,
        dtype=DTYPES[dtype],
        k_format=kv,
        v_format=kv,
        slabs=2,
    )
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = np.linspace(-1, 1, Hq).astype(np.float32)
    exact, exact_lse = batch.naive(**options)
    plain = batch.plain(**options)
    if "sinks" in options:
        options["sinks"] = mx.array(options["sinks"])
    o, lse = ops.paged_attention(batch.q, batch.pages, **batch.metadata, return_lse=True, **options)
    bar = 2 * relative_error(plain, exact) + FP32_SUMS
    return [Part(o, exact, bar), Part(lse, exact_lse, 2e-6 + ROUNDING[dtype])]


def _plan_paged_attention(
    D: int, Hq: int, Hkv: int, lens: dict[str, Any], options: dict[str, Any], dtype: str, kv: str
) -> Any:
    """The plan of the same shapes; which pages the pool scattered the keys to does not matter."""
    needed = [-(-n // 16) for n in lens["seq_lens"]]
    return _ext.plans.paged_attention(
        dtype,
        Hq,
        Hkv,
        D,
        16,
        kv,
        kv,
        [sum(needed) + 2],
        np.zeros((len(needed), max(needed)), np.int32),
        lens["seq_lens"],
        [0, *itertools.accumulate(lens["q_lens"])],
        scale=D**-0.5,
        window=options.get("window", 0),
        softcap=options.get("softcap", 0.0),
        sinks="sinks" in options,
        return_lse=True,
    )


def _merge_states() -> Iterator[Case]:
    for dtype in DTYPES:
        yield Case(
            "merge_states",
            dtype,
            "S=3 T=19 H=4 D=64",
            partial(_run_merge, dtype),
            partial(_ext.plans.merge_states, dtype, 3, 19, 4, 64),
        )


def _run_merge(dtype: str) -> list[Part]:
    outs, lses = _random(0, (3, 19, 4, 64), dtype), _random(1, (3, 19, 4))
    o, lse = ops.merge_states(outs, lses)
    expected, expected_lse = naive.merge_states(to_float64(outs), to_float64(lses))
    return [Part(o, expected, ROUNDING[dtype] + FP32_SUMS), Part(lse, expected_lse, 1e-6)]
