"""Paged attention: Qwen3.5-9B's layer (16 q heads on 4 KV heads of 256), the last 512 queries."""

from __future__ import annotations

import numpy as np

from benchmarks.registry import Case, Inputs, Prepared, Unavailable, registry

HQ, HKV, D, QUERIES = 16, 4, 256, 512
PAGE = 64


def make(keys: int, kv_format: str) -> Inputs:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((QUERIES, HQ, D)).astype(np.float32),
        "k": rng.standard_normal((keys, HKV, D)).astype(np.float32),
        "v": rng.standard_normal((keys, HKV, D)).astype(np.float32),
        "kv_format": kv_format,
    }


# 4 D per visible pair and q head: two products, a multiplication and an addition each.
def flops(keys: int) -> float:
    pairs = QUERIES * (keys - QUERIES) + QUERIES * (QUERIES + 1) / 2
    return 4.0 * D * HQ * pairs


for keys in (4096, 16384, 40960):
    for kv_format in ("bf16", "q8_0"):
        registry.cases.append(
            Case(
                "attention",
                f"{kv_format} pages, {keys} keys",
                lambda keys=keys, kv_format=kv_format: make(keys, kv_format),
                flops=flops(keys),
            )
        )


@registry.implementation("attention", "chunkdelta")
def ours(inputs: Inputs) -> Prepared:
    import chunkdelta
    import mlx.core as mx

    keys = inputs["k"].shape[0]
    num_pages = -(-keys // PAGE)
    pages = chunkdelta.KVPages(
        num_pages,
        HKV,
        D,
        page_size=PAGE,
        k_format=inputs["kv_format"],
        v_format=inputs["kv_format"],
    )
    # Pages in a shuffled order: what a pool looks like after some hours.
    table = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
    slots = (table[:, None] * PAGE + np.arange(PAGE)).ravel()[:keys].astype(np.int32)
    chunkdelta.append_kv(pages, mx.array(inputs["k"]), mx.array(inputs["v"]), slots)
    q = mx.array(inputs["q"])
    mx.eval(q)

    def run():
        o = chunkdelta.paged_attention(
            q, pages, block_table=table[None], seq_lens=[keys], cu_seqlens_q=[0, QUERIES]
        )
        mx.eval(o)
        return o

    return Prepared(run, lambda o: np.array(o))


def _heads_first(inputs: Inputs):
    """[1, H, T, D], as MLX and torch take them."""
    return (np.ascontiguousarray(inputs[name].swapaxes(0, 1)[None]) for name in ("q", "k", "v"))


def _bf16_only(inputs: Inputs, name: str) -> None:
    if inputs["kv_format"] != "bf16":
        raise Unavailable(f"{name} has no {inputs['kv_format']} keys and values")


@registry.implementation("attention", "mx.fast SDPA")
def mlx_core(inputs: Inputs) -> Prepared:
    import mlx.core as mx

    _bf16_only(inputs, "mx.fast")
    q, k, v = (mx.array(x) for x in _heads_first(inputs))
    mx.eval(q, k, v)

    def run():
        o = mx.fast.scaled_dot_product_attention(q, k, v, scale=D**-0.5, mask="causal")
        mx.eval(o)
        return o

    return Prepared(run, lambda o: np.array(o)[0].swapaxes(0, 1))


@registry.implementation("attention", "torch SDPA fp32")
def torch_sdpa(inputs: Inputs) -> Prepared:
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"{error}: pip install torch") from error
    _bf16_only(inputs, "torch")
    torch.set_num_threads(1)
    q, k, v = (torch.from_numpy(x) for x in _heads_first(inputs))
    keys = k.shape[2]
    # torch's "causal" is top-left aligned; a chunk at the end of its context needs a mask.
    mask = torch.arange(keys)[None] <= torch.arange(keys - QUERIES, keys)[:, None]

    def run():
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True
            )

    return Prepared(run, lambda o: o.numpy()[0].swapaxes(0, 1))


@registry.implementation("attention", "ggml FLASH_ATTN_EXT")
def ggml(inputs: Inputs) -> Prepared:
    from benchmarks.peers.ggml import Ggml

    q, k, v = _heads_first(inputs)
    lib = Ggml()
    # ggml is fastest with f16 keys and values, so it stands beside our bf16 with those.
    kind = {"bf16": "f16", "q8_0": "q8_0"}[inputs["kv_format"]]
    run, out = lib.attention(q, k, v, kind)
    return Prepared(run, lambda _: out())
