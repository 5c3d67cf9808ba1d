"""Error of attention over each page format, beside that of an independent NumPy codec.

`python benchmarks/page_formats.py`: 64 queries on 4,096 keys, 4 q heads on 1 KV head of 256; relative
Frobenius error of the output against float64 attention over unquantised keys and values.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import chunkdelta
import click
import mlx.core as mx
import numpy as np
from chunkdelta.cache.pages import PageFormatWarning, page_formats
from chunkdelta.ops.rotation import rotation_block
from chunkdelta.testing import page_formats as definitions
from rich.console import Console
from rich.table import Table

D, HEADS, KEYS, QUERIES, PAGE = 256, 4, 4096, 64, 64


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q [T,Hq,D], k and v [L,D]; causal, bottom right; float64."""
    scores = np.einsum("thd,ld->htl", q, k) * D**-0.5
    visible = np.arange(KEYS)[None] <= np.arange(KEYS - QUERIES, KEYS)[:, None]
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("htl,ld->thd", weights, v)


def through_numpy(name: str, x: np.ndarray) -> np.ndarray:
    """x [L,D] encoded and decoded by the definitions in chunkdelta.testing.page_formats."""
    if name in ("f32", "f16", "bf16"):
        dtype = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}[name]
        return np.array(mx.array(x.astype(np.float32)).astype(dtype).astype(mx.float32), np.float64)
    codec = name.removesuffix("_rot")
    if name.endswith("_rot"):
        blocks = (len(x), -1, rotation_block(D))
        rotated = definitions.hadamard(x.reshape(blocks)).reshape(x.shape)
        decoded = definitions.decode(codec, definitions.encode(codec, rotated), D)
        return definitions.hadamard(decoded.reshape(blocks)).reshape(x.shape)
    decoded = definitions.decode(codec, definitions.encode(codec, x), D)
    if name == "turbo4":
        return definitions.turbo_rotate(decoded, inverse=True)
    return decoded.astype(np.float64)


def through_pages(k_format: str, v_format: str, q, k, v) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PageFormatWarning)
        pages = chunkdelta.KVPages(
            KEYS // PAGE, 1, D, page_size=PAGE, k_format=k_format, v_format=v_format
        )
    rows = (mx.array(x[:, None].astype(np.float32)) for x in (k, v))
    chunkdelta.append_kv(pages, *rows, np.arange(KEYS))
    o = chunkdelta.paged_attention(
        mx.array(q.astype(np.float32)),
        pages,
        block_table=[list(range(KEYS // PAGE))],
        seq_lens=[KEYS],
        cu_seqlens_q=[0, QUERIES],
    )
    return np.array(o, np.float64)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@click.command(help=__doc__)
@click.option("--json", "as_json", is_flag=True, help="print one JSON list")
def main(as_json: bool) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((QUERIES, HEADS, D))
    v = rng.standard_normal((KEYS, D))
    gaussian = rng.standard_normal((KEYS, D))
    outliers = gaussian.copy()
    outliers[:, [3, 77, 130, 200]] = 4 * outliers[:, [3, 77, 130, 200]] + [8, -8, 6, -6]
    rows = []
    for name in page_formats():
        row = {"format": name, "bits": chunkdelta.KVPages(1, 1, D, k_format="f32", v_format=name)}
        row["bits"] = (row["bits"].bytes_per_token - 4 * D) * 8 / D
        for label, k in (("gaussian", gaussian), ("outliers", outliers)):
            exact = attention(q, k, v)
            for part, formats in (("K", (name, "f32")), ("V", ("f32", name))):
                ours = relative(through_pages(*formats, q, k, v), exact)
                decoded = (through_numpy(f, x) for f, x in zip(formats, (k, v), strict=True))
                independent = relative(attention(q, *decoded), exact)
                row[f"{part}_{label}"] = ours
                row[f"{part}_{label}_numpy"] = independent
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("format", "bits a value", "K gaussian", "K outliers", "V", "largest ours / NumPy")
    for row in rows:
        names = [n for n in row if f"{n}_numpy" in row]
        ratio = max(row[n] / max(row[f"{n}_numpy"], 5e-7) for n in names)
        values = (row["K_gaussian"], row["K_outliers"], row["V_gaussian"])
        table.add_row(
            row["format"], f"{row['bits']:g}", *(f"{x:.2g}" for x in values), f"{ratio:.3f}"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
