"""The default model of `chunkdelta prefill`, every op of every layer through its Metal launch plan.

The mlx-lm layers, caches and the prefill loop are the real ones; only the ops are replaced, by the plans
that a Mac would encode, executed on the real .metal sources.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from chunkdelta import _ext, make_cache, prefill
from chunkdelta.models import embedded
from chunkdelta.models.mlx_lm import accelerate

from tests.metal_host import execute_plan

plans = _ext.plans
NAMES = {mx.float32: "float32", mx.bfloat16: "bfloat16"}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
FORMATS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "q8_0": np.uint8}


def host(x: mx.array) -> np.ndarray:
    if x.dtype == mx.bfloat16:
        return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(x)


def device(x: np.ndarray) -> mx.array:
    if x.dtype == ml_dtypes.bfloat16:
        return mx.array(x.view(np.uint16)).view(mx.bfloat16)
    return mx.array(x)


class MetalOps:
    """The ops that the adapters call, as plans; counts the kernels that ran."""

    def __init__(self, mode: str):
        self.mode = mode
        self.kernels: dict[str, int] = {}
        self.slabs: dict[int, list[np.ndarray]] = {}  # pools: the pages as the kernels left them

    def run(self, plan: Any, arrays: dict[str, np.ndarray], outputs: dict[str, np.ndarray]):
        named = {b.role for launch in plan.launches for b in launch.buffers}
        arrays = {role: x for role, x in {**arrays, **outputs}.items() if role in named}
        for launch in plan.launches:
            self.kernels[launch.kernel] = self.kernels.get(launch.kernel, 0) + 1
        wanted = [role for role in outputs if role in named]
        return execute_plan(plan, arrays, outputs=wanted, mode=self.mode).arrays

    def causal_conv1d(self, x, weight, *, initial_state=None, cu_seqlens=None, activation=None):
        batch, tokens, channels = x.shape
        width, name = weight.shape[1], NAMES[x.dtype]
        bounds = [0, tokens] if cu_seqlens is None else list(cu_seqlens)
        assert batch == 1
        arrays = {"x": host(x), "weight": host(weight)}
        if initial_state is not None:
            arrays["initial_state"] = host(initial_state)
        plan = plans.causal_conv1d(
            name,
            channels,
            width,
            bounds,
            initial_state=initial_state is not None,
            silu=activation == "silu",
        )
        outputs = {
            "y": np.empty(x.shape, DTYPES[name]),
            "state": np.empty((1, width - 1, channels), DTYPES[name]),
        }
        done = self.run(plan, arrays, outputs)
        return device(done["y"]), device(done["state"])

    def gated_delta_gates(self, a, b, A_log, dt_bias, *, allow_neg_eigval=False):
        rows, heads = a.size // a.shape[-1], a.shape[-1]
        plan = plans.gated_delta_gates(
            NAMES[a.dtype], rows, heads, allow_neg_eigval=allow_neg_eigval
        )
        arrays = {"a": host(a), "b": host(b)}
        arrays |= {
            "A_log": host(A_log.astype(mx.float32)),
            "dt_bias": host(dt_bias.astype(mx.float32)),
        }
        outputs = {name: np.empty(a.shape, np.float32) for name in ("g", "beta")}
        done = self.run(plan, arrays, outputs)
        return device(done["g"]), device(done["beta"])

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, *, initial_state=None, cu_seqlens=None, qk_l2norm=False
    ):
        batch, tokens, num_k_heads, head_k_dim = q.shape
        num_v_heads, head_v_dim = v.shape[2:]
        assert batch == 1
        assert cu_seqlens is None
        plan = plans.gated_delta(
            dtype=NAMES[q.dtype],
            tokens=tokens,
            num_k_heads=num_k_heads,
            num_v_heads=num_v_heads,
            head_k_dim=head_k_dim,
            head_v_dim=head_v_dim,
            scale=head_k_dim**-0.5,
            qk_l2norm=qk_l2norm,
            initial_state=initial_state is not None,
        )
        names = ("q", "k", "v", "g", "beta")
        arrays = {n: host(x) for n, x in zip(names, (q, k, v, g, beta), strict=True)}
        if initial_state is not None:
            arrays["initial_state"] = host(initial_state)
        outputs = {
            "o": np.empty(v.shape, DTYPES[NAMES[v.dtype]]),
            "state": np.empty((1, num_v_heads, head_v_dim, head_k_dim), np.float32),
        }
        done = self.run(plan, arrays, outputs)
        return device(done["o"]), device(done["state"])

    def gated_delta_step(self, q, k, v, g, beta, *, initial_state=None, qk_l2norm=False):
        out, state = self.chunk_gated_delta_rule(
            *(x[:, None] for x in (q, k, v, g, beta)),
            initial_state=initial_state,
            qk_l2norm=qk_l2norm,
        )
        return out[:, 0], state

    def append_kv(self, pages, k, v, slots):
        mine = self.slabs.setdefault(id(pages), [host(a) for a in pages.arrays])
        where = slots.tolist()
        for i, (x, fmt) in enumerate(((k, pages.k_format), (v, pages.v_format))):
            plan = plans.append_kv(
                NAMES[x.dtype],
                fmt,
                where,
                num_kv_heads=pages.num_kv_heads,
                head_dim=pages.head_dim,
                page_size=pages.page_size,
                num_pages=pages.num_pages,
            )
            stored = mine[i].view(np.uint8)
            done = self.run(plan, {"x": host(x), "pages": stored}, {})
            mine[i] = done["pages"].view(mine[i].dtype)
        return pages

    def attention_metadata(self, tables, counts):
        width = max(len(t.pages) for t in tables)
        table = np.full((len(tables), width), -1, np.int32)
        for n, t in enumerate(tables):
            table[n, : len(t.pages)] = t.pages
        return table, [t.length for t in tables], np.cumsum([0, *counts])

    def paged_attention(self, q, pages, *, metadata, scale):
        table, lengths, bounds = metadata
        plan = plans.paged_attention(
            NAMES[q.dtype],
            q.shape[1],
            pages.num_kv_heads,
            pages.head_dim,
            pages.page_size,
            pages.k_format,
            pages.v_format,
            [pages.num_pages],
            table,
            lengths,
            bounds,
            scale=scale,
        )
        k, v = self.slabs[id(pages)]
        arrays = {"q": host(q), "k_pages": k, "v_pages": v}
        done = self.run(plan, arrays, {"o": np.empty(q.shape, DTYPES[NAMES[q.dtype]])})
        return device(done["o"])


@pytest.fixture
def metal(monkeypatch, request):
    ops = MetalOps(request.param)
    for name in (
        "causal_conv1d",
        "gated_delta_gates",
        "chunk_gated_delta_rule",
        "gated_delta_step",
    ):
        monkeypatch.setattr(f"chunkdelta.models.steps.{name}", getattr(ops, name))
    for name in ("append_kv", "paged_attention"):
        monkeypatch.setattr(f"chunkdelta.cache.kv_cache.{name}", getattr(ops, name))
    monkeypatch.setattr("chunkdelta.cache.kv_cache.batch_metadata", ops.attention_metadata)
    return ops


def run(model: Any, tokens: list[int], kv_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the prompt's last token and of one more: the chunks and the decode kernels."""
    cache = make_cache(model, max_tokens=128, kv_format=kv_format)
    last = prefill(model, tokens, cache, chunk_size=32)
    following = prefill(model, [7], cache)
    return tuple(np.array(x.astype(mx.float32), np.float64) for x in (last, following))


@pytest.mark.parametrize(
    ("metal", "dtype", "kv_format"),
    [
        pytest.param("check", mx.float32, "f32", id="check-f32"),
        pytest.param("fast", mx.bfloat16, "bf16", id="fast-bf16"),
        pytest.param("fast", mx.bfloat16, "q8_0", id="fast-q8_0"),
    ],
    indirect=["metal"],
)
def test_default_model_through_metal_plans(metal, dtype, kv_format, monkeypatch):
    model = accelerate(embedded.build(dtype=dtype, vocab_size=256))
    tokens = np.random.default_rng(0).integers(0, 256, 70).tolist()
    ours = run(model, tokens, kv_format)
    names = " ".join(metal.kernels)
    kernels = (
        "prep",
        "scan",
        "sequential",
        "gates",
        "causal_conv1d",
        "append_kv",
        "flash",
        "decode",
    )
    for kernel in kernels:
        assert kernel in names, f"no {kernel} kernel among {names}"

    monkeypatch.undo()
    on_cpu = run(model, tokens, kv_format)
    if dtype == mx.float32:
        for a, b in zip(ours, on_cpu, strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
        return
    # bf16: no further from the float32 model than twice the CPU path is.
    exact_model = accelerate(embedded.build(dtype=mx.float32, vocab_size=256))
    exact_model.load_weights([(name, w.astype(mx.float32)) for name, w in flat(model)], strict=True)
    exact = run(exact_model, tokens, "f32")
    for a, b, c in zip(ours, on_cpu, exact, strict=True):
        assert np.linalg.norm(a - c) <= 2 * np.linalg.norm(b - c)


def flat(model):
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())
