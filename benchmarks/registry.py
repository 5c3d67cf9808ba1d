"""What is measured: ops x cases x implementations.

A case makes its inputs once, as NumPy arrays, and says what the work is (floating-point operations
that the mathematics needs, or bytes that must move). An implementation turns those inputs into its
own types and returns a closure that does the work once and returns its outputs as NumPy arrays only
when asked to (`fetch`), so that conversions are never timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Inputs = dict[str, Any]


class Prepared(NamedTuple):
    run: Callable[[], Any]
    fetch: Callable[[Any], np.ndarray]  # the op's main output in the case's own layout


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    make: Callable[[], Inputs]
    flops: float = 0.0  # of the mathematics, not of any one algorithm
    bytes: float = 0.0  # that must move, where bandwidth is the ceiling
    suite: str = "cpu"


class Unavailable(Exception):
    """An implementation that cannot run here, with the reason that is printed."""


@dataclass(frozen=True)
class Implementation:
    op: str
    name: str
    prepare: Callable[[Inputs], Prepared]


@dataclass
class Registry:
    cases: list[Case] = field(default_factory=list)
    implementations: list[Implementation] = field(default_factory=list)

    def implementation(self, op: str, name: str) -> Callable[..., Any]:
        def add(prepare: Callable[[Inputs], Prepared]) -> Callable[[Inputs], Prepared]:
            self.implementations.append(Implementation(op, name, prepare))
            return prepare

        return add


registry = Registry()


def load_all() -> Registry:
    from benchmarks.cases import attention, gated_delta  # noqa: F401

    return registry
