"""The memory plan: its terms for known models, what fits, and that MLX is held to it."""

from dataclasses import replace

import chunkdelta
import mlx.core as mx
import pytest
from chunkdelta import _ext
from chunkdelta.loop.limits import enforce_limit
from chunkdelta.loop.memory import (
    ChunkPlan,
    format_bytes,
    one_call_bytes,
    plan_memory,
)
from chunkdelta.loop.shapes import (
    AttentionShape,
    GatedDeltaShape,
    LayerShape,
    MlpShape,
    ModelShape,
)
from chunkdelta.models.shapes import named_shape
from hypothesis import given, settings
from hypothesis import strategies as st

# KV at 131,072 tokens in 16 bits, float32 states with convolution tails; worked out by hand from
# the models' configurations.
KNOWN = [
    pytest.param(
        "qwen3.5-9b", 8 * 131072 * 2 * 4 * 256 * 2, 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    ),
    pytest.param(
        "qwen3.5-27b", 16 * 131072 * 2 * 4 * 256 * 2, 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    ),
    pytest.param(
        "qwen3.5-35b-a3b", 10 * 131072 * 2 * 2 * 256 * 2, 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    ),
    pytest.param(
        "qwen3-next-80b", 12 * 131072 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    ),
]

TINY = ModelShape(
    hidden=64,
    vocab=1000,
    layers=(
        LayerShape(GatedDeltaShape(1, 2, 32, 32), MlpShape(128)),
        LayerShape(AttentionShape(2, 1, 64), MlpShape(128)),
    ),
    weight_bytes=10_000,
    name="tiny",
)


@pytest.mark.parametrize(("name", "kv", "states"), KNOWN)
def test_known_models(name, kv, states):
    plan = plan_memory(named_shape(name), 131072)
    assert plan.kv_bytes == kv
    assert plan.state_bytes == states
    assert plan.chunk.logits_bytes == plan.model.vocab * 2
    assert plan.total_bytes == sum(plan.rows.values())


@pytest.mark.parametrize(
    ("kv_format", "bytes_per_value"),
    [("f32", 4), ("bf16", 2), ("f16", 2), ("q8_0", 34 / 32), ("q8_0/bf16", (34 / 32 + 2) / 2)],
)
def test_formats(kv_format, bytes_per_value):
    plan = plan_memory(named_shape("9b"), 64, kv_format=kv_format)
    assert plan.kv_bytes == 8 * 64 * 2 * 4 * 256 * bytes_per_value


def test_format_defaults_to_that_of_the_activations():
    assert plan_memory(TINY, 64).kv_format == "bf16"
    wide = ModelShape(**{**vars(TINY), "dtype_bytes": 4})
    assert plan_memory(wide, 64).kv_format == "f32"


def test_one_call_is_scores_or_logits_on_top():
    shape = named_shape("9b")
    tokens = 40000
    scores = 16 * tokens * tokens * 2
    assert scores == 51_200_000_000
    kv = tokens * 8 * 2 * 4 * 256 * 2
    rest = one_call_bytes(shape, tokens) - shape.weight_bytes - kv - scores
    assert 0 < rest < 5e9  # states and the widest layer over all tokens
    # At few tokens the logits of a large vocabulary outweigh the scores.
    assert one_call_bytes(TINY, 4) >= TINY.weight_bytes + 4 * 1000 * 2


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(4096, 200_000),
    max_tokens=st.integers(0, 5000),
    chunk_size=st.sampled_from([1, 7, 64, 512, 513]),
    page_size=st.sampled_from([16, 64, 528]),
    batch=st.integers(1, 3),
)
def test_only_pages_grow_with_the_context(tokens, max_tokens, chunk_size, page_size, batch):
    def plan(n):
        return plan_memory(
            TINY, n, max_tokens=max_tokens, chunk_size=chunk_size, page_size=page_size, batch=batch
        )

    tokens = tokens // chunk_size * chunk_size + chunk_size  # full chunks
    one, more = plan(tokens), plan(tokens + 64 * 513 * chunk_size)
    # Attention with few queries splits the keys: a row of partial results for each split.
    assert 0 <= more.fixed_bytes - one.fixed_bytes < 64 * batch * (more.tokens - one.tokens)
    token_bytes = 2 * 1 * 64 * 2  # K and V of one KV head of 64 in 16 bits
    held = one.kv_bytes / (batch * token_bytes)
    assert 0 <= held - (tokens + max_tokens) < page_size


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(512, 100_000),
    batch=st.integers(1, 2),
    memory=st.integers(0, 60_000_000),
)
def test_largest_context_is_the_largest(tokens, batch, memory):
    largest = plan_memory(TINY, tokens, batch=batch).largest_context(memory)
    if largest >= 512:
        assert plan_memory(TINY, largest, batch=batch).fits(memory)
    more = (largest // 512 + 1) * 512  # full chunks
    assert not plan_memory(TINY, more, batch=batch).fits(memory)


def test_refuses_what_does_not_fit_with_the_largest_that_does():
    plan = plan_memory(named_shape("9b"), 131072, max_tokens=100)
    plan.require(10_000_000_000)
    largest = plan.largest_context(8_000_000_000)
    with pytest.raises(MemoryError, match=f"131,172 tokens needs 9.4.*{largest:,} tokens$"):
        plan.require(8_000_000_000)
    with pytest.raises(
        MemoryError, match=r"no context fits: weights, states and one chunk need 5\."
    ):
        plan.require(4_000_000_000)


def test_a_model_without_attention_has_no_largest_context():
    recurrent = ModelShape(**{**vars(TINY), "layers": TINY.layers[:1]})
    assert plan_memory(recurrent, 100).largest_context(10**9) is None


def test_a_chunk_longer_than_the_prompt_is_planned_as_the_prompt():
    assert plan_memory(TINY, 5).chunk == plan_memory(TINY, 5, chunk_size=5).chunk


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"tokens": 0}, "tokens >= 1; got 0", id="no-tokens"),
        pytest.param({"tokens": 1, "chunk_size": 0}, "chunk_size >= 1; got 0", id="no-chunk"),
        pytest.param({"tokens": 1, "batch": 0}, "batch >= 1; got 0", id="no-batch"),
        pytest.param({"tokens": 1, "max_tokens": -1}, "max_tokens >= 0; got -1", id="negative"),
        pytest.param({"tokens": 1, "page_size": 40}, "multiple of 16; got 40", id="page-size"),
        pytest.param({"tokens": 1, "kv_format": "q3"}, "bf16.*; got 'q3'", id="format"),
        pytest.param({"tokens": 1, "kv_format": "bf16/"}, "got 'bf16/'", id="half-a-format"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=r"^\[(plan_memory|kv_format)\] expected .*" + message):
        plan_memory(TINY, **arguments)


def test_the_evaluator_is_held_to_the_plan():
    """A chain of products whose outputs take 4 MB each: left alone, the evaluator runs ahead."""
    x, w = mx.zeros((1 << 18, 4)), mx.eye(4)
    mx.eval(x, w)
    outputs = 10
    chunk = ChunkPlan({"outputs": outputs * x.nbytes}, 0, 0, largest_op_bytes=x.nbytes)

    def peak_of_a_chain():
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        y = x
        for _ in range(60):
            y = y @ w
        mx.eval(y)
        return mx.get_peak_memory()

    before = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(before)
    with enforce_limit(chunk) as planned:
        assert peak_of_a_chain() <= planned
    after = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(after)
    assert after == before
    assert peak_of_a_chain() > planned + 2 * outputs * x.nbytes


def test_limits_are_restored_after_an_error():
    chunk = ChunkPlan({"a": 1 << 20}, 0, 0, 1 << 20)
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    try:
        with pytest.raises(RuntimeError, match="inside"), enforce_limit(chunk):
            raise RuntimeError("inside")
        assert mx.set_memory_limit(memory) == 1 << 40
        assert mx.set_cache_limit(cache) == 1 << 30
    finally:
        mx.set_memory_limit(memory)
        mx.set_cache_limit(cache)


def test_overlapping_prefills_restore_the_limits_in_any_order():
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    try:
        one, two = (enforce_limit(ChunkPlan({"a": n << 20}, 0, 0, 1 << 20)) for n in (2, 9))
        planned = max(one.__enter__(), two.__enter__())
        one.__exit__(None, None, None)  # before the one that began later
        assert mx.set_memory_limit(1) == planned - (1 << 20)
        two.__exit__(None, None, None)
        assert mx.set_memory_limit(memory) == 1 << 40
        assert mx.set_cache_limit(cache) == 1 << 30
    finally:
        mx.set_memory_limit(memory)
        mx.set_cache_limit(cache)


@pytest.mark.parametrize(
    ("size", "text"),
    [(412, "412 B"), (18_300_000, "18.3 MB"), (1_716_000_000, "1.72 GB"), (2_500, "2.5 kB")],
)
def test_bytes_are_written_in_decimal_units(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize("length", [1, 4, 5, 64, 200, 512])
@pytest.mark.parametrize(
    "heads", [(1, 2, 128, 128), (16, 32, 128, 128), (3, 3, 64, 256)], ids=lambda h: f"{h}"
)
@pytest.mark.parametrize("batch", [1, 3])
def test_workspace_of_the_delta_rule_is_what_it_takes(length, heads, batch):
    hk, hv, dk, dv = heads
    q = mx.random.normal((batch, length, hk, dk))
    v = mx.random.normal((batch, length, hv, dv))
    g, beta = -mx.ones((batch, length, hv)), mx.full((batch, length, hv), 0.5)
    mx.eval(q, v, g, beta)
    _ext.release_workspace()
    _ext.reset_workspace_peak()
    mx.eval(chunkdelta.chunk_gated_delta_rule(q, q, v, g, beta))
    shared, per_worker = _ext.gated_delta_workspace(hk, hv, dk, dv, [length] * batch)
    planned = _pages(shared) + _ext.num_threads() * _pages(per_worker)
    # A worker that got no task has taken no scratch.
    assert planned - (_ext.num_threads() - 1) * _pages(per_worker) <= _ext.workspace_peak_bytes()
    assert _ext.workspace_peak_bytes() <= planned


def _pages(n):
    return -(-n // 4096) * 4096


def test_checkpoints_and_the_prefix_cache_are_terms_of_the_plan():
    """51.5 MB a checkpoint on Qwen3.5-9B: 15 of them in 131,072 tokens, every 8,192."""
    shape = named_shape("9b")
    plain = plan_memory(shape, 131072)
    kept = plan_memory(shape, 131072, checkpoints=15, prefix_bytes=10**9)
    assert kept.checkpoint_bytes == 15 * plain.state_bytes
    assert kept.total_bytes - plain.total_bytes == kept.checkpoint_bytes + 10**9
    assert 51e6 < plain.state_bytes < 52e6
    assert kept.rows["checkpoints"] == kept.checkpoint_bytes
    assert kept.to_json()["prefix_bytes"] == 10**9
    room = kept.total_bytes
    assert kept.largest_context(room) >= 131072 > kept.largest_context(room - 10**9)
    with pytest.raises(ValueError, match="checkpoints >= 0; got -1"):
        plan_memory(shape, 1, checkpoints=-1)


def test_quantised_pages_of_the_9b_at_131072_tokens():
    """What users ask for: at most 1.75 GB where 16 bits take 4.29 GB."""
    shape = named_shape("9b")
    assert plan_memory(shape, 131072).kv_bytes == pytest.approx(4.29e9, rel=2e-3)
    assert plan_memory(shape, 131072, kv_format="q8_0/turbo4").kv_bytes <= 1.75e9


@pytest.mark.parametrize("kv_format", ["q8_0_rot", "turbo4/q8_0", "q8_0/turbo4"])
def test_rotations_are_planned(kv_format):
    """fp32 copies of q, k, v or o, where the attention half is the widest."""
    attention = tuple(x for x in TINY.layers if isinstance(x.mixer, AttentionShape))
    shape = replace(TINY, layers=tuple(replace(x, mlp=None) for x in attention))
    plain = plan_memory(shape, 64, kv_format="q8_0").chunk.transients
    rotated = plan_memory(shape, 64, kv_format=kv_format).chunk.transients
    extra = {name: n for name, n in rotated.items() if name not in plain}
    assert extra
    assert all("rotated" in name and n > 0 for name, n in extra.items())


@pytest.mark.parametrize("chunk_size", [1, 64, 512])
def test_scratch_on_the_gpu_is_that_of_the_launch_plans_and_flat(chunk_size):
    shape = named_shape("9b")
    near, far = (
        plan_memory(shape, n, chunk_size=chunk_size, device="gpu").chunk for n in (8192, 131072)
    )
    metadata = 64  # block tables and tiles, per token of context
    assert 0 <= far.workspace_bytes - near.workspace_bytes < metadata * (131072 - 8192)
    assert near.workspace_in_mlx
    assert not plan_memory(shape, 8192, device="cpu").chunk.workspace_in_mlx
    if chunk_size == 512:  # fp32 (m, l, O) of 512 x 16 rows between segments
        assert near.workspace_bytes >= 512 * 16 * (256 + 2) * 4
