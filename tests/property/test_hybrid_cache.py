"""The hybrid cache as a state machine, at every kind of page format."""

import mlx.core as mx
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate
from chunkdelta.testing.cache_machine import HybridCacheMachine
from hypothesis import settings

VOCAB = 97


class Machine(HybridCacheMachine):
    model = accelerate(embedded.build(dtype=mx.float32, vocab_size=VOCAB, hidden_size=32))
    vocab = VOCAB


TestHybridCache = Machine.TestCase
TestHybridCache.settings = settings(max_examples=6, stateful_step_count=15, deadline=None)
