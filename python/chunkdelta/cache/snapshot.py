"""A prefix on disk: pages in their format, states, token ids.

A safetensors file, written beside its name and renamed over it, so that a reader sees the old file or the
new one. Arrays are checked against SHA-256 sums before anything is changed.

    tokens            int32 [T]
    layer.<i>.k       pages of an attention layer, as stored [pages, Hkv, page_size, ...]
    layer.<i>.v       likewise
    layer.<i>.<j>     entry j of a gated-delta layer: convolution tails, then the state
    metadata          format, version, fingerprint, and a JSON object "layers" and "sha256"
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

FORMAT = "chunkdelta-prefix"
VERSION = 1


def save_prefix(
    path: str | os.PathLike[str],
    tokens: Sequence[int],
    cache: Sequence[Any],
    *,
    fingerprint: str = "",
) -> int:
    """Write a prefix and its caches to a file, atomically.

    Args:
        path: the file, ``*.safetensors``; replaced if it exists.
        tokens: the token ids that the caches hold, all of them.
        cache: one cache a layer, of a single sequence.
        fingerprint: of the model; :func:`load_prefix` refuses another. Default: ``""``.

    Returns:
        Bytes written.

    Raises:
        ValueError: a cache of several sequences, of another number of tokens or of an unknown kind.
        OSError: the file cannot be written; an older file of that name is as it was.

    Example:
        >>> import tempfile, chunkdelta
        >>> from chunkdelta.models import embedded
        >>> from chunkdelta.models.mlx_lm import accelerate
        >>> model = accelerate(embedded.build(vocab_size=512))
        >>> cache = chunkdelta.make_cache(model, max_tokens=64)
        >>> logits = chunkdelta.prefill(model, [1, 2, 3], cache)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = chunkdelta.save_prefix(folder + "/p.safetensors", [1, 2, 3], cache)
        ...     fresh = chunkdelta.make_cache(model, max_tokens=64)
        ...     chunkdelta.load_prefix(folder + "/p.safetensors", fresh)
        [1, 2, 3]
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"[save_prefix] expected an existing folder; got {path.parent}")
    if path.suffix != ".safetensors":
        raise ValueError(f"[save_prefix] expected a name ending in .safetensors; got {path.name}")
    arrays: dict[str, mx.array] = {"tokens": mx.array(np.asarray(tokens, np.int32))}
    layers: list[dict[str, Any]] = []
    for i, layer in enumerate(cache):
        if hasattr(layer, "held_pages"):
            layers.append(_attention_layer("save_prefix", layer, len(tokens)))
            pool, pages = layer.held_pages()[0]
            arrays[f"layer.{i}.k"], arrays[f"layer.{i}.v"] = pool.pages.read_pages(pages)
        elif hasattr(layer, "cache"):
            entries = layer.cache
            if any(e is not None and e.shape[0] != 1 for e in entries):
                raise ValueError(
                    f"[save_prefix] expected caches of one sequence; got {entries[0].shape[0]} rows "
                    f"in layer {i}"
                )
            layers.append({"kind": "states", "entries": len(entries)})
            arrays |= {f"layer.{i}.{j}": e for j, e in enumerate(entries) if e is not None}
        else:
            raise ValueError(
                f"[save_prefix] expected caches that chunkdelta makes; got {type(layer).__name__}"
            )
    mx.eval(arrays)
    sums = {name: _sha256(x) for name, x in arrays.items()}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "fingerprint": fingerprint,
        "layers": json.dumps(layers),
        "sha256": json.dumps(sums),
    }
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.safetensors")
    try:
        mx.save_safetensors(str(temporary), arrays, metadata)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return path.stat().st_size


def load_prefix(
    path: str | os.PathLike[str], cache: Sequence[Any], *, fingerprint: str = ""
) -> list[int]:
    """Read a prefix into empty caches.

    Args:
        path: a file that :func:`save_prefix` wrote.
        cache: empty caches of the same model, formats and page size; filled in place.
        fingerprint: of the model; must be the file's. Default: ``""``.

    Returns:
        The token ids of the prefix; the prompt is to be computed from ``len`` of them on.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file that is torn, not a prefix, of a newer version, of another model or
            format; caches that are not empty, or with too few pages. The caches are unchanged.

    Example:
        >>> import chunkdelta
        >>> chunkdelta.load_prefix("/nonexistent.safetensors", [])
        Traceback (most recent call last):
        FileNotFoundError: [load_prefix] expected a file; got /nonexistent.safetensors, which does not exist
    """
    op = "load_prefix"
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"[{op}] expected a file; got {path}, which does not exist")
    try:
        loaded: Any = mx.load(str(path), return_metadata=True, format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"[{op}] expected a whole safetensors file; got {path}: {error}"
        ) from error
    arrays, metadata = loaded
    if metadata.get("format") != FORMAT:
        raise ValueError(f"[{op}] expected a file of format {FORMAT}; got {path}, which is not")
    version = metadata.get("version", "")
    if not version.isdigit() or int(version) > VERSION:
        raise ValueError(
            f"[{op}] expected version {VERSION} or older; got version {version} in {path}: "
            "a newer chunkdelta wrote it"
        )
    if metadata.get("fingerprint", "") != fingerprint:
        raise ValueError(
            f"[{op}] expected a prefix of the model {fingerprint!r}; "
            f"got one of {metadata.get('fingerprint', '')!r} in {path}"
        )
    layers, sums = json.loads(metadata["layers"]), json.loads(metadata["sha256"])
    if len(layers) != len(cache):
        raise ValueError(f"[{op}] expected {len(cache)} layers; got {len(layers)} in {path}")
    try:
        whole = set(sums) == set(arrays) and all(_sha256(x) == sums[n] for n, x in arrays.items())
    except RuntimeError as error:  # arrays are read when they are needed
        raise ValueError(f"[{op}] expected a whole file; got {path}: {error}") from error
    if not whole:
        raise ValueError(f"[{op}] expected arrays as they were written; got a damaged file, {path}")

    tokens = [int(t) for t in np.array(arrays["tokens"])]
    for i, (layer, stored) in enumerate(zip(cache, layers, strict=True)):
        _check_layer(op, i, layer, stored, len(tokens))
    for i, layer in enumerate(cache):
        if hasattr(layer, "held_pages"):
            layer.restore(len(tokens), arrays[f"layer.{i}.k"], arrays[f"layer.{i}.v"])
        else:
            layer.cache = [arrays.get(f"layer.{i}.{j}") for j in range(layers[i]["entries"])]
    mx.eval([c.state for c in cache])
    return tokens


def _attention_layer(op: str, layer: Any, length: int) -> dict[str, Any]:
    rows = layer.held_pages()
    if len(rows) != 1 or layer.lengths != [length]:
        raise ValueError(
            f"[{op}] expected caches of one sequence of {length} tokens; got {layer.lengths}"
        )
    pool = rows[0][0]
    return {
        "kind": "pages",
        "kv_format": pool.kv_format,
        "page_size": pool.page_size,
        "num_kv_heads": pool.pages.num_kv_heads,
        "head_dim": pool.pages.head_dim,
    }


def _check_layer(op: str, i: int, layer: Any, stored: dict[str, Any], tokens: int) -> None:
    if not layer.empty():
        raise ValueError(f"[{op}] expected empty caches; got one with tokens in layer {i}")
    if not hasattr(layer, "held_pages"):
        entries = len(getattr(layer, "cache", ()))
        expected = {"kind": "states", "entries": entries}
        if stored != expected:
            raise ValueError(f"[{op}] expected {expected} in layer {i}; got {stored}")
        return
    pool = layer.pool
    expected = {
        "kind": "pages",
        "kv_format": pool.kv_format,
        "page_size": pool.page_size,
        "num_kv_heads": pool.pages.num_kv_heads,
        "head_dim": pool.pages.head_dim,
    }
    if stored != expected:
        raise ValueError(f"[{op}] expected {expected} in layer {i}; got {stored}")
    layer.check(1, tokens)


def _chunks(x: mx.array) -> Iterator[bytes]:
    """The bytes of an array, some megabytes at a time."""
    data = np.asarray(mx.contiguous(x.reshape(-1)).view(mx.uint8))
    for start in range(0, len(data), 1 << 24):
        yield data[start : start + (1 << 24)].tobytes()


def _sha256(x: mx.array) -> str:
    h = hashlib.sha256(f"{x.dtype}{x.shape}".encode())
    if x.size:
        for chunk in _chunks(x):
            h.update(chunk)
    return h.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
