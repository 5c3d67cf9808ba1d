"""The documented ops: one file each, with :mod:`chunkdelta.ops.naive` as their float64 oracle."""

from chunkdelta.ops.append_kv import append_kv, slot_mapping
from chunkdelta.ops.causal_conv1d import causal_conv1d
from chunkdelta.ops.gated_delta import (
    chunk_gated_delta_rule,
    gated_delta_gates,
    gated_delta_step,
)
from chunkdelta.ops.merge_states import merge_states
from chunkdelta.ops.paged_attention import attention_metadata, paged_attention
from chunkdelta.ops.rope import rope

__all__ = [
    "append_kv",
    "attention_metadata",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "gated_delta_gates",
    "gated_delta_step",
    "merge_states",
    "paged_attention",
    "rope",
    "slot_mapping",
]
