"""mlx-lm's own generation loop on an accelerated model.

python examples/mlx_lm_generate.py                      # a tiny model with random weights
python examples/mlx_lm_generate.py PATH_OR_REPO "text"  # any supported mlx-lm model
"""

from __future__ import annotations

import sys

import chunkdelta
import mlx.core as mx
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate
from mlx_lm import load, stream_generate
from mlx_lm.generate import generate_step


def generate_text(path: str, prompt: str) -> None:
    model, tokenizer = load(path)[:2]
    accelerate(model)
    for response in stream_generate(model, tokenizer, prompt, max_tokens=100):
        print(response.text, end="", flush=True)
    print(f"\n{response.prompt_tps:.0f} tokens/s prompt, {response.generation_tps:.0f} generated")


def generate_ids() -> None:
    model = accelerate(embedded.build(vocab_size=512))
    prompt = mx.random.randint(0, 512, (300,), key=mx.random.key(0))

    # Growing caches, which mlx-lm makes itself.
    grown = [token for token, _ in generate_step(prompt, model, max_tokens=8)]

    # All KV memory allocated before the run.
    cache = chunkdelta.make_cache(model, max_tokens=300 + 8)
    fixed = [t for t, _ in generate_step(prompt, model, max_tokens=8, prompt_cache=cache)]
    pools = [c.pool for c in cache if hasattr(c, "pool")]
    print("tokens", fixed)
    print("same with growing caches", grown == fixed)
    print("KV bytes", sum(pool.nbytes for pool in pools))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        generate_text(sys.argv[1], " ".join(sys.argv[2:]) or "Hello")
    else:
        generate_ids()
