"""Memory of one chunk at growing contexts, against the plan: flat, and below it.

A gated-delta layer and an attention layer of Qwen3.5-9B (16 q heads on 4 KV heads of 256; 16 key and
32 value heads of 128) run the last chunk of a context whose cache is filled directly. The residual
stream and the MLP are narrow, so that what is measured is the mixers' memory.

    python -m benchmarks.memory_ladder                       # 4k, 16k, 64k, 131k; a process each
    python -m benchmarks.memory_ladder --contexts 4096 16384 --chunk-size 128 --json
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import date
from typing import Any

CONTEXTS = (4096, 16384, 65536, 131072)
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "vocab_size": 1024,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def fill(cache: Any, tokens: int, *, seed: int = 0) -> None:
    """Give an empty paged cache ``tokens`` random keys and values, as if they had been prefilled."""
    import mlx.core as mx
    from chunkdelta import append_kv
    from chunkdelta.cache.kv_cache import _Row

    pool = cache.pool
    cache._rows = [_Row.new(pool)]
    block = 4096  # drawn once and repeated: memory is what is measured
    shape = (2, block, pool.pages.num_kv_heads, pool.pages.head_dim)
    k, v = mx.random.normal(shape, mx.bfloat16, key=mx.random.key(seed))
    while tokens:
        n = min(tokens, block)
        append_kv(pool.pages, k[:n], v[:n], pool.extend([(cache._rows[0].table, n)]))
        mx.eval(pool.pages.arrays)
        tokens -= n


def measure(
    context: int, *, chunk_size: int, kv_format: str, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Run the last chunk of ``context`` tokens; planned and measured bytes."""
    import mlx.core as mx
    from chunkdelta import _ext
    from chunkdelta.loop.memory import plan_memory
    from chunkdelta.loop.prefill import prefill
    from chunkdelta.models import embedded
    from chunkdelta.models.mlx_lm import accelerate, make_cache
    from mlx_lm.models import qwen3_5  # noqa: F401  (imports count as idle memory)

    from benchmarks.resident import reset_high_water, resident_bytes, resident_high_water

    idle = resident_bytes()
    model = accelerate(embedded.build(dtype=getattr(mx, dtype), **SHAPE))
    cache = make_cache(model, max_tokens=context, kv_format=kv_format)
    plan = plan_memory(model.memory_shape(), context, chunk_size=chunk_size, kv_format=kv_format)
    for layer in cache:
        if hasattr(layer, "pool"):
            fill(layer, context - chunk_size)
    mx.clear_cache()
    _ext.release_workspace()
    reset_high_water()
    mx.reset_peak_memory()
    _ext.reset_workspace_peak()
    prompt = [i % SHAPE["vocab_size"] for i in range(chunk_size)]
    prefill(model, prompt, cache, chunk_size=chunk_size)
    measured = mx.get_peak_memory() + _ext.workspace_peak_bytes()
    held = plan.weight_bytes + plan.kv_bytes + plan.state_bytes
    return {
        "context": context,
        "chunk_size": chunk_size,
        "planned_peak_bytes": plan.total_bytes,
        "measured_peak_bytes": measured,
        "planned_transient_bytes": plan.total_bytes - held,
        "measured_transient_bytes": measured - held,
        "resident_bytes": resident_high_water() - idle,
        "unfused_scores_bytes": SHAPE["num_attention_heads"] * chunk_size * context * 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--kv-format", default="bf16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        row = measure(args.contexts[0], chunk_size=args.chunk_size, kv_format=args.kv_format)
        print(json.dumps(row))
        return
    rows = []
    for context in args.contexts:
        command = [sys.executable, "-m", "benchmarks.memory_ladder", "--child"]
        command += ["--contexts", str(context), "--chunk-size", str(args.chunk_size)]
        command += ["--kv-format", args.kv_format]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{platform.machine()}, {platform.system()}, {date.today()}, kv {args.kv_format}")
    print(
        "context  chunk  planned MB  measured MB  ratio  transient MB  resident MB  unfused scores MB"
    )
    for r in rows:
        print(
            f"{r['context']:7d} {r['chunk_size']:6d} {r['planned_peak_bytes'] / 1e6:11.1f}"
            f" {r['measured_peak_bytes'] / 1e6:12.1f}"
            f" {r['planned_peak_bytes'] / r['measured_peak_bytes']:6.3f}"
            f" {r['measured_transient_bytes'] / 1e6:13.1f} {r['resident_bytes'] / 1e6:12.1f}"
            f" {r['unfused_scores_bytes'] / 1e6:18.1f}"
        )
    first, last = rows[0], rows[-1]
    if last["context"] > first["context"]:
        grown = last["measured_transient_bytes"] - first["measured_transient_bytes"]
        print(
            f"slope {grown / (last['context'] - first['context']):.2f} bytes per token of context"
        )


if __name__ == "__main__":
    main()
