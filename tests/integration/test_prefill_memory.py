"""Measured memory against the plan, through the loop and real layers."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest
from chunkdelta.loop.memory import plan_memory
from chunkdelta.measure import run_prefill
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate, make_cache

SMALL = {"vocab_size": 4096, "hidden_size": 128}

MODELS = [
    pytest.param(SMALL, mx.float32, 700, 512, None, id="f32"),
    pytest.param(SMALL, mx.bfloat16, 700, 512, "q8_0", id="bf16-q8_0"),
    pytest.param(SMALL, mx.float32, 40, 1, None, id="token-by-token"),
    pytest.param(SMALL, mx.float32, 130, 64, None, id="chunks-of-64"),
    pytest.param(
        SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                 "shared_expert_intermediate_size": 64, "model_type": "qwen3_5_moe_text"},
        mx.float32, 600, 256, None, id="mixture-of-experts",
    ),
    pytest.param(SMALL | {"intermediate_size": 2048}, mx.float32, 200, 128, None, id="wide-mlp"),
    pytest.param(
        SMALL | {"num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 8},
        mx.float32, 600, 256, None, id="more-heads-and-layers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "dtype", "tokens", "chunk_size", "kv_format"), MODELS)
def test_measured_is_within_the_plan(changes, dtype, tokens, chunk_size, kv_format):
    model = accelerate(embedded.build(dtype=dtype, **changes))
    prompt = [i * 7 % 4096 for i in range(tokens)]
    mx.clear_cache()
    base = mx.get_active_memory()  # other tests' arrays, if any are alive
    weights = model.memory_shape().weight_bytes
    run = run_prefill(model, prompt, chunk_size=chunk_size, max_tokens=2, kv_format=kv_format)
    measured = run.peak_bytes - (base - weights)
    assert measured <= run.plan.total_bytes
    assert len(run.samples) == -(-tokens // chunk_size)
    assert run.samples[-1].done == tokens
    assert len(run.continuation) == 2


def test_pools_and_states_take_what_is_planned():
    model = accelerate(embedded.build(dtype=mx.bfloat16, **SMALL))
    plan = plan_memory(model.memory_shape(), 1000, max_tokens=25, kv_format="q8_0/bf16")
    mx.synchronize()
    before = mx.get_active_memory()
    cache = make_cache(model, max_tokens=1025, kv_format="q8_0/bf16")
    assert mx.get_active_memory() - before == plan.kv_bytes
    assert plan.weight_bytes == sum(v.nbytes for v in _leaves(model))
    del cache


def _leaves(model):
    from mlx.utils import tree_flatten

    return [value for _, value in tree_flatten(model.parameters())]


def test_transients_are_flat_at_9b_shapes():
    """4k to 131k at the attention and gated-delta shapes of Qwen3.5-9B: the same bytes."""
    rows = []
    for context in (4096, 131072):
        command = [sys.executable, "-m", "benchmarks.memory_ladder", "--child"]
        command += ["--contexts", str(context), "--chunk-size", "128"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
    for row in rows:
        assert row["measured_peak_bytes"] <= row["planned_peak_bytes"]
        assert row["planned_peak_bytes"] <= 1.10 * row["measured_peak_bytes"]
        assert row["resident_bytes"] <= row["planned_peak_bytes"] + 64_000_000
    first, last = rows
    grown = last["measured_transient_bytes"] - first["measured_transient_bytes"]
    assert grown < 64 * (last["context"] - first["context"])
    assert last["measured_transient_bytes"] < last["unfused_scores_bytes"] / 4


def test_resident_memory_of_the_default_model():
    """From before the weights to the last chunk, the process takes the plan and little more."""
    code = """
import json
from benchmarks.resident import reset_high_water, resident_bytes, resident_high_water
from chunkdelta.measure import Job, run_prefill
from chunkdelta.models.mlx_lm import accelerate
job = Job()
prompt = job.tokenize(1024)
idle = resident_bytes()
reset_high_water()
run = run_prefill(accelerate(job.load()), prompt)
plan = run.plan.total_bytes
print(json.dumps([run.peak_bytes, plan, resident_high_water() - idle, job.shape.weight_bytes,
                  run.plan.weight_bytes]))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    measured, planned, resident, foreseen, weights = json.loads(done.stdout)
    assert measured <= planned <= 1.10 * measured
    assert resident <= planned + 64_000_000
    # Before it is made, the model is planned without its norms.
    assert foreseen <= weights <= foreseen + 10_000
