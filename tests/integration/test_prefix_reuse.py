"""Prefix reuse and snapshots on a small hybrid model, counted and compared bit for bit."""

import copy
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate

VOCAB = 101


@pytest.fixture(scope="module")
def model():
    return accelerate(embedded.build(dtype=mx.float32, vocab_size=VOCAB, hidden_size=32))


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def prefixes_of(model, **settings):
    return chunkdelta.PrefixCache(10**9, fingerprint="tiny", **settings)


def run(model, tokens, prefixes, **options):
    return chunkdelta.prefill_with_prefixes(
        model, tokens, prefixes, model.make_cache, chunk_size=32, **options
    )


def test_a_marked_boundary_computes_exactly_the_new_tokens(model):
    prefixes = prefixes_of(model)
    shared = prompt(200)
    keep = run(model, shared + prompt(50, 1), prefixes, marks=[200])
    again = run(model, shared + prompt(33, 2), prefixes)
    assert (again.reused, again.computed) == (200, 33)
    fresh = run(model, shared + prompt(33, 2), prefixes_of(model), marks=[200])
    # Chunk cuts are the same from position 200 on, and so are the bits.
    assert mx.array_equal(again.logits, fresh.logits)
    del keep


def test_elsewhere_the_nearest_checkpoint_bounds_the_work(model):
    prefixes = prefixes_of(model, checkpoint_every=64, block_size=16)
    shared = prompt(200)
    first = run(model, shared + prompt(50, 1), prefixes)
    again = run(model, shared + prompt(33, 2), prefixes)
    assert again.reused == 192  # the last multiple of 64 in the shared part
    # The prompts parted within block 12: a third prompt starts there.
    third = run(model, shared + prompt(20, 3), prefixes)
    assert third.reused == 192
    assert first.computed == 250


def test_a_branch_point_once_seen_is_kept(model):
    prefixes = prefixes_of(model, checkpoint_every=10_000, block_size=16)
    shared = prompt(100)
    keep = [run(model, shared + prompt(60, 1), prefixes)]
    second = run(model, shared + prompt(60, 2), prefixes)
    assert second.reused == 0
    third = run(model, shared + prompt(60, 3), prefixes)
    assert third.reused == 96  # whole blocks of the shared 100
    del keep


def test_a_whole_prompt_computes_nothing(model):
    prefixes = prefixes_of(model)
    tokens = prompt(77)
    first = run(model, tokens, prefixes)
    again = run(model, tokens, prefixes)
    assert again.computed == 0
    assert mx.array_equal(first.logits, again.logits)
    step = chunkdelta.prefill(model, [5], again.cache)
    assert mx.array_equal(step, chunkdelta.prefill(model, [5], first.cache))


@pytest.mark.parametrize("tail", range(1, 16))
def test_tails_past_a_page(model, tail):
    """Slots of reused, partly filled pages: the sequence that goes on copies them first."""
    prefixes = prefixes_of(model)
    shared = prompt(64 + tail)
    first = run(model, shared, prefixes)
    a = chunkdelta.prefill(model, prompt(9, 1), first.cache)
    second = prefixes.lookup([*shared, 1])
    assert second.length == 64 + tail
    b = chunkdelta.prefill(model, prompt(9, 1), second.cache)
    assert mx.array_equal(a, b)


def test_keys_tell_equal_tokens_apart(model):
    prefixes = prefixes_of(model, block_size=16)
    tokens = prompt(48)
    run(model, tokens, prefixes, keys={20: "cat.png"})
    assert prefixes.lookup([*tokens, 1], keys={20: "dog.png"}).length == 0
    assert prefixes.lookup([*tokens, 1]).length == 0
    assert prefixes.lookup([*tokens, 1], keys={20: "cat.png"}).length == 48


def test_colliding_hashes_are_never_served(model, monkeypatch):
    monkeypatch.setattr("chunkdelta.cache.prefix_cache._digest", lambda *_: b"same")
    prefixes = prefixes_of(model, block_size=16)
    a, b = prompt(40, 1), prompt(40, 2)
    keep = run(model, a, prefixes)
    assert prefixes.lookup([*b, 1]).length == 0
    run(model, b, prefixes)
    assert prefixes.lookup([*a, 1]).length == prefixes.lookup([*b, 1]).length == 40
    del keep


def test_running_sequences_survive_eviction(model):
    prefixes = prefixes_of(model)
    tokens = prompt(90)
    run(model, tokens, prefixes)
    hit = prefixes.lookup([*tokens, 1])
    kept = copy.deepcopy(hit.cache)
    freed = prefixes.evict(0)
    assert freed > 0
    assert prefixes.nbytes == 0
    assert prefixes.lookup([*tokens, 1]).length == 0
    a = chunkdelta.prefill(model, prompt(20, 1), hit.cache)
    b = chunkdelta.prefill(model, prompt(20, 1), kept)
    assert mx.array_equal(a, b)


def test_the_budget_holds_and_counts_shared_pages_once(model):
    prefixes = prefixes_of(model)
    tokens = prompt(640)
    cache = model.make_cache()
    chunkdelta.prefill(model, tokens[:320], cache)
    prefixes.insert(tokens[:320], cache)
    one = prefixes.nbytes
    chunkdelta.prefill(model, tokens[320:], cache)
    prefixes.insert(tokens, cache)
    states = sum(c.nbytes for c in cache if not hasattr(c, "held_pages"))
    pages = sum(c.nbytes for c in cache if hasattr(c, "held_pages"))
    assert prefixes.nbytes == 2 * states + pages
    assert one == states + pages // 2
    assert not chunkdelta.PrefixCache(1).insert(tokens, cache)


def test_a_full_pool_takes_pages_back_from_the_prefix_cache(model):
    cache = chunkdelta.make_cache(model, max_tokens=256)
    prefixes = prefixes_of(model)
    prefixes.attach(cache)
    tokens = prompt(192)
    chunkdelta.prefill(model, tokens, cache)
    prefixes.insert(tokens, cache)
    fresh = [type(c)(c.pool) if hasattr(c, "pool") else type(c)(len(c.cache)) for c in cache]
    del cache
    logits = chunkdelta.prefill(model, prompt(250, 1), fresh)
    assert prefixes.stats()["evicted"] == 1
    alone = chunkdelta.prefill(model, prompt(250, 1), chunkdelta.make_cache(model, max_tokens=256))
    assert mx.array_equal(logits, alone)


def test_insert_refuses_caches_of_another_length(model):
    cache = model.make_cache()
    chunkdelta.prefill(model, prompt(10), cache)
    with pytest.raises(ValueError, match=r"expected caches of 9 tokens; got one of 10"):
        prefixes_of(model).insert(prompt(9), cache)


# ---------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("kv_format", ["f32", "bf16", "q8_0", "q4_0_rot", "q8_0/turbo4"])
def test_snapshots_restore_the_bits(model, tmp_path, kv_format):
    tokens = prompt(150)
    cache = chunkdelta.make_cache(model, max_tokens=256, kv_format=kv_format)
    chunkdelta.prefill(model, tokens, cache)
    chunkdelta.save_prefix(tmp_path / "p.safetensors", tokens, cache, fingerprint="tiny")
    loaded = chunkdelta.make_cache(model, max_tokens=256, kv_format=kv_format)
    # The order of pages in the new pool is another one.
    pools = [c.pool for c in loaded if hasattr(c, "pool")]
    held = [pool.allocator.allocate(2) for pool in pools]
    for pool, pages in zip(pools, held, strict=True):
        pool.allocator.release(pages)
    assert chunkdelta.load_prefix(tmp_path / "p.safetensors", loaded, fingerprint="tiny") == tokens
    a = chunkdelta.prefill(model, [3, 1, 4], cache)
    b = chunkdelta.prefill(model, [3, 1, 4], loaded)
    assert mx.array_equal(a, b)
    assert os.listdir(tmp_path) == ["p.safetensors"]


@pytest.fixture
def saved(model, tmp_path):
    tokens = prompt(100)
    cache = chunkdelta.make_cache(model, max_tokens=128)
    chunkdelta.prefill(model, tokens, cache)
    path = tmp_path / "p.safetensors"
    chunkdelta.save_prefix(path, tokens, cache, fingerprint="tiny")
    return path


def refused(model, path, message, fingerprint="tiny", **settings):
    cache = chunkdelta.make_cache(model, **{"max_tokens": 128, **settings})
    with pytest.raises(ValueError, match=message):
        chunkdelta.load_prefix(path, cache, fingerprint=fingerprint)
    assert all(c.empty() for c in cache)
    assert all(c.pool.free_pages == c.pool.pages.num_pages for c in cache if hasattr(c, "pool"))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_torn_snapshots_are_refused(model, saved, share):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(share * len(data))])
    refused(model, saved, r"\[load_prefix\] expected a whole")


def test_damaged_snapshots_are_refused(model, saved):
    data = bytearray(saved.read_bytes())
    data[-100] ^= 1
    saved.write_bytes(data)
    refused(model, saved, r"expected arrays as they were written; got a damaged file")


def test_foreign_newer_and_mismatched_snapshots_are_refused(model, saved, tmp_path):
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"x": mx.zeros(3)})
    refused(model, tmp_path / "other.safetensors", r"expected a file of format chunkdelta-prefix")
    arrays, metadata = mx.load(str(saved), return_metadata=True)
    newer = tmp_path / "newer.safetensors"
    mx.save_safetensors(str(newer), arrays, {**metadata, "version": "2"})
    refused(model, newer, r"expected version 1 or older; got version 2")
    refused(model, saved, r"expected a prefix of the model 'big'", fingerprint="big")
    refused(model, saved, r"expected \{.*'kv_format': 'q8_0'", kv_format="q8_0")
    refused(model, saved, r"expected at most 1 new pages", max_tokens=64)


def test_a_killed_writer_leaves_the_old_file_or_the_new(model, tmp_path):
    """SIGKILL at random moments while a child writes the same two prefixes in turn."""
    path = tmp_path / "p.safetensors"
    code = textwrap.dedent(
        f"""
        import mlx.core as mx, chunkdelta
        from chunkdelta.models import embedded
        from chunkdelta.models.mlx_lm import accelerate
        model = accelerate(embedded.build(dtype=mx.float32, vocab_size={VOCAB}, hidden_size=32))
        runs = []
        for n in (40, 120):
            cache = chunkdelta.make_cache(model, max_tokens=4096)
            chunkdelta.prefill(model, list(range(n % {VOCAB})) or [1], cache)
            runs.append((list(range(n % {VOCAB})) or [1], cache))
        print("ready", flush=True)
        while True:
            for tokens, cache in runs:
                chunkdelta.save_prefix({str(path)!r}, tokens, cache)
        """
    )
    rng = random.Random(0)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        deadline = time.time() + 60
        while not path.exists() and time.time() < deadline:
            time.sleep(0.01)
    finally:
        time.sleep(rng.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.wait()
    cache = chunkdelta.make_cache(model, max_tokens=4096)
    assert len(chunkdelta.load_prefix(path, cache)) in (40, 19)
