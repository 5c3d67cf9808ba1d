"""The executing standard library against NumPy: collectives, matrices, arithmetic, atomics."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.metal_host import Library

SOURCE = Path(__file__).with_name("language.metal")
F32, F16, BF16, I32 = np.float32, np.float16, ml_dtypes.bfloat16, np.int32
LANES = np.arange(32)


@pytest.fixture(scope="module", params=["fast", "check"])
def library(request):
    return Library(SOURCE, mode=request.param)


# ---- collectives ---------------------------------------------------------------------------------


def pairwise(x, combine):
    """Lane i with lane i + 16, then 8, 4, 2, 1: the order of the runner's reductions."""
    while len(x) > 1:
        x = combine(x[: len(x) // 2], x[len(x) // 2 :])
    return x[0]


def everywhere(value):
    return lambda x, k: np.full(32, value(x))


def prefix(ufunc, identity, inclusive):
    def scan(x, k):
        total = ufunc.accumulate(x)
        return total if inclusive else np.concatenate([[identity], total[:-1]])

    return scan


def gather(source):
    return lambda x, k: x[source]


def fill(shift, modulo):
    """Lanes p + shift of each group of ``modulo``; past its ends from -x, as if wrapped."""

    def shuffled(x, k):
        base, p = LANES // modulo * modulo, LANES % modulo + shift
        inside = (p >= 0) & (p < modulo)
        return np.where(inside, x[base + p % modulo], -x[base + p % modulo])

    return shuffled


COLLECTIVES = [
    ("sum_float", F32, everywhere(lambda x: pairwise(x, np.add))),
    ("sum_int", I32, everywhere(np.sum)),
    ("product_float", F32, everywhere(lambda x: pairwise(x, np.multiply))),
    ("max_float", F32, everywhere(np.max)),
    ("min_int", I32, everywhere(np.min)),
    ("and_int", I32, everywhere(np.bitwise_and.reduce)),
    ("or_int", I32, everywhere(np.bitwise_or.reduce)),
    ("xor_int", I32, everywhere(np.bitwise_xor.reduce)),
    ("inclusive_sum", I32, prefix(np.add, 0, True)),
    ("exclusive_sum", I32, prefix(np.add, 0, False)),
    ("inclusive_product", F32, prefix(np.multiply, 1, True)),
    ("exclusive_product", F32, prefix(np.multiply, 1, False)),
    ("shuffle", F32, lambda x, k: x[k]),
    ("shuffle_xor", F32, gather(LANES ^ 5)),
    ("shuffle_up", F32, gather(np.where(LANES < 3, LANES, LANES - 3))),
    ("shuffle_down", F32, gather(np.where(LANES > 28, LANES, LANES + 3))),
    ("rotate_up", F32, gather((LANES - 3) % 32)),
    ("rotate_down", F32, gather((LANES + 3) % 32)),
    ("fill_up", F32, fill(-3, 32)),
    ("fill_down", F32, fill(3, 32)),
    ("fill_up_8", F32, fill(-3, 8)),
    ("fill_down_8", F32, fill(3, 8)),
    ("broadcast", F32, gather(np.full(32, 9))),
    ("broadcast_first", F32, gather(np.zeros(32, int))),
    ("ballot", I32, everywhere(lambda x: np.packbits(x > 0, bitorder="little").view(I32)[0])),
    ("vote_all", I32, everywhere(lambda x: np.all(x > -1000))),
    ("vote_any", I32, everywhere(lambda x: np.any(x > 1000))),
    ("is_first", I32, lambda x, k: LANES == 0),
    ("quad_sums", F32, lambda x, k: np.repeat([pairwise(q, np.add) for q in x.reshape(8, 4)], 4)),
    ("quad_maxima", F32, lambda x, k: np.repeat(x.reshape(8, 4).max(1), 4)),
    ("quad_shuffles", F32, gather(LANES ^ 2)),
    ("vector_shuffle", F32, lambda x, k: 2 * x[LANES ^ 1]),
]


@pytest.mark.parametrize(
    ("kernel", "dtype", "expected"), COLLECTIVES, ids=[c[0] for c in COLLECTIVES]
)
def test_collective(library, kernel, dtype, expected):
    rng = np.random.default_rng(0)
    x = (
        rng.normal(scale=1.5, size=64).astype(F32)
        if dtype == F32
        else rng.integers(-99, 99, 64, dtype=I32)
    )
    index, y = rng.integers(0, 32, 64, dtype=I32), np.empty(64, dtype)
    library.run(kernel, (1, 1, 1), (64, 1, 1), {0: x, 1: index, 2: y}, outputs=[2])
    for half in (slice(0, 32), slice(32, 64)):
        np.testing.assert_array_equal(y[half], expected(x[half], index[half]).astype(dtype))


# ---- matrices ------------------------------------------------------------------------------------

# Apple's layout: lane l holds (row, column) and (row, column + 1).
ROW = (LANES >> 4 & 1) * 4 + (LANES >> 1 & 3)
COLUMN = (LANES >> 3 & 1) * 4 + (LANES & 1) * 2
MAP = np.stack([ROW * 8 + COLUMN, ROW * 8 + COLUMN + 1], axis=1)


def test_lane_map_covers_the_matrix():
    assert sorted(MAP.ravel().tolist()) == list(range(64))
    # The corners that MLX, MetalFlashAttention and metal2vk agree on.
    assert MAP[[0, 1, 2, 8, 16, 31]].tolist() == [
        [0, 1],
        [2, 3],
        [8, 9],
        [4, 5],
        [32, 33],
        [62, 63],
    ]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("matrix_load_float", F32), ("matrix_load_half", F16)]
)
def test_matrix_load(library, kernel, dtype, transpose):
    x, y = np.arange(16 * 24).reshape(16, 24).astype(dtype), np.empty((32, 2), dtype)
    at = np.array([5, 3, transpose, 0], I32)  # column, row of the origin
    library.run(kernel, (1, 1, 1), (32, 1, 1), {0: x, 1: y, 2: I32(24), 3: at}, outputs=[1])
    block = x[3:11, 5:13]
    np.testing.assert_array_equal(y, (block.T if transpose else block).ravel()[MAP])


@pytest.mark.parametrize("transpose", [False, True])
def test_matrix_store(library, transpose):
    y, at = np.zeros((16, 24), F32), np.array([5, 3, transpose, 0], I32)
    library.run("matrix_store", (1, 1, 1), (32, 1, 1), {0: y, 1: I32(24), 2: at}, inout=[0])
    block = np.empty(64, F32)
    block[MAP] = np.arange(64).reshape(32, 2)
    want = np.zeros_like(y)
    want[3:11, 5:13] = block.reshape(8, 8).T if transpose else block.reshape(8, 8)
    np.testing.assert_array_equal(y, want)


def test_matrix_diagonal(library):
    y = np.empty((8, 8), F32)
    library.run("matrix_diagonal", (1, 1, 1), (32, 1, 1), {0: y}, outputs=[0])
    np.testing.assert_array_equal(y, 3 * np.eye(8))


PRODUCTS = [
    ("matrix_product_float", F32, F32, F32),
    ("matrix_product_half", F16, F16, F32),
    ("matrix_product_bfloat", BF16, BF16, F32),
    ("matrix_product_half_half", F16, F16, F16),
    ("matrix_product_float_half", F32, F16, F32),
]


def ascending(a, b, c):
    """float32 fused multiply-adds over ascending k; the products are exact in float64."""
    total = c.astype(F32)
    for k in range(8):
        exact = a[:, k, None].astype(np.float64) * b[None, k].astype(np.float64)
        total = (exact + total).astype(F32)
    return total


@pytest.mark.parametrize(
    ("kernel", "a_type", "b_type", "d_type"), PRODUCTS, ids=[p[0] for p in PRODUCTS]
)
def test_matrix_product(library, kernel, a_type, b_type, d_type):
    rng = np.random.default_rng(3)
    a, b, c = (rng.standard_normal((8, 8)).astype(t) for t in (a_type, b_type, F32))
    d, e = np.empty((8, 8), d_type), np.empty((8, 8), d_type)
    counters = library.run(
        kernel, (1, 1, 1), (32, 1, 1), {0: a, 1: b, 2: c, 3: d, 4: e}, outputs=[3, 4]
    ).counters
    np.testing.assert_array_equal(d, ascending(a, b, c).astype(d_type))
    np.testing.assert_array_equal(e, ascending(a, b, np.zeros((8, 8))).astype(d_type))
    assert (counters.mma, counters.matrix_loads, counters.matrix_stores) == (2, 3, 2)


# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("arithmetic_float", F32), ("arithmetic_half", F16), ("arithmetic_bfloat", BF16)],
)
def test_every_operation_rounds_to_its_type(library, kernel, dtype):
    rng = np.random.default_rng(1)
    a, b = (np.exp(rng.normal(scale=3, size=256)).astype(dtype) for _ in range(2))
    out = [np.empty(256, dtype) for _ in range(4)]
    wide = np.empty(256, F32)
    buffers = dict(enumerate([a, b, *out, wide]))
    library.run(kernel, (4, 1, 1), (64, 1, 1), buffers, outputs=range(2, 7))
    x, y = a.astype(F32), b.astype(F32)
    with np.errstate(over="ignore"):
        # The float32 result of 16-bit operands, rounded again, is the correctly rounded one.
        want = [x + y, x * y, x / y]
        # Contracted to one fused operation, as Metal's compiler does within an expression.
        fused = (x.astype(np.float64) * F32(1.0009765625) + np.float64(F32(1e-3))).astype(F32)
        for got, value in zip(out, [*want, fused], strict=True):
            np.testing.assert_array_equal(got.astype(F32), value.astype(dtype).astype(F32))
    np.testing.assert_array_equal(wide, x)


def test_float_functions(library):
    x, y = np.array([2.5, 3.25], F32), np.empty(16, F32)
    library.run("floats", (1, 1, 1), (1, 1, 1), {0: x, 1: y}, outputs=[1])
    want = [1 / 3, 2.5, 2.5, 5, 2, 3, 2**2.5, 2.5**-0.5, np.pi, F16(1e-8)]
    want += [np.exp(2.5), np.log(2.5), -1, 2.5 + 0.75 * 0.25, 7, 0.25]
    np.testing.assert_allclose(y, np.array(want, F32), rtol=2e-7)


def test_integer_functions(library):
    x, y = np.array([0x00F01234, 0xDEADBEEF], np.uint32), np.empty(12, np.uint32)
    library.run("integers", (1, 1, 1), (1, 1, 1), {0: x, 1: y}, outputs=[1])
    a, b = map(int, x)
    reverse, rotated = int(f"{a:032b}"[::-1], 2), (a << 8 | a >> 24) & 0xFFFFFFFF
    want = [a.bit_count(), 8, 2, reverse, rotated, 0x23, 0x00F0AB34, a * b >> 32, 2, 9, 15, 32]
    assert y.tolist() == want


def test_vectors(library):
    y, sizes = np.empty(10, F32), np.empty(6, I32)
    library.run("vectors", (1, 1, 1), (1, 1, 1), {0: y, 1: sizes}, outputs=[0, 1])
    assert y.tolist() == [3, 2, 1, 6, 6, 2, 1, 100 - 10 + 7, 4 + 8 + 12 + 0, 6]
    assert sizes.tolist() == [16, 12, 8, 16, 4, 32]


def test_atomics(library):
    n, x = 512, np.random.default_rng(2).integers(0, 100, 512).astype(F32)
    a, f, shared = np.zeros(6, I32), np.zeros(1, F32), np.empty(8, I32)
    library.run(
        "atomics", (8, 1, 1), (64, 1, 1), {0: a, 1: f, 2: x, 3: shared}, inout=[0, 1], outputs=[3]
    )
    everything = np.arange(n)
    want = [everything.sum(), n - 1, 1 - n, 2**31 - 1, np.bitwise_xor.reduce(everything), 2 * n]
    assert a.tolist() == want
    assert f[0] == x.sum()
    assert shared.tolist() == [64 * 63 // 2] * 8


def test_positions_in_a_grid_that_the_threadgroups_do_not_divide(library):
    width, height, tx, ty = 21, 5, 16, 4
    y = np.empty((height, width, 12), np.uint32)
    size = np.array([width, height], np.uint32)
    library.run(
        "positions",
        (width, height, 1),
        (tx, ty, 1),
        {0: y, 1: size},
        outputs=[0],
        grid_in_threads=True,
    )
    for row, column in np.ndindex(height, width):
        gx, gy = column // tx, row // ty
        sx, sy = min(tx, width - gx * tx), min(ty, height - gy * ty)
        index = row % ty * sx + column % tx
        want = [column % tx, row % ty, gx * 10 + gy, width * 1000 + height, 22, sx * 100 + sy]
        want += [tx * 100 + ty, index, index % 32, index // 32, -(-sx * sy // 32), 32]
        assert y[row, column].tolist() == want, (row, column)
