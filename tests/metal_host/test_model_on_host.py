"""The embedded model of ``chunkdelta prefill`` through the Metal kernels: every op of every layer."""

import chunkdelta
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta.testing.compare import relative_error

from tests.metal_host.ops_on_host import ops_on_host

pytest.importorskip("mlx_lm", reason="the embedded model is built on mlx-lm (extra `lm`)")


def logits_of(dtype, kv_format=None, *, steps=2):
    """Logits after a prompt of two chunks and after each of some decoded tokens."""
    from chunkdelta.models.embedded import build
    from chunkdelta.models.mlx_lm import accelerate

    model = accelerate(build(vocab_size=512, dtype=dtype))
    prompt = mx.array(np.random.default_rng(0).integers(0, 512, 45))
    formats = {} if kv_format is None else {"kv_format": kv_format}
    cache = chunkdelta.make_cache(model, max_tokens=64, page_size=16, **formats)
    logits = [chunkdelta.prefill(model, prompt, cache, chunk_size=30, logits="last")]
    for token in (7, 300)[:steps]:
        logits.append(model(mx.array([[token]]), cache=cache)[:, -1])
    return np.concatenate([np.array(x.astype(mx.float32)).reshape(1, -1) for x in logits])


@pytest.mark.parametrize("kv_format", [None, "q8_0"])
def test_logits_are_those_of_the_cpu(kv_format):
    on_cpu = logits_of(mx.float32, kv_format)
    with ops_on_host() as ran:
        on_host = logits_of(mx.float32, kv_format)
    # Both are float32 with other orders of summation: the order of MLX's own products differs too
    # between one call and many.
    assert relative_error(on_host, on_cpu) <= 5e-6
    kernels = " ".join(ran)
    names = ("causal_conv1d", "gates", "prep", "scan", "sequential", "append_kv", "flash", "decode")
    for op in names:
        assert op in kernels, (op, ran)


def test_16_bit_logits_are_no_further_off_than_the_cpus():
    exact = logits_of(mx.float32)
    on_cpu = relative_error(logits_of(mx.bfloat16), exact)
    with ops_on_host():
        on_host = relative_error(logits_of(mx.bfloat16), exact)
    assert on_host <= 1.5 * on_cpu
