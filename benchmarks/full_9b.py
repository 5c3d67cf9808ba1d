"""The last tokens of a long context through a whole 9B-shaped 4-bit model, peak against plan.

All 32 layers of Qwen3.5-9B with random 4-bit weights (about 5.6 GB with float32 scales: MLX's CPU
multiplies quantised weights seven times faster by float32 activations than by bfloat16). The cache
is filled directly, then the last tokens are prefilled and one is decoded.

    python -m benchmarks.full_9b                             # 131,072 tokens, the last 128 run
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from typing import Any


def build(seed: int = 0) -> Any:
    """Qwen3.5-9B with random 4-bit weights, drawn as they are stored: nothing wider ever exists."""
    import mlx.core as mx
    import mlx.nn as nn
    from chunkdelta.models import embedded
    from chunkdelta.models.shapes import NAMED_CONFIGS
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_5

    config = embedded.CONFIG | NAMED_CONFIGS["qwen3.5-9b"]
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=64, bits=4)  # lazy: shapes only
    key = mx.random.key(seed)
    for name, value in tree_flatten(model.parameters()):
        key, own = mx.random.split(key)
        if value.dtype == mx.uint32:
            high, low = mx.random.randint(0, 1 << 16, (2, *value.shape), mx.uint32, key=own)
            drawn = (high << 16) | low
            del high, low
        elif name.endswith((".scales", ".biases")):
            # Weights (code - 7.5) * scale: mean 0, variance near 1 / inputs.
            inputs = value.shape[-1] * 64
            scale = (21.25 * inputs) ** -0.5
            drawn = mx.full(value.shape, scale if name.endswith(".scales") else -7.5 * scale)
        elif value.ndim > 1:
            drawn = mx.random.uniform(-0.5, 0.5, value.shape, key=own)
        else:
            drawn = value.astype(mx.float32)
        mx.eval(drawn)
        model.load_weights([(name, drawn)], strict=False)
    model.eval()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=128, help="tokens that are computed")
    parser.add_argument("--chunk-size", type=int, default=128)
    parser.add_argument("--kv-format", default="bf16")
    parser.add_argument("--decode", type=int, default=1)
    args = parser.parse_args()

    import mlx.core as mx
    from chunkdelta import _ext
    from chunkdelta.loop.memory import plan_memory
    from chunkdelta.loop.prefill import prefill
    from chunkdelta.measure import decode
    from chunkdelta.models.mlx_lm import accelerate, make_cache

    from benchmarks.memory_ladder import fill
    from benchmarks.resident import reset_high_water, resident_bytes, resident_high_water

    idle = resident_bytes()
    start = time.perf_counter()
    model = accelerate(build())
    plan = plan_memory(
        model.memory_shape(),
        args.context,
        max_tokens=args.decode,
        chunk_size=args.chunk_size,
        kv_format=args.kv_format,
    )
    cache = make_cache(model, max_tokens=args.context + args.decode, kv_format=args.kv_format)
    for index, layer in enumerate(cache):
        if hasattr(layer, "pool"):
            fill(layer, args.context - args.tokens, seed=index)
    mx.clear_cache()
    _ext.release_workspace()
    built = time.perf_counter() - start
    reset_high_water()
    mx.reset_peak_memory()
    _ext.reset_workspace_peak()
    start = time.perf_counter()
    logits = prefill(
        model, list(range(1000, 1000 + args.tokens)), cache, chunk_size=args.chunk_size
    )
    seconds = time.perf_counter() - start
    measured = mx.get_peak_memory() + _ext.workspace_peak_bytes()
    print(
        json.dumps(
            {
                "date": str(date.today()),
                "machine": f"{platform.system()} {platform.machine()}",
                "context": args.context,
                "tokens": args.tokens,
                "chunk_size": args.chunk_size,
                "kv_format": args.kv_format,
                "built_s": round(built, 1),
                "prefill_s": round(seconds, 1),
                "finite": bool(mx.all(mx.isfinite(logits)).item()),
                "planned": plan.rows | {"total": plan.total_bytes},
                "measured_peak_bytes": measured,
                "resident_bytes": resident_high_water() - idle,
                "ratio": round(plan.total_bytes / measured, 4),
                "decoded": decode(model, logits, cache, args.decode),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
