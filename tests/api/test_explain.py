"""explain() tells the launch plan; what it names is what the plan holds."""

import mlx.core as mx
import pytest
from chunkdelta import explain

GATED_DELTA = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}
ATTENTION = {"num_q_heads": 16, "num_kv_heads": 4, "head_dim": 256}

CALLS = [
    pytest.param("chunk_gated_delta_rule", {"tokens": 512, **GATED_DELTA}, id="gated-delta"),
    pytest.param("gated_delta_step", GATED_DELTA, id="step"),
    pytest.param("paged_attention", {"queries": 512, "keys": 4096, **ATTENTION}, id="prefill"),
    pytest.param("paged_attention", {"queries": [1, 1], "keys": [70, 9], **ATTENTION}, id="decode"),
    pytest.param(
        "paged_attention",
        {"queries": 64, "keys": 4096, "kv_format": "q8_0/turbo4", **ATTENTION},
        id="quantised",
    ),
    pytest.param(
        "append_kv",
        {"tokens": 9, "num_kv_heads": 4, "head_dim": 256, "kv_format": "q4_0"},
        id="append",
    ),
    pytest.param("causal_conv1d", {"tokens": 512, "channels": 8192, "width": 4}, id="conv"),
    pytest.param("rope", {"tokens": 512, "heads": 16, "head_dim": 256, "dims": 64}, id="rope"),
]


@pytest.mark.parametrize("backend", ["cpu", "metal"])
@pytest.mark.parametrize(("op", "call"), CALLS)
def test_every_op_explains_itself(op, call, backend):
    how = explain(op, backend=backend, **call)
    assert (how.op, how.backend) == (op, backend)
    assert how.kernels
    assert how.why
    assert how.kernels[0][0] in str(how)
    if backend == "metal":
        assert how.scratch_bytes >= 0


def test_the_default_backend_is_that_of_the_default_device():
    expected = "metal" if mx.default_device().type == mx.gpu else "cpu"
    assert explain("rope", tokens=1, heads=1, head_dim=64).backend == expected


def test_what_a_call_takes_follows_its_shape():
    def kernels(**call):
        return {name for name, _ in explain(backend="metal", **call).kernels}

    long = kernels(op="chunk_gated_delta_rule", tokens=512, **GATED_DELTA)
    short = kernels(op="chunk_gated_delta_rule", tokens=3, **GATED_DELTA)
    assert any("prep" in name for name in long)
    assert any("sequential" in name for name in short)
    assert not any(
        "gather" in n for n in kernels(op="paged_attention", queries=64, keys=99, **ATTENTION)
    )
    quantised = kernels(op="paged_attention", queries=64, keys=99, kv_format="q8_0", **ATTENTION)
    assert any("gather" in name for name in quantised)


def test_a_long_context_is_many_bounded_launches():
    how = explain("paged_attention", backend="metal", queries=512, keys=131072, **ATTENTION)
    assert dict(how.kernels)["flash_bfloat16_d256_r64_bk32_4x4"] > 10
    assert how.scratch_bytes < 64 << 20


def test_refusals():
    with pytest.raises(ValueError, match=r"\[explain\] expected an op in .*; got 'softmax'"):
        explain("softmax")
    with pytest.raises(ValueError, match=r"expected backend cpu or metal; got 'cuda'"):
        explain("rope", backend="cuda", tokens=1, heads=1, head_dim=64)
    with pytest.raises(ValueError, match="300"):
        explain("chunk_gated_delta_rule", tokens=5, **{**GATED_DELTA, "head_k_dim": 300})
