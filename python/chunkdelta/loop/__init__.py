"""Chunk planning, the memory plan and the prefill loop."""

from chunkdelta.loop.chunks import plan_chunks
from chunkdelta.loop.memory import ChunkPlan, MemoryPlan, plan_memory
from chunkdelta.loop.prefill import PrefillCancelled, PrefillModel, prefill
from chunkdelta.loop.reuse import Prefilled, prefill_with_prefixes
from chunkdelta.loop.shapes import (
    AttentionShape,
    GatedDeltaShape,
    LayerShape,
    MlpShape,
    ModelShape,
)

__all__ = [
    "AttentionShape",
    "ChunkPlan",
    "GatedDeltaShape",
    "LayerShape",
    "MemoryPlan",
    "MlpShape",
    "ModelShape",
    "PrefillCancelled",
    "PrefillModel",
    "Prefilled",
    "plan_chunks",
    "plan_memory",
    "prefill",
    "prefill_with_prefixes",
]
