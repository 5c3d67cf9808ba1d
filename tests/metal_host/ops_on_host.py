"""Ops of chunkdelta through eval_gpu, their launch plan and the host runner: what a Mac would do.

``eval_gpu`` of the primitive makes the plan and names the arrays; the plan runs on the very memory
that the op's inputs have, strides, offsets and pools in place included.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from chunkdelta import _ext

from .memory import Options
from .plan import execute_plan

# The extension's functions that build graph nodes of an op with a plan.
OPS = (
    "append_kv",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "copy_pages",
    "gated_delta_gates",
    "gated_delta_step",
    "merge_states",
    "paged_attention",
    "rope",
)


def outputs_on_host(
    out: mx.array, shapes: list[tuple[tuple[int, ...], mx.Dtype]], mode: str, options: Options
) -> tuple[list[mx.array], list[str]]:
    """The outputs of the op behind ``out``, and the kernels that made them.

    Args:
      out: one of the op's outputs, not evaluated.
      shapes: shape and dtype of all of them, in order.
      mode: "check" or "fast".
      options: of the runner.
    """
    results: list[mx.array | None] = [None] * len(shapes)
    kernels = []
    for captured in _ext.plans.capture(out):
        plan, memory = captured.plan, captured.memory
        kernels += [launch.kernel for launch in plan.launches]
        own = {x.role for x in [*plan.scratch, *plan.host_data]}
        bound = {b.role for launch in plan.launches for b in launch.buffers} - own
        assert bound <= memory.keys(), f"{plan.op} binds {bound - memory.keys()}, which nobody gave"
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        by_address: dict[int, np.ndarray[Any, Any]] = {}
        fresh = []
        for role, m in memory.items():
            content = np.frombuffer(m.bytes, np.uint8).copy()
            arrays[role] = by_address.setdefault(m.address, content) if m.address else content
            if not m.defined and role in bound and content.size:
                fresh.append(role)
        done = execute_plan(
            plan,
            {role: arrays[role] for role in bound},
            partial_outputs=fresh,
            mode=mode,
            options=options,
        )
        for role, m in memory.items():
            if m.output >= 0:
                shape, dtype = shapes[m.output]
                content = done.arrays.get(role, arrays[role])
                results[m.output] = from_bytes(content, shape, dtype)
    # An output without a role carries no data: a token that orders pools in a graph.
    return [mx.zeros(*shapes[i]) if r is None else r for i, r in enumerate(results)], kernels


def from_bytes(content: Any, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if content.size == 0:
        return mx.zeros(shape, dtype)
    if dtype == mx.uint8:
        return mx.array(content).reshape(shape)
    return mx.array(content).view(dtype).reshape(shape)


@contextlib.contextmanager
def ops_on_host(mode: str = "fast", options: Options | None = None) -> Iterator[Counter[str]]:
    """Inside, every op of chunkdelta runs through its Metal plan on the host, at once.

    Yields:
      A counter of the kernels that ran.
    """
    ran: Counter[str] = Counter()
    options = options or Options()

    def through_metal(build: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = build(*args, **kwargs)
            many = isinstance(result, (tuple, list))
            nodes = list(result) if many else [result]
            shapes = [(node.shape, node.dtype) for node in nodes]
            outputs, kernels = outputs_on_host(nodes[0], shapes, mode, options)
            ran.update(kernels)
            return type(result)(outputs) if many else outputs[0]

        return run

    original = {name: getattr(_ext, name) for name in OPS}
    try:
        for name, build in original.items():
            setattr(_ext, name, through_metal(build))
        yield ran
    finally:
        for name, build in original.items():
            setattr(_ext, name, build)
