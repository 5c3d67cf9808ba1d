"""Chunked prefill for hybrid models on MLX, in memory known before the run.

Floors, from the ground up: :mod:`chunkdelta.ops` (kernels as MLX ops),
:mod:`chunkdelta.cache` (pages, pools, states), :mod:`chunkdelta.prefill` (chunk
plan, memory plan, the loop), :mod:`chunkdelta.models` (adapters). Lower floors
never import higher ones.
"""

from chunkdelta.env import check_mlx_version

check_mlx_version()

from chunkdelta.cache import KVPages
from chunkdelta.ops import (
    append_kv,
    attention_metadata,
    causal_conv1d,
    paged_attention,
    rope,
    slot_mapping,
)

__version__ = "0.1.0"

__all__ = [
    "KVPages",
    "__version__",
    "append_kv",
    "attention_metadata",
    "causal_conv1d",
    "paged_attention",
    "rope",
    "slot_mapping",
]
