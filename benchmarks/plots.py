"""Plots of a result file: speed and memory of prefill attention against the context."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

QUERIES = 512


def plot_attention(result: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series: dict[str, list[tuple[int, float, float]]] = {}
    for row in result["rows"]:
        match = re.fullmatch(r"(\S+) pages, (\d+) keys", row["case"])
        if row["op"] != "attention" or not match:
            continue
        name = f"{row['impl']} ({match[1]})"
        point = int(match[2]), QUERIES / row["cpu_s"], (row["extra_bytes"] or 0) / 1e6
        series.setdefault(name, []).append(point)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, points in series.items():
        keys, speed, memory = zip(*sorted(points), strict=True)
        style = {"linewidth": 2.4} if name.startswith("chunkdelta") else {"linestyle": "--"}
        axes[0].plot(keys, speed, marker="o", label=name, **style)
        axes[1].plot(keys, memory, marker="o", label=name, **style)
    axes[0].set(xlabel="context (keys)", ylabel="tokens per CPU second, one layer", yscale="log")
    axes[1].set(xlabel="context (keys)", ylabel="extra memory of the call (MB)")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"Prefill attention, 512 queries, 16/4 heads of 256; {result['machine']}")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "attention_against_context.svg")


if __name__ == "__main__":
    plot_attention(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
