"""Chunk planning, the memory plan and the prefill loop."""

from chunkdelta.prefill.chunks import plan_chunks
from chunkdelta.prefill.loop import PrefillCancelled, PrefillModel, prefill
from chunkdelta.prefill.memory import ChunkPlan, MemoryPlan, plan_memory
from chunkdelta.prefill.shapes import (
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
    "plan_chunks",
    "plan_memory",
    "prefill",
]
