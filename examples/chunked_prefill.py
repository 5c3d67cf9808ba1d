"""A long prompt in chunks, in memory known before it runs.

python examples/chunked_prefill.py
"""

from __future__ import annotations

import chunkdelta
import mlx.core as mx
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate

PROMPT, NEW = 3000, 8

model = accelerate(embedded.build(vocab_size=4096))  # or mlx_lm.load(...)[0]
tokens = [i * i % 4096 for i in range(PROMPT)]

# What it will take, before anything is allocated. Ask for a context that fits.
plan = chunkdelta.plan_memory(model.memory_shape(), PROMPT, max_tokens=NEW)
plan.require(8_000_000_000)
for term, size in plan.rows.items():
    print(f"{term:20s} {size:12,d} bytes")

cache = chunkdelta.make_cache(model, max_tokens=PROMPT + NEW)
mx.reset_peak_memory()
logits = chunkdelta.prefill(
    model,
    tokens,
    cache,
    chunk_size=512,
    progress=lambda done, total: print(f"{done}/{total}", end=" ", flush=True),
)
planned = plan.total_bytes - plan.chunk.workspace_bytes  # the kernels' own scratch is not MLX's
print(f"\nMLX peak {mx.get_peak_memory():,d} of {planned:,d} bytes planned")

continuation = []
for _ in range(NEW):
    token = mx.argmax(logits, axis=-1)
    continuation.append(token.item())
    logits = model(token[None], cache=cache)[:, -1]
print("continues with", continuation)
