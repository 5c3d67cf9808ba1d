"""The documented ops: one file each, with :mod:`chunkdelta.ops.naive` as their float64 oracle."""

from chunkdelta.ops.append_kv import append_kv, slot_mapping
from chunkdelta.ops.causal_conv1d import causal_conv1d
from chunkdelta.ops.paged_attention import attention_metadata, paged_attention
from chunkdelta.ops.rope import rope

__all__ = [
    "append_kv",
    "attention_metadata",
    "causal_conv1d",
    "paged_attention",
    "rope",
    "slot_mapping",
]
