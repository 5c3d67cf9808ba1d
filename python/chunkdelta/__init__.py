"""Chunked prefill for hybrid models on MLX, in memory known before the run.

Floors, from the ground up: :mod:`chunkdelta.ops` (kernels as MLX ops),
:mod:`chunkdelta.cache` (pages, pools, states), :mod:`chunkdelta.loop` (chunk
plan, memory plan, the loop), :mod:`chunkdelta.models` (adapters). Lower floors
never import higher ones.
"""

from chunkdelta.env import check_mlx_version

check_mlx_version()

from chunkdelta.cache import KVPages, PrefixCache, StatePool, load_prefix, save_prefix
from chunkdelta.dispatch import explain
from chunkdelta.loop import plan_memory, prefill, prefill_with_prefixes
from chunkdelta.models import make_cache
from chunkdelta.ops import (
    append_kv,
    attention_metadata,
    causal_conv1d,
    chunk_gated_delta_rule,
    gated_delta_gates,
    gated_delta_step,
    merge_states,
    paged_attention,
    rope,
    slot_mapping,
)

__version__ = "0.1.0"

__all__ = [
    "KVPages",
    "PrefixCache",
    "StatePool",
    "__version__",
    "append_kv",
    "attention_metadata",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "explain",
    "gated_delta_gates",
    "gated_delta_step",
    "load_prefix",
    "make_cache",
    "merge_states",
    "paged_attention",
    "plan_memory",
    "prefill",
    "prefill_with_prefixes",
    "rope",
    "save_prefix",
    "slot_mapping",
]
