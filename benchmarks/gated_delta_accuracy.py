"""Errors of the gated delta rule against float64 on inputs that are hard for chunk forms.

    python benchmarks/gated_delta_accuracy.py [--rows 2048]

Two tables: float32 against the textbook chunk form and the plain recurrence of the same precision;
bfloat16 activations over the half-life of the decay, beside MLX's own op, which rounds the decay.
"""

from __future__ import annotations

import argparse

import chunkdelta
import mlx.core as mx
import numpy as np
from chunkdelta.testing.compare import relative_error, to_float64
from chunkdelta.testing.gated_delta import recurrence, textbook_chunk_form

D = 128


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make(rows: int, beta: float | None, repeated: bool, gate: str, half_life: float = 1.0):
    rng = np.random.default_rng(0)
    shape = (1, rows, 1)
    q, k = unit(rng.standard_normal((2, *shape, D)))
    if repeated:
        k = unit(unit(rng.standard_normal((1, 1, 1, D))) + 0.01 * k)
    g = {
        "varied": -0.01 * np.abs(rng.standard_normal(shape)),
        "slow": np.full(shape, -1e-5),
        "rare -30": np.where(rng.uniform(size=shape) < 0.05, -30.0, -0.01),
        "half-life": np.full(shape, -np.log(2) / half_life),
    }[gate]
    betas = rng.uniform(0, 1, shape) if beta is None else np.full(shape, beta)
    arrays = (q, k, rng.standard_normal((*shape, D)), g, betas)
    return [a.astype(np.float32) for a in arrays]


def cell(result, oracle) -> str:
    o, state = (relative_error(a, b) for a, b in zip(result, oracle, strict=True))
    return f"{o:.1e} ({state:.1e})"


def float32_table(rows: int) -> None:
    print(f"float32, T = {rows}, D = {D}: error of o (of the state)\n")
    print("| keys | beta | gates | C | chunkdelta | textbook chunk form | recurrence in float32 |")
    print("|---|---|---|---|---|---|---|")
    cases = [
        ("random", None, "varied"),
        ("random", None, "rare -30"),
        ("random", 2.0, "slow"),
        ("repeated", 0.999, "slow"),
        ("repeated", 1.99, "slow"),
        ("repeated", 2.0, "slow"),
    ]
    for keys, beta, gate in cases:
        arrays = make(rows, beta, keys == "repeated", gate)
        oracle = recurrence(*arrays)
        plain = recurrence(*arrays, dtype=np.float32)

        for C in (16, 64):
            ours = chunkdelta.chunk_gated_delta_rule(*map(mx.array, arrays), chunk_size=C)
            textbook = textbook_chunk_form(*arrays, chunk_size=C)
            print(
                f"| {keys} | {'0..1' if beta is None else beta} | {gate} | {C} | {cell(ours, oracle)} "
                f"| {cell(textbook, oracle)} | {cell(plain, oracle)} |"
            )


def bfloat16_table() -> None:
    print("\nbfloat16 q, k, v, T = 1024: error of o (of the state)\n")
    print("| half-life, rows | chunkdelta | mx.fast.gated_delta_update | rounding o alone |")
    print("|---|---|---|---|")
    for half_life in (1, 10, 100, 1000, 10_000, 100_000):
        arrays = make(1024, None, False, "half-life", half_life)
        q, k, v = (mx.array(a).astype(mx.bfloat16) for a in arrays[:3])
        g, beta = map(mx.array, arrays[3:])
        oracle = recurrence(*map(to_float64, (q, k, v, g, beta)))
        ours = chunkdelta.chunk_gated_delta_rule(q, k, v, g, beta)
        scaled = q * D**-0.5
        theirs = mx.fast.gated_delta_update(scaled, k, v, mx.exp(g), beta)
        rounded = mx.array(oracle[0].astype(np.float32)).astype(mx.bfloat16)

        print(
            f"| {half_life} | {cell(ours, oracle)} | {cell(theirs, oracle)} "
            f"| {relative_error(rounded, oracle[0]):.1e} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    float32_table(parser.parse_args().rows)
    bfloat16_table()
