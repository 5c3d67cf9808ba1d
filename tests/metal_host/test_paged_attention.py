"""The attention kernels: their launch plans executed on the host, against float64."""

from __future__ import annotations

import copy
import struct
from dataclasses import replace

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta._ext import plans
from chunkdelta.testing.attention import PagedBatch
from hypothesis import given, settings
from hypothesis import strategies as st

from . import METAL_ROOT, Options, execute_plan
from .attention_case import Call, Case, make, pack, relative_error, rounded, unpack
from .mutants import outcomes

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
FORMATS = ("float32", "float16", "bfloat16", "q8_0", "q4_0", "turbo4")

CASES = [
    # prefill and decode at each head dim: tails of rows, keys and pages, empty sequences
    *(Case(head_dim=d) for d in HEAD_DIMS),
    *(Case((1, 3, 8, 0, 2), (100, 3, 700, 5, 0), head_dim=d, page_size=32) for d in HEAD_DIMS),
    # ratios of heads; pages that are no power of two
    *(Case((50, 3), (70, 40), q, kv, page_size=48) for q, kv in ((1, 1), (3, 3), (7, 1), (16, 1))),
    Case((70, 2), (70, 90), 12, 2, 256, page_size=128),
    # a page number of 32 at a time: tables longer than that, windows that skip their beginning
    Case((20, 1), (1200, 1500)),
    Case((20, 3), (1200, 1500), window=100),
    *(Case((50, 20, 3), (200, 20, 90), window=w) for w in (1, 7, 64)),
    # more queries than keys, no keys, one key: rows that see nothing
    Case((50, 20, 3, 9), (20, 0, 1, 1), 4, 2, 256),
    Case((50, 20, 3, 9), (20, 0, 1, 1), causal=False, sinks=True),
    # options, alone and together
    Case((50, 20, 3), (200, 20, 900), causal=False),
    Case((50, 20, 3), (200, 20, 900), softcap=2.0),
    Case((50, 20, 3), (200, 20, 900), sinks=True),
    Case((50, 20, 3), (200, 20, 900), scale=1.0),
    Case((50, 20, 3), (200, 20, 900), steep=8.0),
    Case((50, 20, 3), (200, 20, 900), head_dim=128, sinks=True, softcap=5.0, window=70),
    # segments: (m, l, O) carried, ragged batches whose sequences share launches
    Case((50, 20, 3, 30), (600, 20, 900, 700), budget_ms=0.02, sinks=True),
    Case((50, 300), (600, 300), head_dim=256, budget_ms=0.05, window=200),
    # decode with many splits, of which some rows of the window see nothing
    Case((1, 8), (3000, 2000), cores=40),
    Case((8, 2), (3000, 2000), cores=40, window=50, sinks=True),
    # slabs
    Case((30, 2), (130, 300), slabs=3),
    Case((30, 2), (430, 300), slabs=2, k_format="q8_0", gathered_bytes=100_000),
]
FORMAT_CASES = [
    *(Case((30, 2), (130, 300), 6, 2, 96, k_format=k, v_format="q8_0") for k in FORMATS),
    *(Case((30, 2), (130, 300), 6, 2, 256, v_format=v) for v in FORMATS),
    *(Case((2, 8), (130, 300), 6, 2, 128, k_format=k, v_format="q8_0") for k in FORMATS),
    *(Case((30, 2), (130, 300), 6, 2, 80, k_format=f, v_format=f) for f in FORMATS[3:]),
    Case((50, 2), (600, 300), k_format="q8_0", budget_ms=0.02, gathered_bytes=70_000),
]


def check(call: Call, **kwargs: object) -> None:
    result = call.run(**kwargs)
    own = max(
        relative_error(call.plain, call.o),
        relative_error(rounded(call.o, call.case.dtype), call.o),
    )
    assert result.error() <= 2 * own
    # The log-sum-exp in float32, of scores summed in float32: a few units in the last place.
    assert result.lse_error() <= 4e-6
    empty = np.isneginf(call.lse)
    assert not result.o[empty].any(), "rows that see nothing give 0"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_softmax_attention_in_float64(case, dtype):
    check(make(replace(case, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FORMAT_CASES, ids=str)
def test_page_formats(case, dtype):
    check(make(replace(case, dtype=dtype)))


CPU_CASES = [  # dtype, head_dim, format of K, of V, options
    ("float32", 64, "f32", "f32", {}),
    ("float16", 256, "f16", "f16", {"softcap": 4.0}),
    ("bfloat16", 256, "bf16", "bf16", {"window": 40}),
    ("bfloat16", 128, "q8_0", "q8_0", {}),
    ("bfloat16", 96, "bf16", "q8_0", {}),
]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "k_format", "v_format", "options"), CPU_CASES, ids=lambda x: str(x)
)
def test_equals_the_cpu_op(dtype, head_dim, k_format, v_format, options):
    """The same pool, metadata and options: no further apart than both may be from exact."""
    batch = PagedBatch(
        (30, 1, 0, 5), (70, 300, 20, 5), 4, 2, head_dim, 16, getattr(mx, dtype), k_format, v_format
    )
    o, lse = chunkdelta.paged_attention(
        batch.q, batch.pages, **batch.metadata, return_lse=True, **options
    )
    plan = plans.paged_attention(
        dtype, 4, 2, head_dim, 16, k_format, v_format, [batch.pages.num_pages],
        **batch.metadata, scale=head_dim**-0.5, return_lse=True, **options,
    )  # fmt: skip
    k, v = batch.pages.arrays
    arrays = {"q": batch.q, "k_pages": k, "v_pages": v, "o": o, "lse": lse}
    arrays = {
        role: np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
        for role, x in arrays.items()
    }
    done = execute_plan(plan, arrays, outputs=["o", "lse"], mode="fast").arrays
    exact, exact_lse = batch.naive(**options)
    cpu = unpack(arrays["o"], dtype)
    allowed = 2 * max(relative_error(batch.plain(**options), exact), 1e-7)
    assert relative_error(cpu, exact) <= allowed
    assert relative_error(unpack(done["o"], dtype), cpu) <= allowed + relative_error(cpu, exact)
    assert np.array_equal(np.isneginf(done["lse"]), np.isneginf(exact_lse))
    seen = np.isfinite(exact_lse)
    # The GPU decodes pages of other formats to the queries' dtype, the CPU to float32.
    allowed = 2.0**-8 if k_format == "q8_0" and dtype == "bfloat16" else 1e-5
    assert np.abs(done["lse"][seen] - arrays["lse"][seen]).max() <= allowed


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 2, 64), (3, 7, 5, 80), (40, 2, 3, 256)], ids=str)
def test_merge_states(shape, dtype, mode):
    """Softmax-weighted sums of partial results; parts without keys, rows without any."""
    r = np.random.default_rng(0)
    outs = pack(r.standard_normal(shape), dtype)
    lses = r.uniform(-30, 30, shape[:3]).astype(np.float32)
    lses[r.uniform(size=lses.shape) < 0.3] = -np.inf
    lses[:, 0, 0] = -np.inf
    outs[np.isneginf(lses)] = pack(np.array(np.nan), dtype)  # must not reach the sum
    plan = plans.merge_states(dtype, *shape)
    arrays = {"outs": outs, "lses": lses, "o": outs[0].copy(), "lse": lses[0].copy()}
    done = execute_plan(plan, arrays, outputs=["o", "lse"], mode=mode).arrays
    parts = np.nan_to_num(unpack(outs, dtype))

    def merged(real):
        x = lses.astype(real)
        with np.errstate(divide="ignore"):
            lse = np.log(np.exp(x).sum(0))
        weight = np.exp(x - np.where(np.isfinite(lse), lse, real(0)))
        return (parts.astype(real) * weight[..., None]).sum(0), lse

    o, lse = merged(np.float64)
    plain = rounded(merged(np.float32)[0], dtype)
    assert relative_error(unpack(done["o"], dtype), o) <= 2 * relative_error(plain, o)
    seen = np.isfinite(lse)
    assert np.array_equal(seen, np.isfinite(done["lse"]))
    assert np.abs(done["lse"][seen] - lse[seen]).max() <= 4e-6
    assert not done["o"][0, 0].any()


def test_one_layer_at_real_shape():
    """Qwen3-Next's layer, a chunk of 512 queries, in the form that is compiled just in time."""
    call = make(Case((512,), (1024,), 16, 4, 256, "bfloat16", page_size=64))
    check(call, flattened=True)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 150)), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 5]),
    page_size=st.sampled_from([16, 48]),
    window=st.sampled_from([0, 1, 30]),
    budget_ms=st.sampled_from([10.0, 0.01]),
    formats=st.tuples(*[st.sampled_from(["float16", "q8_0"])] * 2),
    seed=st.integers(0, 1000),
)
def test_ragged_batches(lengths, group, page_size, window, budget_ms, formats, seed):
    q_lens, kv_lens = zip(*lengths, strict=True)
    case = Case(
        q_lens,
        kv_lens,
        2 * group,
        2,
        64,
        "float16",
        page_size,
        *formats,
        window=window,
        budget_ms=budget_ms,
        seed=seed,
    )
    if sum(q_lens):
        check(make(case))
    else:
        assert not make(case).plan().launches


# ------------------------------------------------------------------ what must not change a bit


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_change_only_the_rounding_of_row_sums(dtype):
    """Carried state is float32, so cutting keys at multiples of 64 leaves the unnormalised O as it
    is; row sums are added up in another order, which moves roundings of o by a unit or so."""
    case = Case((40,), (700,), head_dim=256, dtype=dtype)
    whole = make(case).run()
    cut = make(replace(case, budget_ms=0.015)).run()
    assert len(cut.done.launches) > 3 > len(whole.done.launches)
    assert np.abs(cut.lse - whole.lse).max() < 1e-6
    unit = {"float32": 6e-7, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert (np.abs(cut.o - whole.o) <= unit * np.abs(whole.o)).all()
    if dtype != "float32":
        assert (cut.o_bits != whole.o_bits).mean() < 0.01


@pytest.mark.parametrize("head_dim", [64, 256])
def test_chunks_do_not_change_a_bit(head_dim):
    """The rows of a prefix, computed when only its keys were there."""
    case = Case((50,), (200,), head_dim=head_dim, dtype="bfloat16", window=90)
    call = make(case)
    first = replace(case, q_lens=(20,), kv_lens=(170,))
    arrays = call.arrays | {"q": call.arrays["q"][:20]}
    arrays |= {"o": np.empty_like(arrays["q"]), "lse": np.empty((20, 4), np.float32)}
    keys, values = [call.keys[0][:170]], [call.values[0][:170]]
    head = Call(first, arrays, call.block_table, call.slab_pages, keys, values).run()
    whole = call.run()
    assert head.o_bits.tobytes() == whole.o_bits[:20].tobytes()
    assert head.lse.tobytes() == whole.lse[:20].tobytes()


def test_page_order_does_not_change_a_bit():
    case = Case((40, 2), (300, 500), dtype="float16", k_format="q8_0")
    call = make(case)
    before = call.run().bits()
    order = np.random.default_rng(1).permutation(call.arrays["k_pages"].shape[0])
    for role in ("k_pages", "v_pages"):
        call.arrays[role] = np.ascontiguousarray(call.arrays[role][order])
    table = np.argsort(order)[np.maximum(call.block_table, 0)]
    call.block_table = np.where(call.block_table < 0, -1, table).astype(np.int32)
    assert call.run().bits() == before


def test_gathered_pages_give_the_bits_of_pages_in_place():
    case = Case((40,), (700,), dtype="float16", budget_ms=0.02)
    whole = make(replace(case, slabs=1)).run()
    assert whole.done.launches[0].counters.mma > 0
    call = make(case)
    pages = call.arrays["k_pages"].shape[0]
    cut = {}
    for name in ("k", "v"):
        pool = call.arrays.pop(f"{name}_pages")
        cut |= {f"{name}_pages": pool[:20], f"{name}_pages.1": np.ascontiguousarray(pool[20:])}
    call.arrays |= cut
    call.slab_pages = [20, pages - 20]
    assert call.run().bits() == whole.bits()


# ------------------------------------------------------------------ check mode

CHECKED = [
    *(
        Case((20, 0, 11), (70, 5, 3), 6, 2, d, window=50, sinks=True, softcap=3.0)
        for d in HEAD_DIMS
    ),
    *(Case((3, 1), (150, 90), 6, 2, d, sinks=True, cores=40) for d in (80, 256)),
    Case((20, 3), (150, 300), k_format="q8_0", v_format="float32", budget_ms=0.01),
    *(Case((3,), (90,), head_dim=128, k_format=f, v_format="q4_0") for f in ("q8_0", "turbo4")),
    Case((20, 3), (150, 300), head_dim=256, budget_ms=0.02),
    Case((20, 3), (150, 300), slabs=2),
]


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_nothing_to_report(case, dtype, order):
    """No race, no access out of bounds, no read of what nobody wrote; unused slots hold NaN."""
    check(make(replace(case, dtype=dtype)), mode="check", options=Options(order=order, poison=0xFF))


@pytest.mark.parametrize("ids", [(-1, 1 << 30), (-(1 << 31), (1 << 31) - 1)], ids=str)
@pytest.mark.parametrize("k_format", ["float32", "q8_0"])
def test_no_table_leads_outside_the_pool(ids, k_format):
    """The op refuses such tables; the kernels still stay inside the pool. The keys' values are
    whatever lies there."""
    call = make(Case((20, 2), (70, 90), k_format=k_format))
    call.block_table[:] = np.resize(np.array(ids, np.int32), call.block_table.shape)
    for role in ("k_pages", "v_pages"):
        call.arrays[role] = np.zeros_like(call.arrays[role])
    call.run(mode="check")


# Budgets so small that (m, l, O) is carried over three segments.
MUTANT_CASES = [
    Case((20, 2), (150, 90), 4, 1, 64, "float16", budget_ms=1e-4),
    Case((20,), (150,), 4, 1, 192, "float16", budget_ms=1e-4),
    Case((20,), (150,), 4, 1, 256, "float16", budget_ms=1e-4),
    Case((20,), (150,), 4, 1, 96, "float32", budget_ms=1e-4),
]


@pytest.mark.parametrize("case", MUTANT_CASES, ids=str)
def test_every_barrier_is_needed(case):
    call = make(case)

    def reports(mutation):
        for order in (0, 1, 5):
            options = Options(order=order, poison=0xFF)
            result = call.run("check", mutation=mutation, options=options, raise_errors=False)
            yield result.done.reports

    sites = call.run("check").done.barrier_sites
    assert len(sites) >= 4
    assert len(call.plan().launches) >= 3
    survivors = [str(o.mutation) for o in outcomes(sites, reports) if o.survived]
    assert survivors == []


# ------------------------------------------------------------------ plans


def launch_work(call, plan):
    """(milliseconds on an M1 by the FLOP and byte model, keys) of each attention launch."""
    tiles = {h.role: h.bytes for h in plan.host_data}["tiles"]
    record = struct.Struct("10i")
    first = 0
    out = []
    for launch in plan.launches:
        if not launch.kernel.startswith(("flash", "decode")):
            continue
        rows = int(launch.kernel.split("_r")[1].split("_")[0]) if "flash" in launch.kernel else 8
        keys = 0
        for i in range(launch.grid[0]):
            fields = record.unpack_from(tiles, (first + i) * record.size)
            keys += fields[5] - fields[4]
        first += launch.grid[0]
        flops = keys * rows * 4 * call["head_dim"] * call["num_kv_heads"]
        milliseconds = flops / 2.08e9
        if "decode" in launch.kernel:
            row_bytes = {"bf16": 512, "q8_0": 272}[call["k_format"]] + 512
            moved = keys * row_bytes * call["num_kv_heads"]
            milliseconds = max(milliseconds, moved / 54e6)
        out.append((milliseconds, keys))
    return out


def big_call(q_lens, kv_lens, **changes):
    """Arguments of a plan at Qwen3-Next's shape; pages in order."""
    size = 64
    needed = [-(-n // size) for n in kv_lens]
    table = np.full((len(needed), max(needed)), -1, np.int32)
    for n, pages in enumerate(needed):
        table[n, :pages] = sum(needed[:n]) + np.arange(pages)
    return {
        "dtype": "bfloat16",
        "num_q_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 256,
        "page_size": size,
        "k_format": "bf16",
        "v_format": "bf16",
        "slab_pages": [sum(needed)],
        "block_table": table,
        "seq_lens": list(kv_lens),
        "cu_seqlens_q": [0, *np.cumsum(q_lens).tolist()],
        "scale": 1 / 16,
    } | changes


@pytest.mark.parametrize("k_format", ["bf16", "q8_0"])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ((512,), (131_072,)),
        ((2048,), (131_072,)),
        ((40_000,), (131_072,)),
        ((131_072,), (131_072,)),
        ((1,), (131_072,)),
        ((8, 1, 1, 1), (131_072,) * 4),
        ((512, 1, 8, 300, 40), (131_072, 100_000, 70_000, 300, 65_536)),
        ((9,) * 60, (4000,) * 60),
    ],
    ids=lambda x: "x".join(map(str, x[:5])),
)
def test_work_and_scratch_are_bounded(q_lens, kv_lens, k_format):
    call = big_call(q_lens, kv_lens, k_format=k_format)
    plan = plans.paged_attention(**call)
    work = launch_work(call, plan)
    assert max(ms for ms, _ in work) <= 10.0
    # All keys that the rows see are there, and little else.
    shift = [k - q for q, k in zip(q_lens, kv_lens, strict=True)]
    pairs = sum(q * s + q * (q + 1) // 2 for q, s in zip(q_lens, shift, strict=True))
    covered = sum(
        keys * (64 if "flash" in launch.kernel else 8)
        for (_, keys), launch in zip(
            work,
            [x for x in plan.launches if x.kernel.startswith(("flash", "decode"))],
            strict=True,
        )
    )
    assert covered >= 4 * pairs
    scratch = {s.role: s.bytes for s in plan.scratch}
    gathered = sum(scratch.get(f"gathered_{x}", 0) for x in "kv")
    assert gathered <= 32 << 20
    # (m, l, O) of two blocks of rows, each small enough for a segment of 1,024 keys in 10 ms.
    assert sum(scratch.get(f"state_{x}", 0) for x in "oml") <= 2 * 4 * 4992 * (256 + 2) * 4
    partial = sum(scratch.get(f"partial_{x}", 0) for x in ("o", "lse"))
    assert partial <= 64 << 20
    # Not many more launches than the two budgets ask for.
    fillings = sum(kv_lens) * 4 * 256 * 2 / (32 << 20) if k_format == "q8_0" else 0
    needed = max(fillings, sum(ms for ms, _ in work) / 10)
    assert len(work) <= 2 + 1.6 * needed + len(q_lens)


def test_scratch_does_not_grow_with_the_context():
    sizes = []
    for keys in (16_384, 131_072):
        plan = plans.paged_attention(**big_call((512,), (keys,), k_format="q8_0"))
        sizes.append(sorted((s.role, s.bytes) for s in plan.scratch))
    roles = [[role for role, _ in s] for s in sizes]
    assert roles[0] == roles[1]
    for (_, short), (_, long) in zip(*sizes, strict=True):
        assert long <= 1.1 * short


def test_tiles_fit_the_machine():
    """Registers a lane: 208 KiB of a core's registers serve 512 threads at 104 each, 384 at 128."""
    table = plans.attention_tile_table()
    assert {(t.dtype, t.head_dim) for t in table} == {(t, d) for t in DTYPES for d in HEAD_DIMS}
    for t in table:
        assert t.registers <= (104 if t.threads == 512 else 128), t.kernel
        assert t.threadgroup_bytes <= 32_768, t.kernel
        assert f'"{t.kernel}"' in (METAL_ROOT / f"{t.source}.metal").read_text(), t.kernel
        assert t.reason


def test_a_tile_takes_the_threadgroup_memory_that_the_table_says():
    for t in plans.attention_tile_table():
        call = make(Case((9,), (9,), head_dim=t.head_dim, dtype=t.dtype))
        [launch] = call.run().done.launches
        assert launch.counters.threadgroup_memory == t.threadgroup_bytes, t.kernel


def test_counts():
    """Work per 1,024 visible pairs of a tile at D = 256, in MLX's units; the bars are issue-wide,
    docs/performance/attention_tiles.md has the numbers at 4,096 keys and MLX's beside them."""
    case = Case((128,), (1024,), 4, 1, 256, "float16", page_size=64)
    call = make(case)
    counters = call.run("check").done.counters
    units = 4 * sum(range(1024 - 127, 1025)) / 1024
    assert counters.mma / units <= 1040
    assert counters.device_bytes_read / units <= 18_400
    assert counters.threadgroup_bytes_read / units <= 83_000
    assert counters.threadgroup_bytes_written / units <= 23_500
    assert counters.simd_reductions == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 72}, r"head_dim in \{64, 80, 96, 128, 192, 256\}; got 72"),
        ({"num_q_heads": 6}, "num_q_heads a multiple of num_kv_heads; got 6 and 4"),
        ({"page_size": 24}, "page_size a multiple of 16; got 24"),
        ({"seq_lens": [2000]}, "seq_lens <= max_pages"),
        ({"cu_seqlens_q": [0, 4, 2], "seq_lens": [64, 64]}, "cu_seqlens_q that does not decrease"),
        ({"slab_pages": [0]}, "a pool with pages; got none"),
        ({"slab_pages": [1 << 30]}, r"pages \* num_kv_heads \* page_size < 2\^31"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=r"\[paged_attention\] expected .*" + message):
        plans.paged_attention(**big_call((12,), (128,), **changes))


# ------------------------------------------------------------------ sizes


def test_more_than_32767_queries():
    """Row, key and position numbers past 16 bits, in a band of 20 keys: the reference is computed
    for the last queries, which see what a short sequence of the same keys would."""
    case = Case((33_000,), (33_000,), 1, 1, 64, "float16", window=20, page_size=64)
    tail = 40
    call = make(replace(case, q_lens=(tail,)))
    q = pack(np.random.default_rng(1).standard_normal((33_000, 1, 64)), "float16")
    q[-tail:] = call.arrays["q"]
    arrays = call.arrays | {"q": q, "o": np.empty_like(q), "lse": np.empty((33_000, 1), np.float32)}
    long = copy.copy(call)
    long.case, long.arrays = case, arrays
    result = long.run()
    short = call.run()
    assert result.o_bits[-tail:].tobytes() == short.o_bits.tobytes()
    assert result.lse[-tail:].tobytes() == short.lse.tobytes()
    assert np.isfinite(result.o).all()
    check(call)


@pytest.mark.parametrize("q_len", [12, 2], ids=("flash", "decode"))
def test_pool_of_more_than_2_to_31_bytes(q_len):
    """Pages at the far end of a 2.2 GB pool, which is K's and V's."""
    case = Case((q_len,), (40,), 1, 1, 256, "float16")
    call = make(case)
    pages = (1 << 31) // (16 * 256 * 2) + 5000
    rows = pack(np.random.default_rng(0).standard_normal((40, 1, 256)), "float16")
    pool = np.zeros((pages, 1, 16, 256), np.float16)
    call.block_table = np.array([[pages - 1, 3, pages - 4000]], np.int32)
    at = np.arange(40)
    pool[call.block_table[0, at // 16], :, at % 16] = rows
    call.arrays |= {"k_pages": pool, "v_pages": pool}
    values = rows.astype(np.float64)
    call = Call(case, call.arrays, call.block_table, [pages], [values], [values])
    check(call)
