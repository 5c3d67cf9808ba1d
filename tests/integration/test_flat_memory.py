"""Long runs in chunks: nothing is kept that is not in the plan."""

from __future__ import annotations

import chunkdelta
import mlx.core as mx
import pytest
from chunkdelta.models.mlx_lm import accelerate

from tests.integration.tiny_models import build, prompt


@pytest.fixture(scope="module")
def model():
    return accelerate(build("qwen3_5"))


def active(model, cache, chunks: int, size: int) -> list[int]:
    """MLX's active memory after each chunk."""
    tokens = prompt(size)
    held = []
    for _ in range(chunks):
        mx.eval(model.body(tokens, cache)[:, -1:], [c.state for c in cache])
        mx.synchronize()
        held.append(mx.get_active_memory())
    return held


@pytest.mark.parametrize("size", [1, 33], ids=["decode", "prefill"])
def test_active_memory_is_flat_over_100_chunks(model, size: int):
    """No graph that grows, no slice that pins its buffer: fixed caches, fixed memory."""
    cache = chunkdelta.make_cache(model, max_tokens=103 * size)
    held = active(model, cache, 103, size)
    # A retained row of one chunk's activations (256 bytes) in each would show as 12,800 bytes.
    assert max(held[53:]) - max(held[3:53]) <= 4096


def test_growing_caches_hold_their_tokens_and_at_most_a_third_more(model):
    cache = model.make_cache()
    active(model, cache, 20, 256)
    p = cache[3].pool
    assert 5120 <= p.capacity <= 1.5 * 5120 + 2048
    assert p.pages.num_slabs <= 5


def test_entries_own_their_memory(model):
    """The tail of a convolution is three rows, not a view of the chunk."""
    cache = chunkdelta.make_cache(model, max_tokens=4096)
    tokens = prompt(2048)
    mx.eval(model.body(tokens, cache)[:, -1:], [c.state for c in cache])
    mx.synchronize()
    before = mx.get_active_memory()
    held = sum(c.nbytes for c in cache[:3])
    for c in cache[:3]:
        c.cache[:] = [None, None]
    assert 0 < before - mx.get_active_memory() <= held + 8192


def test_dropped_caches_free_everything(model):
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    for _ in range(3):
        cache = model.make_cache()
        active(model, cache, 3, 100)
        del cache
    mx.synchronize()
    assert mx.get_active_memory() - before <= 4096
