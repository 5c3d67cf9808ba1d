"""Gated delta rule: Qwen3.5-9B's layer (16 key heads, 32 value heads, Dk = Dv = 128), one sequence."""

from __future__ import annotations

import numpy as np

from benchmarks.registry import Case, Inputs, Prepared, Unavailable, registry

HK, HV, D = 16, 32, 128


def make(tokens: int, dtype: str = "float32") -> Inputs:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, tokens, HK, D))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    f32 = np.float32
    return {
        "q": q.astype(f32),
        "k": k.astype(f32),
        "v": rng.standard_normal((1, tokens, HV, D)).astype(f32),
        "g": -rng.uniform(1e-4, 0.1, (1, tokens, HV)).astype(f32),
        "beta": rng.uniform(0, 1, (1, tokens, HV)).astype(f32),
        "state": rng.standard_normal((1, HV, D, D)).astype(f32),
        "dtype": dtype,
    }


# The recurrence reads and writes each state entry: 7 operations a token, value head and entry.
def flops(tokens: int) -> float:
    return 7.0 * tokens * HV * D * D


for dtype in ("float32", "bfloat16"):
    for tokens in (512, 2048):
        registry.cases.append(
            Case(
                "gated_delta",
                f"{dtype} T={tokens}",
                lambda tokens=tokens, dtype=dtype: make(tokens, dtype),
                flops=flops(tokens),
            )
        )
registry.cases.append(
    Case("gated_delta_step", "float32 T=1", lambda: make(1), bytes=2 * HV * D * D * 4)
)


def _mlx(inputs: Inputs):
    import mlx.core as mx

    dtype = getattr(mx, inputs["dtype"])
    arrays = {
        name: mx.array(x).astype(dtype if name in "qkv" else mx.float32)
        for name, x in inputs.items()
        if name != "dtype"
    }
    mx.eval(arrays)
    return mx, arrays


def _fetch(out) -> np.ndarray:
    import mlx.core as mx

    return np.array(out.astype(mx.float32))


@registry.implementation("gated_delta", "chunkdelta")
def ours(inputs: Inputs) -> Prepared:
    import chunkdelta

    mx, a = _mlx(inputs)

    def run():
        o, state = chunkdelta.chunk_gated_delta_rule(
            a["q"], a["k"], a["v"], a["g"], a["beta"], initial_state=a["state"]
        )
        mx.eval(o, state)
        return o

    return Prepared(run, _fetch)


@registry.implementation("gated_delta_step", "chunkdelta")
def ours_step(inputs: Inputs) -> Prepared:
    import chunkdelta

    mx, a = _mlx(inputs)
    token = [a[name][:, 0] for name in ("q", "k", "v", "g", "beta")]
    mx.eval(token)
    pool = chunkdelta.StatePool(1, HV, D, D)
    pool.write(0, a["state"][0])

    def run():
        # Eight steps a call: one would be timed with the graph's own overhead.
        for _ in range(8):
            o, _ = chunkdelta.gated_delta_step(*token, state_pool=pool, state_indices=[0])
        mx.eval(o)
        return o

    run.units = 8
    return Prepared(run, _fetch)


@registry.implementation("gated_delta", "mx.fast.gated_delta_update")
def mlx_core(inputs: Inputs) -> Prepared:
    mx, a = _mlx(inputs)
    q, gamma = a["q"] * D**-0.5, mx.exp(a["g"])
    mx.eval(q, gamma)

    def run():
        o, state = mx.fast.gated_delta_update(q, a["k"], a["v"], gamma, a["beta"], a["state"])
        mx.eval(o, state)
        return o

    return Prepared(run, _fetch)


@registry.implementation("gated_delta", "mlx-lm")
def mlx_lm(inputs: Inputs) -> Prepared:
    from mlx_lm.models.gated_delta import gated_delta_ops

    mx, a = _mlx(inputs)
    q, gamma = a["q"] * D**-0.5, mx.exp(a["g"])
    mx.eval(q, gamma)

    def run():
        o, state = gated_delta_ops(q, a["k"], a["v"], gamma, a["beta"], a["state"])
        mx.eval(o, state)
        return o

    return Prepared(run, _fetch)


@registry.implementation("gated_delta", "transformers torch_chunk")
def transformers_chunk(inputs: Inputs) -> Prepared:
    try:
        import torch
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    except ImportError as error:
        raise Unavailable(f"{error}: pip install torch transformers") from error
    torch.set_num_threads(1)
    dtype = getattr(torch, inputs["dtype"])
    t = {
        name: torch.from_numpy(x).to(dtype if name in "qkv" else torch.float32)
        for name, x in inputs.items()
        if name != "dtype"
    }
    q, k = (t[name].repeat_interleave(HV // HK, 2) for name in "qk")
    state = t["state"].transpose(-1, -2).contiguous()

    def run():
        with torch.inference_mode():
            return torch_chunk_gated_delta_rule(
                q, k, t["v"], t["g"], t["beta"], initial_state=state, output_final_state=True
            )[0]

    return Prepared(run, lambda o: o.float().numpy())


@registry.implementation("gated_delta", "ggml")
def ggml(inputs: Inputs) -> Prepared:
    from benchmarks.peers.ggml import Ggml

    if inputs["dtype"] != "float32":
        raise Unavailable("ggml's op takes float32 only")
    lib = Ggml()
    # ggml interleaves grouped heads (value head hv reads key head hv % Hk): reorder ours to match.
    order = np.arange(HV).reshape(HK, HV // HK).T.ravel()
    v, g, beta = (np.ascontiguousarray(inputs[name][:, :, order]) for name in ("v", "g", "beta"))
    state = np.ascontiguousarray(inputs["state"][:, order])
    run, out = lib.gated_delta(inputs["q"], inputs["k"], v, g, beta, state)
    inverse = np.argsort(order)
    return Prepared(run, lambda _: out()[:, :, inverse])
