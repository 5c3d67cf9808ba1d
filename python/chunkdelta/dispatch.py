"""Which kernel a call takes, and why: the launch plan in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from chunkdelta import _ext
from chunkdelta.cache.pages import parse_kv_format, stored_head_dim
from chunkdelta.ops import gated_delta

Backend = Literal["cpu", "metal"]


@dataclass(frozen=True)
class Explanation:
    """How one call is computed.

    Attributes:
        op: name of the op.
        backend: ``"cpu"`` or ``"metal"``.
        kernels: kernel names and how often each is launched, in order of their first launch.
        why: one sentence: what was chosen, and for what reason.
        scratch_bytes: memory that the call needs beyond its inputs and outputs; on the CPU the
            process-wide workspace that it uses, None where that depends on more than shapes.
    """

    op: str
    backend: Backend
    kernels: tuple[tuple[str, int], ...]
    why: str
    scratch_bytes: int | None

    def __str__(self) -> str:
        kernels = ", ".join(f"{name} x {n}" if n > 1 else name for name, n in self.kernels)
        scratch = "" if self.scratch_bytes is None else f"; scratch {self.scratch_bytes:,} bytes"
        return f"{self.op} on {self.backend}: {kernels}{scratch}\n  {self.why}"


def explain(op: str, *, backend: Backend | None = None, **call: Any) -> Explanation:
    """Say which kernel, tile and segment a call takes and why, without running it.

    No op falls back silently: what a backend cannot do raises where the op is called, and so does
    asking here. The answer for ``"metal"`` is the launch plan itself, so it can be had on any machine.

    Args:
        op: ``"chunk_gated_delta_rule"``, ``"gated_delta_step"``, ``"gated_delta_gates"``,
            ``"paged_attention"``, ``"append_kv"``, ``"causal_conv1d"`` or ``"rope"``.
        backend: ``"cpu"`` or ``"metal"``. Default: that of MLX's default device.
        call: shapes and options of the call. For the gated delta rule ``tokens``, ``num_k_heads``,
            ``num_v_heads``, ``head_k_dim``, ``head_v_dim`` and optionally ``batch``, ``cu_seqlens``,
            ``mask``, ``checkpoint_every``, ``qk_l2norm``; for attention ``queries``, ``keys``
            (numbers, or one per sequence), ``num_q_heads``, ``num_kv_heads``, ``head_dim`` and
            optionally ``kv_format``, ``page_size``, ``causal``, ``window``, ``softcap``, ``sinks``;
            for ``append_kv`` ``tokens``, ``num_kv_heads``, ``head_dim``, ``kv_format``; for the
            convolution ``tokens``, ``channels``, ``width``; for rope ``tokens``, ``heads``,
            ``head_dim``. Everywhere ``dtype`` (Default: ``"bfloat16"``), and for Metal
            ``gpu_cores`` (Default: ``8``), on which tiles depend.

    Returns:
        An :class:`Explanation`; ``print`` it.

    Raises:
        ValueError: an op that does not exist, a shape that no kernel takes.
        TypeError: an argument that the op does not have.

    Example:
        >>> import chunkdelta
        >>> how = chunkdelta.explain(
        ...     "paged_attention", backend="metal", queries=512, keys=4096,
        ...     num_q_heads=16, num_kv_heads=4, head_dim=256,
        ... )
        >>> how.backend
        'metal'
    """
    if op not in _METAL:
        raise ValueError(f"[explain] expected an op in {sorted(_METAL)}; got {op!r}")
    if backend is None:
        backend = "metal" if mx.default_device().type == mx.gpu else "cpu"
    if backend not in ("cpu", "metal"):
        raise ValueError(f"[explain] expected backend cpu or metal; got {backend!r}")
    call.setdefault("dtype", "bfloat16")
    plan = _METAL[op](**call)
    if backend == "metal":
        kernels = Counter(launch.kernel for launch in plan.launches)
        scratch = sum(s.bytes for s in plan.scratch)
        return Explanation(op, "metal", tuple(kernels.items()), plan.why, scratch)
    kernel, why, workspace = _cpu(op, call)
    return Explanation(op, "cpu", ((f"{kernel} ({_ext.active_isa()})", 1),), why, workspace)


def _cpu(op: str, call: dict[str, Any]) -> tuple[str, str, int | None]:
    threads = f"{_ext.num_threads()} threads"
    if op in ("chunk_gated_delta_rule", "gated_delta_step"):
        return gated_delta._explain(**call)
    if op == "paged_attention":
        q_lens, seq_lens = _lengths(call["queries"]), _lengths(call["keys"])
        heads = call["num_q_heads"], call["num_kv_heads"]
        head_dim = stored_head_dim(
            call["head_dim"], *parse_kv_format(call.get("kv_format", "bf16"))
        )
        masks = {"causal": call.get("causal", True), "window": call.get("window") or 0}
        offsets = [0, *np.cumsum(q_lens).tolist()]
        kernel, why = _ext.explain_paged_attention(seq_lens, offsets, *heads, head_dim, **masks)
        workspace = _ext.paged_attention_workspace(
            seq_lens, offsets, *heads, head_dim, **masks, threads=_ext.num_threads()
        )
        return kernel, f"{why}, {threads}", workspace
    return op, f"{threads} over rows", None


def _lengths(x: int | Sequence[int]) -> list[int]:
    return [int(n) for n in np.atleast_1d(np.asarray(x))]


def _gated_delta(**call: Any) -> Any:
    call.setdefault("scale", call["head_k_dim"] ** -0.5)
    return _ext.plans.gated_delta(**call)


def _gated_delta_gates(*, tokens: int, num_v_heads: int, dtype: str, **options: Any) -> Any:
    return _ext.plans.gated_delta_gates(dtype, tokens, num_v_heads, **options)


def _paged_attention(
    *,
    queries: int | Sequence[int],
    keys: int | Sequence[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    kv_format: str = "bf16",
    page_size: int = 64,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    **options: Any,
) -> Any:
    k_format, v_format = parse_kv_format(kv_format)
    lengths = _lengths(keys)
    counts = [-(-n // page_size) for n in lengths]
    table = np.full((len(lengths), max(1, *counts, 1)), -1, np.int32)
    first = 0
    for n, count in enumerate(counts):
        table[n, :count] = np.arange(first, first + count)
        first += count
    return _ext.plans.paged_attention(
        dtype,
        num_q_heads,
        num_kv_heads,
        stored_head_dim(head_dim, k_format, v_format),
        page_size,
        k_format.removesuffix("_rot"),
        v_format.removesuffix("_rot"),
        [max(1, first)],
        table,
        lengths,
        np.cumsum([0, *_lengths(queries)]),
        scale=head_dim**-0.5 if scale is None else scale,
        window=window or 0,
        softcap=softcap or 0.0,
        **options,
    )


def _append_kv(
    *,
    tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    kv_format: str = "bf16",
    page_size: int = 64,
) -> Any:
    k_format, v_format = parse_kv_format(kv_format)
    return _ext.plans.append_kv(
        dtype,
        k_format.removesuffix("_rot"),
        list(range(tokens)),
        num_kv_heads=num_kv_heads,
        head_dim=stored_head_dim(head_dim, k_format, v_format),
        page_size=page_size,
        num_pages=max(1, -(-tokens // page_size)),
    )


def _causal_conv1d(*, tokens: int, channels: int, width: int, dtype: str, **options: Any) -> Any:
    return _ext.plans.causal_conv1d(dtype, channels, width, [0, tokens], **options)


def _rope(*, tokens: int, heads: int, head_dim: int, dtype: str, dims: int | None = None) -> Any:
    pairs = (dims or head_dim) // 2
    return _ext.plans.rope(dtype, tokens, heads, head_dim, [1.0] * pairs, [0] * pairs)


_METAL: dict[str, Any] = {
    "append_kv": _append_kv,
    "causal_conv1d": _causal_conv1d,
    "chunk_gated_delta_rule": _gated_delta,
    "gated_delta_gates": _gated_delta_gates,
    "gated_delta_step": lambda **call: _gated_delta(tokens=1, **call),
    "paged_attention": _paged_attention,
    "rope": _rope,
}
