"""Barriers weakened at run time, thread orders, poison and initial values: what they bring to light."""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal_host import Library, Mutation, Options, mutants
from tests.metal_host.mutants import outcomes

SOURCE = """#include <metal_stdlib>
using namespace metal;
#define BOTH mem_flags::mem_device | mem_flags::mem_threadgroup
kernel void exchange(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float a[64];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  a[i] = i;
  y[i] = i;
  threadgroup_barrier(BOTH);
  const float sum = a[63 - i] + y[63 - i];
  threadgroup_barrier(mem_flags::mem_device); simdgroup_barrier(mem_flags::mem_none);
  y[i] = sum;
}
kernel void neighbours(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float a[64];
  a[i] = i;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[i ^ 1];
}
kernel void forgetful(device float* y [[buffer(0)]], const device float* x [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  float a[4];
  if (x[i] > 0) a[i & 3] = 1;
  y[i] = a[i & 3];
}
kernel void denormal(device float* y [[buffer(0)]], const device float* x [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * 0.5f;
}
"""


@pytest.fixture(scope="module")
def library():
    return Library(SOURCE, name="exchange.metal")


def run(library, kernel, mutation=None):
    y = np.empty(64, np.float32)
    return library.run(
        kernel, (1, 1, 1), (64, 1, 1), {0: y}, outputs=[0], mutation=mutation, raise_errors=False
    )


def test_sites_are_those_of_the_source(library):
    result = run(library, "exchange")
    sites = [(s.line, s.kind, s.flags, s.hits) for s in result.barrier_sites]
    assert sites == [
        (6, "threadgroup_barrier", 2, 1),
        (9, "threadgroup_barrier", 3, 1),
        (11, "threadgroup_barrier", 1, 1),
        (11, "simdgroup_barrier", 0, 2),
    ]


def test_mutants_of_needed_barriers_are_reported_and_of_others_not(library):
    unchanged = run(library, "exchange")
    assert not unchanged.reports
    found = {
        str(o.mutation): {r.kind for r in o.reports}
        for o in outcomes(unchanged.barrier_sites, lambda m: [run(library, "exchange", m).reports])
    }
    assert found == {
        "exchange.metal:6:3 skipped": set(),
        "exchange.metal:6:3 without mem_threadgroup": set(),
        "exchange.metal:9:3 skipped": {"data-race", "uninitialised-read"},
        "exchange.metal:9:3 without mem_device": {"data-race"},
        "exchange.metal:9:3 without mem_threadgroup": {"data-race"},
        "exchange.metal:11:3 skipped": {"data-race"},
        "exchange.metal:11:3 without mem_device": {"data-race"},
        "exchange.metal:11:47 skipped": set(),
    }


def test_simdgroup_barriers_have_mutants(library):
    sites = run(library, "neighbours").barrier_sites
    kinds = [{r.kind for r in run(library, "neighbours", m).reports} for m in mutants(sites)]
    assert len(kinds) == 2
    assert all("data-race" in k for k in kinds)


def test_a_mutation_touches_no_other_site(library):
    elsewhere = Mutation("exchange.metal", 9, 4, skip=True)
    assert not run(library, "exchange", elsewhere).reports
    assert not run(library, "exchange").reports, "and is gone with its launch"


def test_results_that_depend_on_private_memory_change_with_its_content():
    x, results = np.zeros(32, np.float32), []
    for auto_init in ("pattern", "zero"):
        library = Library(SOURCE, mode="fast", auto_init=auto_init)
        y = np.empty(32, np.float32)
        library.run("forgetful", (1, 1, 1), (32, 1, 1), {0: y, 1: x}, outputs=[0])
        results.append(y)
    assert np.isnan(results[0]).all()
    assert not results[1].any()


def test_denormals_can_be_flushed(library):
    x, y = np.full(32, 1e-38, np.float32), np.empty(32, np.float32)
    for flush in (False, True):
        options = Options(flush_denormals=flush)
        library.run("denormal", (1, 1, 1), (32, 1, 1), {0: y, 1: x}, outputs=[0], options=options)
        assert (y == 0).all() == flush
    assert np.float32(1e-38) * np.float32(0.5) != 0, "Python's own arithmetic is as before"


def test_poison_fills_what_has_no_content():
    library = Library(SOURCE, mode="fast")
    for poison in (0xFF, 0x00, 0x5A):
        y = np.zeros(64, np.uint32)
        options = Options(poison=poison)
        library.run("exchange", (1, 1, 1), (32, 1, 1), {0: y}, partial_outputs=[0], options=options)
        assert (y[32:] == poison * 0x01010101).all()
