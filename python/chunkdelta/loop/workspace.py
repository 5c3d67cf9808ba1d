"""Scratch of the kernels during a chunk, as they size it themselves."""

from __future__ import annotations

from chunkdelta import _ext
from chunkdelta.cache.pages import parse_kv_format, stored_head_dim
from chunkdelta.loop.shapes import GatedDeltaShape, ModelShape


def cpu_workspace_bytes(
    model: ModelShape, *, context: int, chunk_size: int, batch: int, kv_format: str
) -> int:
    """Core's persistent scratch after a chunk through every layer: one block and one per thread.

    MLX does not see it; ``chunkdelta._ext.workspace_peak_bytes()`` does.
    """
    threads = _ext.num_threads()
    shared, per_worker = 0, 0
    for mixer in {layer.mixer for layer in model.layers}:
        if isinstance(mixer, GatedDeltaShape):
            block, each = _ext.gated_delta_workspace(
                mixer.num_k_heads,
                mixer.num_v_heads,
                mixer.head_k_dim,
                mixer.head_v_dim,
                [chunk_size] * batch,
            )
        else:
            block, both = (
                _ext.paged_attention_workspace(
                    seq_lens=[max(context, chunk_size)] * batch,
                    cu_seqlens_q=[i * chunk_size for i in range(batch + 1)],
                    num_q_heads=mixer.num_heads,
                    num_kv_heads=mixer.num_kv_heads,
                    head_dim=stored_head_dim(mixer.head_dim, *parse_kv_format(kv_format)),
                    causal=True,
                    window=0,
                    threads=count,
                )
                for count in (0, 1)
            )
            each = both - block
        shared, per_worker = max(shared, block), max(per_worker, each)
    return _whole_pages(shared) + threads * _whole_pages(per_worker)


def _whole_pages(n: int) -> int:
    return -(-n // 4096) * 4096


def gpu_scratch_bytes(
    model: ModelShape,
    *,
    context: int,
    chunk_size: int,
    batch: int,
    kv_format: str,
    page_size: int = 64,
) -> int:
    """Largest scratch and metadata of one op's launch plan; MLX allocates it for that op."""
    dtype = "float32" if model.dtype_bytes == 4 else "bfloat16"
    k_format, v_format = parse_kv_format(kv_format)
    keys = max(context, chunk_size)
    pages = -(-keys // page_size)
    most = 0
    for mixer in {layer.mixer for layer in model.layers}:
        if isinstance(mixer, GatedDeltaShape):
            plan = _ext.plans.gated_delta(
                dtype=dtype,
                batch=batch,
                tokens=chunk_size,
                num_k_heads=mixer.num_k_heads,
                num_v_heads=mixer.num_v_heads,
                head_k_dim=mixer.head_k_dim,
                head_v_dim=mixer.head_v_dim,
                scale=1.0,
                initial_state=True,
            )
        else:
            plan = _ext.plans.paged_attention(
                dtype,
                mixer.num_heads,
                mixer.num_kv_heads,
                stored_head_dim(mixer.head_dim, k_format, v_format),
                page_size,
                k_format,
                v_format,
                [batch * pages],
                [list(range(i * pages, (i + 1) * pages)) for i in range(batch)],
                [keys] * batch,
                [i * chunk_size for i in range(batch + 1)],
                scale=1.0,
            )
        scratch = sum(buffer.bytes for buffer in plan.scratch)
        most = max(most, scratch + sum(len(data.bytes) for data in plan.host_data))
    return most
