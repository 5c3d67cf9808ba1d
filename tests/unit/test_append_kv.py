"""append_kv: what is written, where, and in which bytes."""

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.testing.attention import decode_slab

MLX = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def rows(seed, tokens=5, heads=2, head_dim=64):
    return np.random.default_rng(seed).standard_normal((tokens, heads, head_dim), np.float32)


def q8_0(x):
    """ggml's quantize_row_q8_0_ref in NumPy: [..., 32 n] -> bytes [..., 34 n]."""
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(np.float32)
    d = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, where=d != 0, out=np.zeros_like(d))
    scaled = blocks * inverse
    q = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled).astype(np.int8)
    parts = [d.astype(np.float16).view(np.uint8), q.view(np.uint8)]
    return np.concatenate(parts, axis=-1).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("k_format", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("v_format", ["bf16", "q8_0"])
def test_rows_land_in_their_slots(source, k_format, v_format):
    pages = chunkdelta.KVPages(3, 2, 64, page_size=16, k_format=k_format, v_format=v_format)
    k, v = (mx.array(rows(seed)).astype(MLX[source]) for seed in (0, 1))
    slots = [40, 0, -1, 17, 16]
    got = chunkdelta.append_kv(pages, k, v, slots)
    assert got is pages
    for slab, x, name in zip(pages.arrays, (k, v), (k_format, v_format), strict=True):
        x = x.astype(mx.float32)
        encoded = (
            q8_0(np.array(x))
            if name == "q8_0"
            else np.array(x.astype(MLX[name]).astype(mx.float32))
        )
        expected = np.zeros((3, 2, 16, encoded.shape[-1]), encoded.dtype)
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot // 16, :, slot % 16] = encoded[token]
        stored = slab if name == "q8_0" else slab.astype(mx.float32)
        assert np.array_equal(np.array(stored), expected)


def test_q8_0_keeps_signs_extremes_and_zeros():
    pages = chunkdelta.KVPages(1, 1, 32, page_size=16, k_format="q8_0", v_format="q8_0")
    x = np.zeros((4, 1, 32), np.float32)
    x[1] = np.linspace(-127, 127, 32)  # quotients at one half round away from zero
    x[2] = -1e-8
    x[3, 0, 0] = 6e4
    chunkdelta.append_kv(pages, mx.array(x), mx.array(x), [0, 1, 2, 3])
    assert np.array_equal(np.array(pages.arrays[0])[0, 0, :4], q8_0(x[:, 0]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_q8_0_block_with_a_nan_or_infinity_never_decodes_to_a_number(bad):
    pages = chunkdelta.KVPages(1, 1, 64, page_size=16, k_format="q8_0", v_format="q8_0")
    x = rows(0, 1, 1)
    x[0, 0, 3] = bad
    chunkdelta.append_kv(pages, mx.array(x), mx.array(x), [0])
    decoded = decode_slab(pages.arrays[0], 64)[0, 0, 0]
    assert np.isnan(decoded[:32]).all()
    assert np.isfinite(decoded[32:]).all()  # the other block is untouched


def test_strided_rows():
    pages = chunkdelta.KVPages(1, 2, 64, page_size=16, k_format="f32", v_format="f32")
    x = rows(0)
    chunkdelta.append_kv(
        pages,
        mx.array(x.transpose(1, 0, 2)).transpose(1, 0, 2),
        mx.array(np.repeat(x, 2, axis=-1))[..., ::2],
        range(5),
    )
    assert np.array_equal(np.array(pages.arrays[0])[0, :, :5], x.transpose(1, 0, 2))
    assert np.array_equal(np.array(pages.arrays[1])[0, :, :5], x.transpose(1, 0, 2))


def test_slots_run_on_over_slabs():
    pages = chunkdelta.KVPages(1, 2, 64, page_size=16, k_format="f32", v_format="f32")
    pages.grow(2)
    x = rows(0)
    chunkdelta.append_kv(pages, mx.array(x), mx.array(-x), [15, 16, 31, 32, 47])
    k, v = (np.concatenate([np.array(a) for a in pages.arrays[i::2]]) for i in (0, 1))
    for token, slot in enumerate([15, 16, 31, 32, 47]):
        assert np.array_equal(k[slot // 16, :, slot % 16], x[token])
        assert np.array_equal(v[slot // 16, :, slot % 16], -x[token])
    assert np.count_nonzero(k) == x.size


@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=["no_tokens", "all_skipped"])
def test_nothing_to_write(slots):
    pages = chunkdelta.KVPages(1, 2, 64, page_size=16)
    x = mx.zeros((len(slots), 2, 64))
    assert chunkdelta.append_kv(pages, x, x, slots) is pages
    assert pages.generation == 0


def test_slot_mapping_made_once_serves_all_layers():
    slots = chunkdelta.slot_mapping(np.array([3, -1, 5]))
    x = mx.array(rows(0, 3))
    for _ in range(2):
        pages = chunkdelta.KVPages(1, 2, 64, page_size=16, k_format="f32", v_format="f32")
        chunkdelta.append_kv(pages, x, x, slots)
        assert np.array_equal(np.array(pages.arrays[1])[0, :, 5], np.array(x)[2])


REFUSALS = {
    "k of another length": ({"k": mx.zeros((4, 2, 64))}, r"k \[T, Hkv, D\] = \(5, 2, 64\)"),
    "k of other heads": ({"k": mx.zeros((5, 1, 64))}, r"k \[T, Hkv, D\] = \(5, 2, 64\)"),
    "v of another head_dim": ({"v": mx.zeros((5, 2, 32))}, r"v \[T, Hkv, D\] = \(5, 2, 64\)"),
    "v of integers": ({"v": mx.zeros((5, 2, 64), mx.int32)}, r"\{float32, float16, bfloat16\}"),
    "a slot past the end": ({"slot_mapping": [0, 1, 2, 3, 48]}, r"page_size = 48; got 48"),
    "a slot below -1": ({"slot_mapping": [0, 1, 2, 3, -2]}, r"-1 to skip; got -2"),
    "a slot twice": ({"slot_mapping": [7, 1, 2, 3, 7]}, r"at most once; got slot 7 twice"),
    "slots of 2 axes": ({"slot_mapping": [[1], [2]]}, r"slot_mapping \[T\]"),
    "slots of fractions": ({"slot_mapping": [0.5] * 5}, r"slot_mapping of an integer dtype"),
    "slots past int32": ({"slot_mapping": [2**31] * 5}, r"slot_mapping within int32"),
    "pages of another kind": ({"pages": None}, r"pages a KVPages; got NoneType"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_change_nothing(change, message):
    pages = chunkdelta.KVPages(3, 2, 64, page_size=16)
    arguments = {
        "pages": pages,
        "k": mx.ones((5, 2, 64)),
        "v": mx.ones((5, 2, 64)),
        "slot_mapping": range(5),
        **change,
    }
    with pytest.raises(ValueError, match=r"\[append_kv\] expected .*" + message):
        chunkdelta.append_kv(**arguments)
    assert pages.generation == 0
    assert not any(a.any().item() for a in pages.arrays)
