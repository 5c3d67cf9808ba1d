"""The loop on real layers: cuts change nothing, against stock mlx-lm in one call."""

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.loop import PrefillCancelled
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate

VOCAB, TOKENS = 512, 530
PROMPT = np.random.default_rng(0).integers(0, VOCAB, TOKENS)


def build():
    return embedded.build(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, dtype=mx.float32)


@pytest.fixture(scope="module")
def stock():
    """Logits of every token from one call of mlx-lm's own model."""
    return np.array(build()(mx.array(PROMPT)[None]))


@pytest.fixture(scope="module")
def model():
    return accelerate(build())


def caches(model, tokens=TOKENS):
    return chunkdelta.make_cache(model, max_tokens=tokens, page_size=16)


def relative(a, b):
    return float(np.linalg.norm(np.array(a) - b) / np.linalg.norm(b))


@pytest.mark.parametrize("chunk_size", [64, 512, 513, TOKENS])
def test_cuts_change_nothing(model, stock, chunk_size):
    every = chunkdelta.prefill(model, PROMPT, caches(model), chunk_size=chunk_size, logits="all")
    assert relative(every, stock) < 1e-5
    last = chunkdelta.prefill(model, PROMPT, caches(model), chunk_size=chunk_size)
    assert relative(last, stock[:, -1]) < 1e-5


@pytest.mark.parametrize("chunk_size", [1, 7])
def test_short_chunks_change_nothing(model, stock, chunk_size):
    logits = chunkdelta.prefill(model, PROMPT[:90], caches(model), chunk_size=chunk_size)
    assert relative(logits, stock[:, 89]) < 1e-5


def test_the_same_cuts_give_the_same_bits(model):
    whole = chunkdelta.prefill(model, PROMPT, caches(model), chunk_size=256, cut_points=[100, 300])
    cache = caches(model)
    for begin, end in ((0, 100), (100, 300), (300, TOKENS)):
        parts = chunkdelta.prefill(model, PROMPT[begin:end], cache, chunk_size=256)
    assert mx.array_equal(whole, parts).item()


def test_stopped_and_taken_up_again_gives_the_same_bits(model):
    straight = chunkdelta.prefill(model, PROMPT, caches(model), chunk_size=106)
    cache, chunks = caches(model), iter(range(100))
    with pytest.raises(PrefillCancelled) as stop:
        chunkdelta.prefill(
            model, PROMPT, cache, chunk_size=106, should_stop=lambda: next(chunks) == 2
        )
    assert stop.value.done == 212
    rest = chunkdelta.prefill(model, PROMPT[212:], cache, chunk_size=106)
    assert mx.array_equal(straight, rest).item()


def test_decode_goes_on_from_the_prefill(model, stock):
    cache = caches(model)
    chunkdelta.prefill(model, PROMPT[:-3], cache, chunk_size=200, logits="none")
    for i in (3, 2, 1):
        logits = model(mx.array(PROMPT[-i : TOKENS - i + 1])[None], cache=cache)
    assert relative(logits[:, -1], stock[:, -1]) < 1e-5


def test_embeddings_and_batches(model, stock):
    embeddings = model.model.embed_tokens(mx.array(PROMPT))
    logits = chunkdelta.prefill(model, embeddings, caches(model), chunk_size=200)
    assert relative(logits, stock[:, -1]) < 1e-5
    both = np.stack([PROMPT, PROMPT])
    batch = chunkdelta.prefill(model, both, caches(model, 2 * TOKENS + 32), chunk_size=200)
    assert batch.shape == (2, VOCAB)
    for row in range(2):
        assert relative(batch[row : row + 1], stock[:, -1]) < 1e-5


def test_too_small_a_cache_is_refused_before_a_token_is_computed(model):
    cache = caches(model, tokens=TOKENS - 16)
    called = []
    with pytest.raises(ValueError, match="make the cache with larger max_tokens"):
        chunkdelta.prefill(model, PROMPT, cache, progress=lambda *a: called.append(a))
    assert called == []
    assert all(getattr(c, "offset", 0) == 0 for c in cache)
    chunkdelta.prefill(model, PROMPT[:100], cache)  # still usable


def test_positions_are_refused_by_a_text_model(model):
    with pytest.raises(ValueError, match="expected no positions"):
        chunkdelta.prefill(model, PROMPT[:4], caches(model), positions=mx.zeros((3, 4)))
