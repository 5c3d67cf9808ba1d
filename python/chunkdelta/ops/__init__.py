"""The documented ops: one file each, with :mod:`chunkdelta.ops.naive` as their float64 oracle."""

from chunkdelta.ops.rope import rope

__all__ = ["rope"]
