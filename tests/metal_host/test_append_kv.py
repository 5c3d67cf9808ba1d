"""The kernels that write pages, through their launch plans: the bytes of the CPU op."""

import chunkdelta
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta import _ext
from chunkdelta.testing import page_formats

from tests.metal_host import METAL_ROOT, Options, execute_plan, typecheck

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PLAIN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
FORMATS = [*PLAIN, "q8_0", "q4_0", "turbo4"]


def make(tokens, heads, head_dim, dtype, seed=0):
    x = np.random.default_rng(seed).standard_normal((tokens, heads, head_dim))
    return x.astype(DTYPES[dtype])


def row_bytes(fmt, head_dim):
    return _ext.page_row_bytes(fmt, head_dim)


def append(x, dtype, fmt, slots, *, page_size=16, pages=4, mode="check", aligned=True, **options):
    """The slab's bytes [pages, Hkv, page_size, row] after the plan; 0xA5 where nothing was written."""
    _, heads, head_dim = x.shape
    first_page = options.pop("first_page", 0)
    plan = _ext.plans.append_kv(
        dtype,
        fmt,
        slots,
        num_kv_heads=heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=pages,
        first_page=first_page,
        aligned=aligned,
    )
    slab = np.full((pages, heads, page_size, row_bytes(fmt, head_dim)), 0xA5, np.uint8)
    result = execute_plan(plan, {"x": x, "pages": slab}, mode=mode, options=Options(**options))
    return result.arrays["pages"]


def turbo4(rows):
    """The encoding of page_formats, which rotates, without its rotation."""
    padded = np.concatenate([rows, np.zeros((*rows.shape[:-1], -rows.shape[-1] % 128))], -1)
    return page_formats.encode("turbo4", page_formats.turbo_rotate(padded, inverse=True))


def append_on_cpu(x, dtype, fmt, slots, page_size=16, pages=4):
    """Rows by slot, as the CPU op stores them: {slot: bytes [Hkv, row]}."""
    _, heads, head_dim = x.shape
    if fmt == "turbo4":  # the pool would rotate the rows first: take the codec alone
        rows = [turbo4(np.asarray(row, np.float32)) for row in x]
        return {s: row for s, row in zip(slots, rows, strict=True) if s >= 0}
    pool = chunkdelta.KVPages(
        pages, heads, head_dim, page_size=page_size, k_format=fmt, v_format=fmt
    )
    values = mx.array(np.asarray(x, np.float32)).astype(getattr(mx, dtype))
    chunkdelta.append_kv(pool, values, values, slots)
    slab = pool.arrays[0]
    slab = np.array(slab.view(mx.uint8) if fmt in PLAIN else slab)
    return {s: slab[s // page_size, :, s % page_size] for s in slots if s >= 0}


# Pools store turbo4 rows in whole blocks; only plain rows have a kernel for arrays that begin between
# vectors.
CASES = [
    (fmt, head_dim, aligned)
    for fmt in FORMATS
    for head_dim in ((128, 256) if fmt == "turbo4" else (64, 80, 128, 256))
    for aligned in ((True, False) if fmt in PLAIN and head_dim == 64 else (True,))
]


@pytest.mark.parametrize(("fmt", "head_dim", "aligned"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_the_bytes_of_the_cpu_op(dtype, fmt, head_dim, aligned):
    x = make(5, 2, head_dim, dtype)
    slots = [40, 0, -1, 17, 16]
    slab = append(x, dtype, fmt, slots, aligned=aligned)
    expected = append_on_cpu(x, dtype, fmt, slots)
    written = np.zeros(slab.shape[:3], bool)
    for slot, row in expected.items():
        ours = slab[slot // 16, :, slot % 16]
        written[slot // 16, :, slot % 16] = True
        if fmt in ("q4_0", "turbo4"):  # sums and quotients may round to the other side of a tie
            assert np.mean(ours != row) < 0.02
            a, b = (page_formats.decode(fmt, r, head_dim) for r in (ours, row))
            assert np.abs(a - b).max() <= 0.35 * np.abs(b).max()
        else:
            assert np.array_equal(ours, row)
    assert np.all(slab[~written] == 0xA5)
    again = append(x, dtype, fmt, slots, aligned=aligned, order=1, poison=0)
    assert np.array_equal(again, slab)


@pytest.mark.parametrize("fmt", ["q8_0", "q4_0", "turbo4"])
def test_extremes(fmt):
    """Zeros, one value among zeros, ties, tiny rows, and rows that are not finite."""
    x = np.zeros((8, 1, 128), np.float32)
    x[1, 0, 5] = -3.0
    x[2] = np.linspace(-127, 127, 128)  # quotients at one half round away from zero
    x[3, 0, [3, 9]] = [-2.0, 2.0]  # the first of two extremes decides the sign of q4_0's scale
    x[4] = 1e-30
    x[5, 0, 7] = np.inf
    x[6, 0, 8] = np.nan
    x[7] = 5e3
    slab = append(x, "float32", fmt, list(range(8)))
    ours = page_formats.decode(fmt, slab[0, 0, :8], 128)
    finite = [0, 1, 2, 3, 4, 7]
    encoded = turbo4(x[finite, 0]) if fmt == "turbo4" else page_formats.encode(fmt, x[finite, 0])
    expected = page_formats.decode(fmt, encoded, 128)
    assert np.allclose(ours[finite], expected, rtol=2e-3, atol=1e-6)
    block = 128 if fmt == "turbo4" else 32  # a block with a value that is not finite is NaN
    assert np.all(np.isnan(ours[[5, 6], :block]))
    assert not np.any(ours[[5, 6], block:])


def test_a_slab_takes_its_own_pages_only():
    x = make(6, 1, 64, "float16")
    slots = [0, 31, 32, 47, 48, 2**31 - 1]  # pages 0, 1, 2, 2, 3 and far outside
    slab = append(x, "float16", "f16", slots, pages=1, first_page=2)
    assert np.array_equal(slab[0, 0, [0, 15]].view(np.float16), x[2:4, 0])
    assert np.all(slab[0, 0, 1:15] == 0xA5)


def test_no_tokens_no_launches():
    plan = _ext.plans.append_kv(
        "float16", "f16", [], num_kv_heads=2, head_dim=64, page_size=16, num_pages=4
    )
    assert not plan.launches


def test_long_appends_are_split_into_bounded_launches():
    plan = _ext.plans.append_kv(
        "bfloat16",
        "q8_0",
        np.arange(131_072),
        num_kv_heads=8,
        head_dim=256,
        page_size=64,
        num_pages=2048,
    )
    groups = [launch.grid[0] for launch in plan.launches]
    assert sum(groups) * 4 == 131_072 * 8
    assert max(groups) * 4 * 256 <= 2**27
    assert [np.frombuffer(launch.params[0].bytes, np.int32)[-1] for launch in plan.launches] == [
        0,
        *np.cumsum(groups)[:-1],
    ]


# ------------------------------------------------------------------ copy_pages


@pytest.mark.parametrize("slab", [0, 1])
def test_copy_pages_between_slabs(slab):
    rng = np.random.default_rng(0)
    slabs = [rng.integers(0, 256, (n, 2, 16, 34), np.uint8) for n in (3, 4)]
    page_bytes = slabs[0][0].size
    source, target = [0, 6, 4, 4], [2, 5, 1, 3]
    plan = _ext.plans.copy_pages(page_bytes, [0, 3, 7], slab, source, target)
    read = {b.role for launch in plan.launches for b in launch.buffers} - {"copies"}
    arrays = {role: slabs[int(role[-1])] for role in read}
    result = execute_plan(plan, arrays)
    expected = slabs[slab].copy()
    joined = np.concatenate(slabs)
    for a, b in zip(source, target, strict=True):
        if (b >= 3) == slab:
            expected[b - 3 * slab] = joined[a]
    assert np.array_equal(result.arrays[f"pages.{slab}"], expected)
    assert len(plan.launches) == (2 if slab == 0 else 1)  # from each slab that is read


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((24, [0, 4], 0, [0], [1]), "multiples of 16; got 24"),
        ((32, [0, 4], 1, [0], [1]), r"a slab in 0\.\.0; got 1"),
        ((32, [0, 4], 0, [0], [4]), r"pages in 0\.\.3; got 4"),
        ((32, [0, 4], 0, [-1], [1]), r"pages in 0\.\.3; got -1"),
        ((32, [0, 4], 0, [0, 1], [2]), "a source per target; got 2 and 1"),
        ((32, [0, 4], 0, [0, 1], [2, 2]), "distinct targets"),
        ((32, [0, 4], 0, [0, 1], [1, 2]), "no sources"),
        ((32, [1, 4], 0, [0], [1]), "ascending from 0"),
    ],
)
def test_copy_pages_plan_refuses(arguments, message):
    with pytest.raises(ValueError, match=r"\[copy_pages\] expected .*" + message):
        _ext.plans.copy_pages(*arguments)


@pytest.mark.parametrize("source", ["append_kv", "copy_pages"])
def test_type_checks(source):
    assert typecheck(METAL_ROOT / f"attention/{source}.metal", include=[METAL_ROOT]) == []
