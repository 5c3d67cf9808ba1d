"""Tensor and pipeline parallel models of mlx-lm over two processes (MLX's ring on this machine)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

WORKER = """
import sys

import mlx.core as mx

from chunkdelta.models.mlx_lm import accelerate, restore
from tests.integration.tiny_models import build, prompt

how = sys.argv[1]
group = mx.distributed.init(strict=True, backend="ring")
assert group.size() == 2
whole = build("qwen3_5", tie_word_embeddings=False, num_hidden_layers=8)
tokens = prompt(50)
want = whole(tokens)
mx.eval(want)
model = build("qwen3_5", tie_word_embeddings=False, num_hidden_layers=8)
if how == "tensor":
    model.shard(group)
else:
    model.model.pipeline(group)
mx.eval(model.parameters())
accelerate(model)
cache = model.make_cache()
parts = []
for start in range(0, 50, 20):
    parts.append(model(tokens[:, start : start + 20], cache=cache))
    mx.eval(parts[-1], [c.state for c in cache])
got = mx.concatenate(parts, axis=1)
error = mx.linalg.norm(got - want, axis=-1) / mx.linalg.norm(want, axis=-1)
print("heads", model.layers[-1].self_attn.num_key_value_heads, "layers", len(cache))
print("error", error.max().item())
"""


def free_ports(n: int) -> list[int]:
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="this MLX has no ring backend")
@pytest.mark.parametrize(
    ("how", "heads", "layers"), [("tensor", 1, 8), ("pipeline", 2, 4)], ids=["tensor", "pipeline"]
)
def test_two_processes_equal_one(how: str, heads: int, layers: int, tmp_path: Path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    root = Path(__file__).parents[2]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, how],
            env={
                **os.environ,
                "MLX_HOSTFILE": str(hosts),
                "MLX_RANK": str(rank),
                "PYTHONPATH": str(root),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [w.communicate(timeout=100) for w in workers]
    finally:
        for w in workers:
            w.kill()
    for out, err in outputs:
        lines = dict(line.split(" ", 1) for line in out.splitlines())
        assert lines.get("heads") == f"{heads} layers {layers}", err
        assert float(lines["error"]) <= 1e-5
