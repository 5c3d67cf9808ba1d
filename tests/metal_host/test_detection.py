"""Every kind of mistake that the runner claims to find: it finds it, at its line, and only there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.metal_host import Library, MetalError, Options, RewriteError

SOURCE = Path(__file__).with_name("mistakes.metal")
LINES = {
    match.group(1): number
    for number, line in enumerate(SOURCE.read_text().splitlines(), 1)
    if (match := re.search(r"HERE (\w+)", line))
}
ORDERS = (0, 1, 7)

FLOAT, INT, UINT = np.float32, np.int32, np.uint32


@pytest.fixture(scope="module")
def check():
    return Library(SOURCE, mode="check", constants={"limit_value": 3, "has_extra": False})


@pytest.fixture(scope="module")
def fast():
    return Library(SOURCE, mode="fast", constants={"limit_value": 3, "has_extra": False})


def run(library, kernel, dtype=FLOAT, groups=1, threads=64, order=0, **options):
    """Two buffers: y is written, x is zeros and read-only."""
    defaults = {"outputs": [], "partial_outputs": [], "inout": [0]}
    launch = {
        k: options.pop(k)
        for k in tuple(options)
        if k in (*defaults, "constants", "threadgroup_memory")
    }
    buffers = options.pop("buffers", {0: np.zeros(64, dtype), 1: np.zeros(64, dtype)})
    return library.run(
        kernel,
        (groups, 1, 1),
        (threads, 1, 1),
        buffers,
        **{**defaults, **launch},
        options=Options(order=order, **options),
        raise_errors=False,
    ).reports


# kernel, kind of report, how it is launched
CASES = [
    ("buffer_overrun", "out-of-bounds", {}),
    ("buffer_underrun", "out-of-bounds", {}),
    ("vector_overrun", "out-of-bounds", {}),
    ("threadgroup_overrun", "out-of-bounds", {}),
    ("missing_barrier", "data-race", {}),
    ("device_needs_device_flag", "data-race", {"inout": [0, 1]}),
    ("threadgroup_needs_threadgroup_flag", "data-race", {}),
    ("barrier_without_flags", "data-race", {}),
    ("simdgroup_barrier_is_local", "data-race", {}),
    ("simd_function_is_no_barrier", "data-race", {}),
    ("same_value_race", "data-race", {}),
    ("between_threadgroups", "data-race", {"groups": 2, "threads": 32}),
    ("read_by_an_earlier_threadgroup", "data-race", {"groups": 2, "threads": 32}),
    ("atomic_and_plain", "data-race", {"dtype": UINT, "inout": [0, 1]}),
    ("float_atomics", "data-race", {"groups": 1}),
    ("uninitialised_threadgroup", "uninitialised-read", {}),
    ("uninitialised_output", "uninitialised-read", {"outputs": [0], "inout": []}),
    ("unwritten_output", "unwritten-output", {"outputs": [0], "inout": []}),
    ("read_only_write", "read-only-write", {}),
    ("barrier_in_branch", "barrier-divergence", {}),
    ("return_before_barrier", "barrier-divergence", {}),
    ("two_barriers", "barrier-divergence", {}),
    ("simd_sum_in_branch", "simd-divergence", {}),
    ("two_simd_functions", "simd-divergence", {}),
    ("uneven_shuffle_mask", "simd-divergence", {}),
    ("simdgroup_barrier_in_branch", "simd-divergence", {}),
    ("partial_simdgroup_matrix", "simd-divergence", {"threads": 48}),
    ("inactive_lane", "undefined-behaviour", {"strict_simd": False}),
    ("leaked_private_pointer", "private-memory", {}),
    ("private_array_index", "undefined-behaviour", {}),
    ("vector_component_index", "undefined-behaviour", {}),
    ("misaligned_vector", "undefined-behaviour", {}),
    ("shift_too_far", "undefined-behaviour", {"dtype": INT}),
    ("division_by_zero", "undefined-behaviour", {"dtype": INT}),
    ("signed_overflow", "undefined-behaviour", {"dtype": INT}),
    ("float_beyond_int", "undefined-behaviour", {"dtype": INT}),
    ("stack_overflow", "fault", {"dtype": INT}),
    ("threadgroup_memory_limit", "limit", {}),
    ("declared_threads", "limit", {}),
    ("endless_loop", "hang", {"dtype": INT, "cpu_seconds": 0.2}),
    ("endless_barriers", "hang", {"dtype": INT, "cpu_seconds": 0.2}),
]


@pytest.mark.parametrize(("kernel", "kind", "launch"), CASES, ids=[c[0] for c in CASES])
def test_wrong_kernel_is_reported_at_its_line_and_the_right_one_is_not(check, kernel, kind, launch):
    for order in ORDERS:
        reports = run(check, f"{kernel}_wrong", order=order, **launch)
        assert {r.kind for r in reports} >= {kind}, (order, reports)
        line = LINES.get(kernel)
        if line:
            text = "\n".join(map(str, reports))
            assert f"mistakes.metal:{line}" in text, (order, text)
        assert not run(check, f"{kernel}_right", order=order, **launch)


def test_every_marked_line_is_asked_for():
    assert set(LINES) <= {c[0] for c in CASES} | {"reads_constant"}


FAST = ["buffer_overrun", "barrier_in_branch", "two_barriers", "simd_sum_in_branch"]
FAST += ["partial_simdgroup_matrix", "division_by_zero", "stack_overflow", "endless_loop"]
FAST += ["endless_barriers", "threadgroup_memory_limit"]


@pytest.mark.parametrize("kernel", FAST)
def test_fast_mode_finds_what_it_claims(fast, kernel):
    _, kind, launch = next(c for c in CASES if c[0] == kernel)
    if kernel == "buffer_overrun":  # the guard page lies behind the padding to 32 bytes
        launch = {"buffers": {0: np.zeros(63, FLOAT)}, "threads": 64}
        assert {r.kind for r in run(fast, "fills", **launch, outputs=[])} <= {"out-of-bounds"}
        launch = {}
    reports = run(fast, f"{kernel}_wrong", **launch)
    assert {r.kind for r in reports} == {kind}, reports
    assert not run(fast, f"{kernel}_right", **launch)


def test_argument_larger_than_its_buffer(check):
    def reports(size):
        return run(check, "needs_four", buffers={0: np.zeros(64, FLOAT), 1: np.zeros(size, FLOAT)})

    assert [r.kind for r in reports(3)] == ["out-of-bounds"]
    assert not reports(4)


def test_threads_per_threadgroup(check):
    buffers = {0: np.zeros(1025, FLOAT)}
    assert [r.kind for r in run(check, "fills", threads=1025, buffers=buffers)] == ["limit"]
    assert not run(check, "fills", threads=1024, buffers=buffers)


def test_unbound_buffer(check):
    assert [r.kind for r in run(check, "fills", buffers={}, inout=[])] == ["binding"]


def test_argument_that_depends_on_a_function_constant(check):
    y, x = np.zeros(64, FLOAT), np.ones(64, FLOAT)
    assert not run(check, "optional_argument", buffers={0: y})
    with_extra = {"constants": {"has_extra": True}}
    reports = run(check, "optional_argument", buffers={0: y}, **with_extra)
    assert [(r.kind, r.text) for r in reports] == [("binding", "buffer(1) is not bound")]
    assert not run(check, "optional_argument", buffers={0: y, 1: x}, **with_extra)
    assert y.tolist() == x.tolist()


def test_threadgroup_argument_without_a_length(check):
    assert [r.kind for r in run(check, "threadgroup_argument")] == ["binding"]
    assert not run(check, "threadgroup_argument", threadgroup_memory={0: 256})
    reports = run(check, "threadgroup_argument", threadgroup_memory={0: 252})
    assert [r.kind for r in reports] == ["out-of-bounds"]
    reports = run(check, "threadgroup_argument", threadgroup_memory={0: 32784})
    assert [r.kind for r in reports] == ["limit"]


def test_function_constant_without_a_value(check):
    assert not run(check, "reads_constant")
    check.constants, given = {}, check.constants
    try:
        reports = run(check, "reads_constant")
    finally:
        check.constants = given
    assert [r.kind for r in reports] == ["unset-constant"]
    assert reports[0].where == (f"mistakes.metal:{LINES['reads_constant']}",)


def test_errors_are_raised_with_file_and_line(check):
    with pytest.raises(MetalError, match=rf"mistakes\.metal:{LINES['buffer_overrun']}: write of 4"):
        check.run(
            "buffer_overrun_wrong", (1, 1, 1), (64, 1, 1), {0: np.zeros(64, FLOAT)}, outputs=[0]
        )


def test_race_names_both_places(check):
    line = LINES["missing_barrier"]
    places = {r.where for r in run(check, "missing_barrier_wrong")}
    assert (f"mistakes.metal:{line}", f"mistakes.metal:{line - 2}") in places


def test_lockstep_orders_the_memory_of_a_simdgroup(check):
    assert run(check, "simd_function_is_no_barrier_wrong")
    assert not run(check, "simd_function_is_no_barrier_wrong", lockstep=True)
    assert run(check, "simdgroup_barrier_is_local_wrong", lockstep=True)


REFUSED = [
    ("buffer index", "device float* y [[buffer(31)]]", "buffer.31., the last index is 30"),
    (
        "no attribute",
        "device float* y [[buffer(0)]], uint i",
        "parameter without an attribute: uint i",
    ),
]


@pytest.mark.parametrize(
    ("parameters", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refused_parameters(parameters, message):
    with pytest.raises(RewriteError, match=message):
        Library(f"#include <metal_stdlib>\nkernel void k({parameters}) {{}}\n")


def test_threadgroup_initialiser_is_refused():
    body = "threadgroup float a[4] = {1, 2, 3, 4}; y[0] = a[0];"
    source = (
        f"#include <metal_stdlib>\nkernel void k(device float* y [[buffer(0)]])\n{{ {body} }}\n"
    )
    with pytest.raises(RewriteError, match=r"kernel\.metal:3: threadgroup declaration"):
        Library(source)
