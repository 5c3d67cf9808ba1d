"""paged_attention against the float64 oracle, with every unused slot of the pool holding NaN."""

import json
import os
import subprocess
import sys

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.testing.attention import PagedBatch

CASES = {
    "one_token": {"q_lens": [1], "seq_lens": [1]},
    "one_chunk": {"q_lens": [7], "seq_lens": [7]},
    "chunk_at_an_offset": {"q_lens": [7], "seq_lens": [20]},
    "ragged_with_an_empty_one": {"q_lens": [5, 0, 1, 33], "seq_lens": [5, 9, 100, 300]},
    "decode_batch": {"q_lens": [1, 1, 1], "seq_lens": [17, 1, 250], "num_q_heads": 8},
    "speculative_decode": {"q_lens": [4, 8], "seq_lens": [170, 8], "num_q_heads": 6},
    "more_queries_than_keys": {"q_lens": [5, 3], "seq_lens": [2, 0]},
    "no_queries": {"q_lens": [0], "seq_lens": [40]},
    "no_keys": {"q_lens": [3], "seq_lens": [0]},
    "full_pages": {"q_lens": [64], "seq_lens": [192], "page_size": 64},
    "heads_mha": {"q_lens": [20], "seq_lens": [50], "num_q_heads": 3, "num_kv_heads": 3},
    "heads_gqa_7": {"q_lens": [20], "seq_lens": [50], "num_q_heads": 7, "num_kv_heads": 1},
    "heads_wider_than_a_tile": {"q_lens": [3], "seq_lens": [9], "num_q_heads": 96},
    "two_segments": {"q_lens": [40], "seq_lens": [4200], "page_size": 48},
    "three_slabs": {"q_lens": [40], "seq_lens": [400], "slabs": 3},
    "sharp_softmax": {"q_lens": [40], "seq_lens": [400], "spread": 30.0},
    **{
        f"dim_{D}": {"q_lens": [33], "seq_lens": [270], "head_dim": D}
        for D in (4, 20, 64, 80, 96, 128, 192, 256)
    },
    **{
        f"{name}_activations": {
            "q_lens": [33, 2],
            "seq_lens": [300, 40],
            "dtype": dtype,
            "k_format": name,
            "v_format": name,
        }
        for name, dtype in (("f16", mx.float16), ("bf16", mx.bfloat16))
    },
    "bf16_sharp_softmax": {
        "q_lens": [33],
        "seq_lens": [300],
        "spread": 30.0,
        "dtype": mx.bfloat16,
        "k_format": "bf16",
        "v_format": "bf16",
    },
    "k_and_v_formats_differ": {
        "q_lens": [33],
        "seq_lens": [300],
        "k_format": "q8_0",
        "v_format": "bf16",
    },
    "q8_0_partial_block": {
        "q_lens": [33],
        "seq_lens": [300],
        "head_dim": 80,
        "k_format": "bf16",
        "v_format": "q8_0",
    },
}
OPTIONS = {
    "plain": {},
    "not_causal": {"causal": False},
    "window_1": {"window": 1},
    "window_10": {"window": 10},
    "scale_and_softcap": {"scale": 0.3, "softcap": 5.0},
    "sinks": {"sinks": True},
    "sinks_window_softcap": {"sinks": True, "window": 33, "softcap": 2.0},
}


def error(a, b):
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


def attend(batch, options):
    o, lse = chunkdelta.paged_attention(
        batch.q, batch.pages, **batch.metadata, return_lse=True, **options
    )
    assert o.dtype == batch.q.dtype
    assert lse.dtype == mx.float32
    return np.array(o.astype(mx.float32), np.float64), np.array(lse, np.float64)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_error_is_at_most_twice_that_of_the_plain_computation(case, options):
    batch = PagedBatch(**case)
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = mx.linspace(-2, 3, batch.num_q_heads)
    o, lse = attend(batch, options)
    expected, expected_lse = batch.naive(**options)
    # 1e-7: both may be exact to the last bit of the output.
    assert error(o, expected) <= 2 * error(batch.plain(**options), expected) + 1e-7
    finite = np.isfinite(expected_lse)
    assert np.array_equal(np.isfinite(lse), finite)
    assert np.all(lse[~finite] == -np.inf)
    magnitude = np.abs(np.where(finite, expected_lse, 0)).max(initial=1.0)
    assert np.abs(lse[finite] - expected_lse[finite]).max(initial=0) <= 2e-6 * magnitude


def test_a_query_without_keys_gives_zero_and_minus_infinity():
    batch = PagedBatch(q_lens=[5], seq_lens=[2])  # bottom right: three queries see nothing
    o, lse = attend(batch, {})
    assert np.all(o[:3] == 0)
    assert np.all(lse[:3] == -np.inf)
    assert np.all(o[3:] != 0)


def test_chunk_by_chunk_is_the_whole():
    whole = PagedBatch(q_lens=[150], seq_lens=[150], num_q_heads=4)
    o, _ = attend(whole, {})
    table = whole.block_table
    for begin, end in ((0, 1), (1, 64), (64, 150)):
        part = chunkdelta.paged_attention(
            whole.q[begin:end],
            whole.pages,
            block_table=table,
            seq_lens=[end],
            cu_seqlens_q=[0, end - begin],
        )
        expected, _ = whole.naive()
        assert error(np.array(part), expected[begin:end]) <= 2 * error(o, expected)


def test_where_pages_lie_changes_no_bit():
    results = []
    for seed_of_order in (0, 1):
        batch = PagedBatch(q_lens=[20], seq_lens=[300], seed=5)
        if seed_of_order:  # the same values in another order of pages, over two slabs
            used = batch.block_table[0]
            batch.pages.grow(len(used))
            moved = np.arange(len(used))[::-1] + batch.pages.num_pages - len(used)
            batch.pages.copy_pages(used, moved)
            batch.block_table = moved[None].astype(np.int32)
        results.append(attend(batch, {}))
    assert np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("q_lens", [[200], [1], [8, 3]], ids=["prefill", "decode", "mixed"])
def test_threads_change_no_bit(q_lens):
    batch = PagedBatch(q_lens=q_lens, seq_lens=[4300] * len(q_lens), head_dim=64, page_size=64)
    before = chunkdelta._ext.num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            chunkdelta._ext.set_num_threads(threads)
            results.append(attend(batch, {}))
    finally:
        chunkdelta._ext.set_num_threads(before)
    for o, lse in results[1:]:
        assert np.array_equal(o, results[0][0])
        assert np.array_equal(lse, results[0][1])


def test_strided_queries():
    batch = PagedBatch(q_lens=[9], seq_lens=[30])
    expected = chunkdelta.paged_attention(batch.q, batch.pages, **batch.metadata)
    strided = mx.array(np.array(batch.q).transpose(1, 0, 2)).transpose(1, 0, 2)
    got = chunkdelta.paged_attention(strided, batch.pages, **batch.metadata)
    assert mx.array_equal(got, expected)


def test_metadata_made_once_serves_all_layers():
    batch = PagedBatch(q_lens=[9], seq_lens=[30])
    metadata = chunkdelta.attention_metadata(**batch.metadata, page_size=16)
    expected = chunkdelta.paged_attention(batch.q, batch.pages, **batch.metadata)
    for _ in range(2):
        got = chunkdelta.paged_attention(batch.q, batch.pages, metadata=metadata)
        assert mx.array_equal(got, expected)


def test_metadata_as_mlx_arrays():
    batch = PagedBatch(q_lens=[9], seq_lens=[30])
    expected = chunkdelta.paged_attention(batch.q, batch.pages, **batch.metadata)
    metadata = {name: mx.array(value) for name, value in batch.metadata.items()}
    assert mx.array_equal(chunkdelta.paged_attention(batch.q, batch.pages, **metadata), expected)


REFUSALS = {
    "q of 2 axes": ({"q": mx.zeros((9, 64))}, r"q \[T, Hq, D\]; got float32 \(9, 64\)"),
    "q of another head_dim": (
        {"q": mx.zeros((9, 4, 32))},
        r"the pool's D = 64; got mlx.core.float32 \(9, 4, 32\)",
    ),
    "q of integers": ({"q": mx.zeros((9, 4, 64), mx.int32)}, r"q in \{float32, float16, bfloat16"),
    "q heads no multiple": ({"q": mx.zeros((9, 3, 64))}, r"Hq a multiple of Hkv = 2"),
    "q of another length": ({"q": mx.zeros((8, 4, 64))}, r"T = 9, the last of cu_seqlens_q"),
    "lens of another length": ({"seq_lens": [30, 3]}, r"block_table \[N, max_pages\] with N = 2"),
    "too many keys": ({"seq_lens": [33]}, r"seq_lens in 0\.\.32 .* got seq_lens\[0\] = 33"),
    "negative keys": ({"seq_lens": [-1]}, r"seq_lens in 0\.\.32 .* got seq_lens\[0\] = -1"),
    "offsets descend": ({"cu_seqlens_q": [9, 0]}, r"cu_seqlens_q .* ascending"),
    "offsets short": ({"cu_seqlens_q": [0]}, r"cu_seqlens_q \[N \+ 1\] with N = 1"),
    "a key without a page": ({"block_table": [[1, -1]]}, r"block_table\[0, 1\] = -1"),
    "a page out of the pool": ({"block_table": [[1, 900]]}, r"num_pages = 4; got page 900"),
    "a table of fractions": ({"block_table": [[1.0, 2.0]]}, r"block_table of an integer dtype"),
    "a table of 1 axis": ({"block_table": [1, 2]}, r"block_table \[N, max_pages\]"),
    "window 0": ({"window": 0}, r"window >= 1; got 0"),
    "window without causal": ({"window": 3, "causal": False}, r"causal=True with a window"),
    "softcap 0": ({"softcap": 0.0}, r"softcap > 0; got 0"),
    "scale of infinity": ({"scale": float("inf")}, r"a finite scale"),
    "sinks of another shape": ({"sinks": mx.zeros(3)}, r"sinks \[Hq\] = \(4\)"),
    "pages of another kind": ({"pages": mx.zeros(3)}, r"pages a KVPages; got array"),
    "metadata twice": ({"metadata": 1}, r"metadata instead; got both"),
    "metadata missing": ({"seq_lens": None}, r"metadata instead; got not all"),
}


@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(change, message):
    batch = PagedBatch(q_lens=[9], seq_lens=[30])
    arguments = {"q": batch.q, "pages": batch.pages, **batch.metadata, **change}
    with pytest.raises(ValueError, match=r"\[paged_attention\] expected .*" + message):
        chunkdelta.paged_attention(**arguments)


def test_metadata_of_another_page_size_is_refused():
    batch = PagedBatch(q_lens=[9], seq_lens=[30])
    metadata = chunkdelta.attention_metadata(**batch.metadata, page_size=32)
    with pytest.raises(ValueError, match="pages of 16 keys; got metadata for pages of 32"):
        chunkdelta.paged_attention(batch.q, batch.pages, metadata=metadata)
    with pytest.raises(ValueError, match="page_size a multiple of 16; got 24"):
        chunkdelta.attention_metadata(**batch.metadata, page_size=24)
    with pytest.raises(ValueError, match=r"metadata from attention_metadata\(\); got list"):
        chunkdelta.paged_attention(batch.q, batch.pages, metadata=[1])


def test_workspace_is_what_the_formula_says():
    ext = chunkdelta._ext
    for q_lens, seq_lens, heads in (([200], [4300], (4, 2)), ([1, 1], [300, 7], (8, 2))):
        batch = PagedBatch(
            q_lens=q_lens, seq_lens=seq_lens, num_q_heads=heads[0], num_kv_heads=heads[1]
        )
        ext.release_workspace()
        ext.reset_workspace_peak()
        mx.eval(chunkdelta.paged_attention(batch.q, batch.pages, **batch.metadata))
        assert ext.workspace_peak_bytes() == ext.paged_attention_workspace(
            seq_lens, batch.cu_seqlens_q, *heads, 64, True, 0, ext.num_threads()
        )


@pytest.mark.parametrize(
    ("q_lens", "kernel", "reason"),
    [
        ([512], "paged_attention_segments", "2 groups of up to 1024 rows"),
        ([1, 1], "paged_attention_split_keys", "4 groups of up to 2 rows"),
        (
            [33, 32],
            "paged_attention_segments + paged_attention_split_keys",
            "2 groups of up to 66 rows",
        ),
        ([0], "none", "there are no queries"),
    ],
    ids=["prefill", "decode", "both", "nothing"],
)
def test_explain_names_the_kernel_and_why(q_lens, kernel, reason):
    keys = [1000] * len(q_lens)
    got = chunkdelta.explain(
        "paged_attention",
        backend="cpu",
        queries=q_lens,
        keys=keys,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
    )
    assert got.kernels == ((f"{kernel} ({chunkdelta._ext.active_isa()})", 1),)
    assert reason in got.why
    assert got.scratch_bytes == chunkdelta._ext.paged_attention_workspace(
        keys, [0, *np.cumsum(q_lens).tolist()], 4, 2, 64, True, 0, chunkdelta._ext.num_threads()
    )


def test_more_keys_than_16_bits_count():
    """131,072 keys, of which a table repeats 64 pages: indices are wide enough everywhere."""
    batch = PagedBatch(q_lens=[40], seq_lens=[1024], head_dim=32, num_q_heads=2, num_kv_heads=1)
    batch.block_table = np.tile(batch.block_table, 128)
    batch.seq_lens = [128 * 1024]
    o, lse = attend(batch, {"window": 70_000})
    expected, expected_lse = batch.naive(window=70_000)
    assert error(o, expected) <= 2 * error(batch.plain(window=70_000), expected)
    assert np.abs(lse - expected_lse).max() < 1e-5
    q = batch.q
    batch.q, batch.q_lens = q[-1:], [1]  # the same keys through the decode path
    decoded, _ = attend(batch, {"window": 70_000})
    assert error(decoded, expected[-1:]) <= 2 * error(batch.plain(window=70_000), expected[-1:])


@pytest.mark.parametrize(
    ("q_len", "heads", "head_dim"),
    [(512, (16, 4), 256), (2048, (16, 4), 256), (512, (64, 8), 128), (1, (16, 4), 256)],
    ids=str,
)
def test_workspace_is_flat_in_the_context(q_len, heads, head_dim):
    contexts = (4096, 16_384, 65_536, 131_072, 1_048_576)
    sizes = [
        chunkdelta._ext.paged_attention_workspace(
            [keys], [0, q_len], *heads, head_dim, True, 0, threads=2
        )
        for keys in contexts
    ]
    assert max(sizes) <= (24 << 20) + 2 * (184 << 10) + 4096
    # Decode leaves a partial result every 1,024 keys, up to 4 MiB; prefill leaves none.
    slope = (sizes[-1] - sizes[0]) / (contexts[-1] - contexts[0])
    assert slope <= (0 if q_len > 16 else 24)


ISA_CODE = """
import json, numpy as np
from chunkdelta.testing.attention import PagedBatch
import chunkdelta, mlx.core as mx
worst = 0
for case in json.loads(input()):
    batch = PagedBatch(**case)
    expected, _ = batch.naive(softcap=20.0)
    o = chunkdelta.paged_attention(batch.q, batch.pages, **batch.metadata, softcap=20.0)
    error = np.linalg.norm(np.array(o) - expected)
    worst = max(worst, error / np.linalg.norm(batch.plain(softcap=20.0) - expected))
print(chunkdelta._ext.active_isa(), worst)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa):
    if isa not in chunkdelta._ext.supported_isas():
        pytest.skip(f"this CPU has no {isa}")
    cases = [
        {"q_lens": q_lens, "seq_lens": [300, 40], "head_dim": D, "k_format": k, "v_format": v}
        for q_lens in ([33, 5], [1, 2])
        for D, k, v in ((64, "f32", "bf16"), (80, "q8_0", "f16"), (256, "bf16", "q8_0"))
    ]
    done = subprocess.run(
        [sys.executable, "-c", ISA_CODE],
        input=json.dumps(cases),
        env={**os.environ, "CHUNKDELTA_ISA": isa},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    name, ratio = done.stdout.split()
    assert name == isa
    assert float(ratio) <= 2
