"""The page codecs against their NumPy definitions: bytes on the way in, values on the way out."""

import warnings

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.cache.pages import PageFormatWarning, page_formats
from chunkdelta.ops.rotation import rotate, rotation_block
from chunkdelta.testing import page_formats as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

FORMATS = page_formats()
pytestmark = pytest.mark.filterwarnings("ignore::chunkdelta.cache.pages.PageFormatWarning")


def rows_of(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if kind == "outliers":
        x[..., :4] *= 50
    elif kind == "tiny":
        x *= 1e-6
    elif kind == "zeros":
        x[: len(x) // 2] = 0
    elif kind == "constant":
        x[:] = -3.0
    return x.astype(np.float32)


def pool(tokens: int, head_dim: int, k_format: str, v_format: str, heads: int = 1):
    return chunkdelta.KVPages(
        max(1, -(-tokens // 16)),
        heads,
        head_dim,
        page_size=16,
        k_format=k_format,
        v_format=v_format,
    )


def encode(name: str, x: np.ndarray, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """Rows [T, D] through append_kv -> bytes [T, row_bytes]."""
    pages = pool(len(x), x.shape[-1], name, "f32")
    row = mx.array(x, dtype)[:, None]
    chunkdelta.append_kv(pages, row, row, list(range(len(x))))
    stored = np.array(pages.arrays[0])  # [pages, 1, 16, row_bytes]
    return stored.reshape(-1, stored.shape[-1])[: len(x)]


KINDS = ("normal", "outliers", "tiny", "zeros", "constant")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_ggml_formats_are_bit_exact(name, head_dim, kind):
    x = rows_of(kind, (37, head_dim))
    np.testing.assert_array_equal(encode(name, x), oracle.encode(name, x))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_ggml_formats_of_16_bit_inputs(name, dtype):
    x = mx.array(rows_of("normal", (5, 128)), dtype)
    rounded = np.array(x.astype(mx.float32))
    np.testing.assert_array_equal(encode(name, rounded, dtype), oracle.encode(name, rounded))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_turbo4_equals_its_definition(head_dim, kind):
    x = rows_of(kind, (64, head_dim))
    ours = encode("turbo4", x)
    expected = oracle.encode("turbo4", x)
    blocks, wanted = (b.reshape(64, -1, 68) for b in (ours, expected))

    def indices(b):
        return np.stack([b[..., 4:] & 15, b[..., 4:] >> 4], -1).reshape(*b.shape[:-1], 128)

    # The rotation is fp32 here and fp64 there: an index may differ where the coordinate lies on a
    # midpoint to within that rounding, and nowhere else.
    padded = np.zeros((64, blocks.shape[1] * 128))
    padded[:, :head_dim] = x
    norm = np.linalg.norm(padded.reshape(64, -1, 128), axis=-1, keepdims=True)
    unit = oracle.turbo_rotate(padded).reshape(64, -1, 128) / np.where(norm > 1e-10, norm, 1)
    distance = np.abs(unit[..., None] - oracle.TURBO4_MIDPOINTS).min(-1)
    differs = indices(blocks) != indices(wanted)
    assert np.all(distance[differs] < 2e-7)
    assert differs.mean() < 1e-3
    half = np.float16
    norms = [
        np.ascontiguousarray(b[..., :2]).view(half)[..., 0].astype(float) for b in (blocks, wanted)
    ]
    same = ~differs.any(-1)
    np.testing.assert_allclose(norms[0][same], norms[1][same], rtol=1e-3)
    assert not blocks[..., 2:4].any()


def test_turbo4_reconstructions_are_as_long_as_the_row():
    x = rows_of("normal", (32, 256))
    decoded = oracle.decode("turbo4", encode("turbo4", x), 256)
    lengths = np.linalg.norm(decoded.reshape(32, 2, 128), axis=-1)
    np.testing.assert_allclose(lengths, np.linalg.norm(x.reshape(32, 2, 128), axis=-1), rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_not_finite_rows_never_decode_to_numbers(name, bad):
    x = rows_of("normal", (16, 128))
    x[3, 5] = bad
    pages = pool(16, 128, "f32", name)
    chunkdelta.append_kv(pages, mx.zeros((16, 1, 128)), mx.array(x)[:, None], list(range(16)))
    q = mx.zeros((1, 1, 128))  # equal weights on all rows
    o = np.array(
        chunkdelta.paged_attention(q, pages, block_table=[[0]], seq_lens=[16], cu_seqlens_q=[0, 1])
    )[0, 0]
    assert not np.isfinite(o[5])


@pytest.mark.parametrize(
    ("rotation", "head_dim"),
    [*(("hadamard", D) for D in (4, 64, 80, 96, 128, 256)), ("turbo", 128), ("turbo", 256)],
)
def test_rotations_are_orthogonal(rotation, head_dim):
    identity = np.array(rotate(mx.eye(head_dim), rotation))
    np.testing.assert_allclose(identity @ identity.T, np.eye(head_dim), atol=1e-6)
    if rotation == "turbo":
        np.testing.assert_allclose(identity, oracle.turbo_rotate(np.eye(head_dim)), atol=1e-6)
    else:
        block = rotation_block(head_dim)
        expected = oracle.hadamard(np.eye(head_dim).reshape(head_dim, -1, block))
        np.testing.assert_allclose(identity, expected.reshape(head_dim, head_dim), atol=1e-6)


def reference_rows(name: str, x: np.ndarray) -> np.ndarray:
    """What attention should see of rows [T, H, D]: encoded and decoded by the NumPy definitions."""
    if name == "f32":
        return x.astype(np.float64)
    if name in ("f16", "bf16"):
        dtype = mx.float16 if name == "f16" else mx.bfloat16
        return np.array(mx.array(x).astype(dtype).astype(mx.float32), np.float64)
    codec = name.removesuffix("_rot")
    D = x.shape[-1]
    if name == "turbo4":
        padded = np.concatenate([x, np.zeros((*x.shape[:-1], -D % 128), x.dtype)], -1)
        decoded = oracle.decode(codec, oracle.encode(codec, padded), padded.shape[-1])
        return oracle.turbo_rotate(decoded, inverse=True)[..., :D]
    if name.endswith("_rot"):
        block = rotation_block(D)
        shape = (*x.shape[:-1], -1, block)
        rotated = oracle.hadamard(x.reshape(shape)).reshape(x.shape).astype(np.float32)
        decoded = oracle.decode(codec, oracle.encode(codec, rotated), D)
        return oracle.hadamard(decoded.reshape(shape)).reshape(x.shape)
    return oracle.decode(codec, oracle.encode(codec, x), D).astype(np.float64)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("v_format", FORMATS)
@pytest.mark.parametrize("k_format", FORMATS)
def test_every_pair_of_formats_is_written_read_and_attended(k_format, v_format, head_dim):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((5, 4, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, 41, 2, head_dim)).astype(np.float32)
    pages = pool(41, head_dim, k_format, v_format, heads=2)
    chunkdelta.append_kv(pages, mx.array(k), mx.array(v), list(range(41)))
    o = chunkdelta.paged_attention(
        mx.array(q), pages, block_table=[[0, 1, 2]], seq_lens=[41], cu_seqlens_q=[0, 5]
    )
    assert o.shape == (5, 4, head_dim)
    assert o.dtype == mx.float32
    expected = attention64(q, reference_rows(k_format, k), reference_rows(v_format, v))
    error = np.linalg.norm(np.array(o) - expected) / np.linalg.norm(expected)
    # A rotated value (fp32 here, fp64 there) that lies between two steps may fall either way.
    rotated = {"turbo4", "q8_0_rot", "q4_0_rot"} & {k_format, v_format}
    assert error < (2e-3 if rotated else 2e-6)


def attention64(q, k, v):
    """One sequence, causal bottom right, float64."""
    T, L, g = len(q), len(k), q.shape[1] // k.shape[1]
    scores = (
        np.einsum("thd,lhd->htl", q.astype(np.float64), np.repeat(k, g, 1)) * q.shape[-1] ** -0.5
    )
    visible = np.arange(L)[None] <= np.arange(L - T, L)[:, None]
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("htl,lhd->thd", weights, np.repeat(v, g, 1))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_rotated_pools_return_the_dtype_of_q(dtype):
    pages = pool(16, 64, "q8_0_rot", "turbo4")
    x = mx.random.normal((16, 1, 64)).astype(dtype)
    chunkdelta.append_kv(pages, x, x, list(range(16)))
    o, lse = chunkdelta.paged_attention(
        x, pages, block_table=[[0]], seq_lens=[16], cu_seqlens_q=[0, 16], return_lse=True
    )
    assert (o.dtype, o.shape, lse.dtype) == (dtype, (16, 1, 64), mx.float32)


@pytest.mark.parametrize(
    ("name", "head_dim", "bits"),
    [
        ("f32", 256, 32),
        ("bf16", 256, 16),
        ("q8_0", 256, 8.5),
        ("q8_0_rot", 256, 8.5),
        ("q4_0", 256, 4.5),
        ("turbo4", 256, 4.25),
        ("turbo4", 128, 4.25),
    ],
)
def test_a_format_takes_the_bytes_that_it_promises(name, head_dim, bits):
    pages = pool(64, head_dim, name, name, heads=2)
    assert pages.bytes_per_token == 2 * 2 * head_dim * bits / 8
    assert pages.nbytes == pages.num_slots * pages.bytes_per_token


def test_turbo4_keys_warn():
    with pytest.warns(PageFormatWarning, match="prefer q8_0/turbo4"):
        pool(16, 128, "turbo4", "turbo4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool(16, 128, "q8_0", "turbo4")


@pytest.mark.parametrize("name", ["q5_1", "turbo3", "", "Q8_0"])
def test_unknown_formats_are_refused_by_name(name):
    with pytest.raises(ValueError, match=r"expected FORMAT or K_FORMAT/V_FORMAT with formats in"):
        pool(16, 128, name, "bf16")


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["q8_0", "q4_0"]),
    scale=st.floats(1e-4, 1e4),
    seed=st.integers(0, 1000),
)
def test_quantisation_error_is_at_most_a_step(name, scale, seed):
    x = scale * rows_of("normal", (16, 64), seed)
    decoded = oracle.decode(name, encode(name, x), 64)
    largest = np.abs(x.reshape(16, 2, 32)).max(-1, keepdims=True)
    step = largest / 127 / 2 if name == "q8_0" else largest / 8
    error = np.abs(decoded - x).reshape(16, 2, 32)
    # The scale is a half: 11 bits, and steps of 2^-24 where it is subnormal.
    assert np.all(error <= step * 1.01 + largest * 2**-10 + 127 * 2**-25)
