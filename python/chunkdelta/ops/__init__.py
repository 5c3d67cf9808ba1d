"""The documented ops: one file each, with :mod:`chunkdelta.ops.naive` as their float64 oracle."""

from chunkdelta.ops.causal_conv1d import causal_conv1d
from chunkdelta.ops.rope import rope

__all__ = ["causal_conv1d", "rope"]
