"""Pools, page tables and states: who owns which memory between two calls of an op."""

from chunkdelta.cache.pages import KVPages, parse_kv_format

__all__ = ["KVPages", "parse_kv_format"]
