"""Pools, page tables and states: who owns which memory between two calls of an op."""

from chunkdelta.cache.page_allocator import (
    Appended,
    OutOfPages,
    PageAllocator,
    PageTable,
    batch_metadata,
)
from chunkdelta.cache.pages import KVPages, parse_kv_format
from chunkdelta.cache.prefix_cache import PrefixCache, PrefixHit
from chunkdelta.cache.snapshot import load_prefix, save_prefix
from chunkdelta.cache.state_pool import StatePool

__all__ = [
    "Appended",
    "KVPages",
    "OutOfPages",
    "PageAllocator",
    "PageTable",
    "PrefixCache",
    "PrefixHit",
    "StatePool",
    "batch_metadata",
    "load_prefix",
    "parse_kv_format",
    "save_prefix",
]
