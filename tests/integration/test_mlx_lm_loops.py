"""mlx-lm's own loops, unchanged, on an accelerated model: what they generate equals stock."""

from __future__ import annotations

import copy
import threading

import chunkdelta
import mlx.core as mx
import pytest
from chunkdelta.models.mlx_lm import accelerate
from chunkdelta.models.prompt_reuse import PromptCache
from mlx_lm import generate, stream_generate
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.integration.tiny_models import ARCHITECTURES, VOCAB, build, prompt, stock

TOKENS = 10


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(VOCAB)} | {"<eos>": VOCAB}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="<eos>"
    )


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request):
    return stock(request.param), accelerate(build(request.param))


def ids(length: int, seed: int) -> list[int]:
    return prompt(length, seed=seed)[0].tolist()


def test_generate(pair, tokenizer):
    theirs, ours = pair
    for length, step in ((70, 2048), (70, 16)):
        texts = [
            generate(m, tokenizer, ids(length, 3), max_tokens=TOKENS, prefill_step_size=step)
            for m in (theirs, ours)
        ]
        assert texts[0] == texts[1]


def test_stream_generate(pair, tokenizer):
    streams = [list(stream_generate(m, tokenizer, ids(33, 4), max_tokens=TOKENS)) for m in pair]
    assert [r.token for r in streams[0]] == [r.token for r in streams[1]]
    for a, b in zip(*streams, strict=True):
        assert mx.allclose(a.logprobs, b.logprobs, rtol=1e-5, atol=1e-5)


def batch_generate(model, prompts, **kwargs) -> tuple[dict[int, list[int]], dict[int, list]]:
    generator = BatchGenerator(model, **kwargs)
    uids = generator.insert(prompts, [TOKENS + i for i in range(len(prompts))])
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    caches = {}
    while responses := generator.next_generated():
        for r in responses:
            tokens[r.uid].append(r.token)
            if r.finish_reason is not None:
                caches[r.uid] = r.prompt_cache
    generator.close()
    return tokens, caches


BATCHES = [
    pytest.param([5, 40, 17], {}, id="ragged"),
    pytest.param([24, 24], {}, id="equal"),
    pytest.param([1, 1, 30], {}, id="single-tokens"),
    pytest.param(
        [50, 9, 61, 30, 2],
        {"completion_batch_size": 3, "prefill_batch_size": 2, "prefill_step_size": 16},
        id="more-prompts-than-slots",
    ),
]


@pytest.mark.parametrize(("lengths", "options"), BATCHES)
def test_batch_generator(pair, lengths, options):
    """Every prompt of a batch gets what stock generates for it alone."""
    theirs, ours = pair
    prompts = [ids(n, 20 + i) for i, n in enumerate(lengths)]
    tokens, caches = batch_generate(ours, prompts, **options)
    for (uid, got), p in zip(tokens.items(), prompts, strict=True):
        want = [t for t, _ in zip_take(generate_step(mx.array(p), theirs), len(got))]
        assert got == want
        assert {c.size() for c in caches[uid] if c.size()} == {len(p) + len(got)}


def zip_take(generator, n):
    for _ in range(n):
        yield next(generator)


def test_continue_from_a_returned_cache(pair):
    """A second turn on the cache that the batch returned, through the prompt cache."""
    theirs, ours = pair
    first = ids(30, 40)
    tokens, caches = batch_generate(ours, [first, ids(12, 41)])
    history = first + tokens[0]
    store = LRUPromptCache()
    store.insert_cache("model", history, caches[0])
    turn = [*history, *ids(9, 42)]
    cache, rest = store.fetch_nearest_cache("model", turn)
    assert rest == turn[len(history) :]
    for _ in range(2):  # the stored entry serves more than once
        fork = copy.deepcopy(cache)
        got = [t for t, _ in zip_take(generate_step(mx.array(rest), ours, prompt_cache=fork), 8)]
        want = [t for t, _ in zip_take(generate_step(mx.array(turn), theirs), 8)]
        assert got == want


def test_cancelled_requests_give_their_pages_back(pair):
    _, ours = pair
    keep = ours.make_cache()  # keeps the shared pools alive
    pools = [c.pool for c in keep if hasattr(c, "pool")]
    generator = BatchGenerator(ours)
    uids = generator.insert([ids(90, 50), ids(20, 51)], [50, 50])
    for _ in range(4):
        generator.next()
    assert all(pool.free_pages <= pool.pages.num_pages - 3 for pool in pools)
    generator.remove(uids)
    generator.close()
    assert all(pool.free_pages == pool.pages.num_pages for pool in pools)


def test_pools_grow_while_a_batch_runs(pair, monkeypatch):
    """Pools that start with one page: slabs are added in prompts and in decoding."""
    monkeypatch.setattr("chunkdelta.cache.kv_cache.FIRST_SLAB_TOKENS", 64)
    theirs, ours = pair
    ours = accelerate(copy.deepcopy(ours))  # pools of its own
    prompts = [ids(n, 70 + n) for n in (60, 61, 130)]
    tokens, caches = batch_generate(ours, prompts, prefill_step_size=40)
    for (uid, got), p in zip(tokens.items(), prompts, strict=True):
        assert got == [t for t, _ in zip_take(generate_step(mx.array(p), theirs), len(got))]
        pool = next(c.pool for c in caches[uid] if hasattr(c, "pool"))
        assert pool.pages.num_slabs > 1


def test_generation_in_another_thread(pair):
    """The model is loaded here and generates in a thread with streams of its own, as in
    mlx-lm's server; twice, in two threads."""
    theirs, ours = pair
    p = ids(40, 60)
    want = [t for t, _ in zip_take(generate_step(mx.array(p), theirs), TOKENS)]
    results: list[list[int]] = []

    def serve() -> None:
        stream = mx.new_thread_local_stream(mx.default_device())
        with mx.stream(stream):
            tokens, _ = batch_generate(ours, [p, p[:11]], stream=stream)
        results.append(tokens[0][:TOKENS])

    for _ in range(2):
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert results == [want, want]


def test_prompt_cache_of_mlx_lm_is_ours(pair):
    _, ours = pair
    kinds = {type(c).__name__ for c in make_prompt_cache(ours)}
    assert kinds == {"PagedKVCache", "GatedDeltaCache"}


def test_prompt_cache_reuses_prompts_of_hybrid_models(pair):
    """What mlx-lm's server does around a turn, with our prompt cache and with none."""
    model, prompts = pair[1], PromptCache(max_size=4)

    def turn(tokens, cache):
        steps = generate_step(mx.array(tokens), model, prompt_cache=cache, max_tokens=5)
        return [int(token) for token, _ in steps]

    first = ids(42, seed=3)
    cache, rest = prompts.fetch_nearest_cache("m", first)
    assert cache is None
    assert rest == first
    cache = model.make_cache()
    answer = turn(first, cache)
    prompts.insert_cache("m", [*first, *answer], cache)

    second = [*first, *answer, 60, 61]
    cache, rest = prompts.fetch_nearest_cache("m", second)
    assert len(rest) in (2, 3)  # the last sampled token may not have run through the model yet
    assert turn(rest, cache) == turn(second, model.make_cache())
    assert prompts.fetch_nearest_cache("another model", second)[0] is None
    prompts.trim_to(n_sequences=0)
    assert (len(prompts), prompts.nbytes) == (0, 0)


def test_prefill_then_generate(pair):
    """The chunked prefill loop fills the cache that mlx-lm's loop goes on with."""
    theirs, ours = pair
    p = prompt(150, seed=80)[0]
    cache = chunkdelta.make_cache(ours, max_tokens=150 + TOKENS)
    seen = []
    chunkdelta.prefill(
        ours, p[:-1], cache, chunk_size=64, logits="none", progress=lambda *a: seen.append(a)
    )
    assert seen[-1] == (149, 149)
    rest = generate_step(p[-1:], ours, prompt_cache=cache, max_tokens=TOKENS)
    want = zip_take(generate_step(p, theirs), TOKENS)
    assert [t for t, _ in rest] == [t for t, _ in want]
