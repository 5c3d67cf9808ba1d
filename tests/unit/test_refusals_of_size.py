"""What no machine holds is refused in a sentence, before MLX is asked for it."""

import chunkdelta
import pytest
from chunkdelta.loop import plan_memory
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate
from chunkdelta.models.shapes import named_shape


@pytest.mark.parametrize(
    "make",
    [
        lambda: chunkdelta.KVPages(2**22, 8, 256),
        lambda: chunkdelta.StatePool(2**24, num_v_heads=64, head_v_dim=256, head_k_dim=256),
        lambda: chunkdelta.make_cache(
            accelerate(embedded.build(vocab_size=64)), max_tokens=2**31 - 64, kv_format="f32"
        ),
    ],
    ids=["pages", "states", "cache"],
)
def test_pools_beyond_this_machines_memory(make):
    with pytest.raises(ValueError, match=r"of at most [\d,]+ bytes, this machine's memory; got"):
        make()


def test_contexts_that_no_pool_addresses():
    with pytest.raises(ValueError, match=r"\[plan_memory\] expected a context of at most"):
        plan_memory(named_shape("9b"), 2**40)


def test_prefill_asks_for_a_cache_per_layer():
    model = accelerate(embedded.build(vocab_size=64))
    cache = chunkdelta.make_cache(model, max_tokens=64)
    for wrong, got in (([], "0 of them"), (cache[:2], "2 of them"), (None, "NoneType")):
        with pytest.raises(ValueError, match=rf"\[prefill\] expected a cache per layer.*got {got}"):
            chunkdelta.prefill(model, [1, 2], wrong)


def test_a_prefix_cache_serves_one_model():
    models = [accelerate(embedded.build(vocab_size=64, hidden_size=h)) for h in (32, 64)]
    prefixes = chunkdelta.PrefixCache(10**9)
    first = chunkdelta.prefill_with_prefixes(models[0], [1, 2, 3], prefixes, models[0].make_cache)
    assert first.computed == 3
    with pytest.raises(ValueError, match=r"\[PrefixCache\] expected the model whose states"):
        chunkdelta.prefill_with_prefixes(models[1], [1, 2, 3], prefixes, models[1].make_cache)
