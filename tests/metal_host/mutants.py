"""Barriers taken away or weakened, one at a time: does anything notice?

A kernel whose barriers are all needed has every mutant reported in check mode. One that nobody
notices is either redundant or shows that the case is too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .report import BarrierSite, Report
from .run import Mutation


def mutants(sites: Iterable[BarrierSite]) -> list[Mutation]:
    """Every single weakening of the given barriers.

    Each site is skipped, and loses each of its memory flags in turn; a barrier with no flags is
    only skipped.

    Args:
      sites: of a launch or plan that ran; duplicates are merged.
    """
    merged: dict[tuple[str, int, int], int] = {}
    for site in sites:
        key = (site.file, site.line, site.column)
        merged[key] = merged.get(key, 0) | site.flags
    out = []
    for (file, line, column), flags in sorted(merged.items()):
        out.append(Mutation(file, line, column, skip=True))
        out += [Mutation(file, line, column, drop_flags=bit) for bit in (1, 2) if flags & bit]
    return out


@dataclass(frozen=True)
class Outcome:
    """A mutant and what was said about it."""

    mutation: Mutation
    reports: tuple[Report, ...]

    @property
    def survived(self) -> bool:
        """Whether nothing noticed."""
        return not self.reports


def outcomes(
    sites: Iterable[BarrierSite],
    run: Callable[[Mutation], Iterable[Iterable[Report]]],
) -> Iterator[Outcome]:
    """Runs every mutant until something notices.

    Args:
      sites: the barriers of the unchanged runs.
      run: given a mutation, yields the reports of one case after the other (several shapes, thread
        orders); the first case with a report ends it.
    """
    for mutation in mutants(sites):
        found: tuple[Report, ...] = ()
        for reports in run(mutation):
            found = tuple(reports)
            if found:
                break
        yield Outcome(mutation, found)
