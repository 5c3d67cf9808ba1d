"""The race detector against the definition, on random programs.

A kernel interprets a program: at each step one thread makes one access, or all pass a barrier. The
definition looks at all pairs of accesses; the detector sees them one by one, in any order of threads,
and keeps a handful per byte. They must agree on whether there is a race, in every order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.metal_host import Library, Options

SOURCE = """#include <metal_stdlib>
using namespace metal;
// A step: what (0 access, 1 threadgroup barrier, 2 simdgroup barrier), flags or kind, group, thread,
// byte, bytes. Kinds: 0 read, 1 write, 2 atomic.
struct Step { int what, kind, group, who, at, bytes; };

#define BARRIER(function)                                                             \\
  switch (s.kind) {                                                                   \\
    case 0: function(mem_flags::mem_none); break;                                     \\
    case 1: function(mem_flags::mem_device); break;                                   \\
    case 2: function(mem_flags::mem_threadgroup); break;                              \\
    default: function(mem_flags::mem_device | mem_flags::mem_threadgroup);            \\
  }
#define ACCESS(SPACE, T)                                                              \\
  if (s.kind == 0) sum += *(SPACE T*)(memory + s.at);                                 \\
  if (s.kind == 1) *(SPACE T*)(memory + s.at) = T(t);

#define INTERPRET(SPACE)                                                              \\
  uint sum = 0;                                                                       \\
  for (int i = 0; i < count; i++) {                                                   \\
    const Step s = steps[i];                                                          \\
    if (s.what == 1) { BARRIER(threadgroup_barrier) }                                 \\
    if (s.what == 2) { BARRIER(simdgroup_barrier) }                                   \\
    if (s.what != 0 || s.group != int(group) || s.who != int(t)) continue;            \\
    if (s.kind == 2) {                                                                \\
      atomic_fetch_add_explicit((SPACE atomic_uint*)(memory + s.at), 1u, memory_order_relaxed); \\
    }                                                                                 \\
    if (s.bytes == 1) { ACCESS(SPACE, uchar) }                                        \\
    if (s.bytes == 2) { ACCESS(SPACE, ushort) }                                       \\
    if (s.bytes == 4) { ACCESS(SPACE, uint) }                                         \\
    if (s.bytes == 8) { ACCESS(SPACE, ulong) }                                        \\
  }                                                                                   \\
  sums[group * 64 + t] = sum;

#define PARAMETERS                                                                    \\
  const device Step* steps [[buffer(0)]], constant int& count [[buffer(1)]],          \\
      device uint* sums [[buffer(3)]], uint t [[thread_position_in_threadgroup]],     \\
      uint group [[threadgroup_position_in_grid]]
kernel void on_device(device uchar* memory [[buffer(2)]], PARAMETERS) { INTERPRET(device) }
kernel void on_threadgroup(PARAMETERS) {
  threadgroup uchar memory[16];
  INTERPRET(threadgroup)
}
"""
ACCESS, BARRIER, SIMDGROUP_BARRIER = range(3)
READ, WRITE, ATOMIC = range(3)
DEVICE, THREADGROUP = 1, 2
THREADS = (0, 1, 31, 32, 63)


@dataclass(frozen=True)
class Seen:
    """An access, and how many barriers of its memory class its threads had passed before it."""

    group: int
    thread: int
    kind: int
    at: int
    bytes: int
    barriers: int
    simdgroup_barriers: int

    def races_with(self, other: Seen) -> bool:
        apart = self.at + self.bytes <= other.at or other.at + other.bytes <= self.at
        both_read = self.kind == other.kind == READ
        both_atomic = self.kind == other.kind == ATOMIC
        same_thread = (self.group, self.thread) == (other.group, other.thread)
        if apart or both_read or both_atomic or same_thread:
            return False
        if self.group != other.group:
            return True
        same_simdgroup = self.thread // 32 == other.thread // 32
        ordered = self.barriers != other.barriers
        return not (
            ordered or (same_simdgroup and self.simdgroup_barriers != other.simdgroup_barriers)
        )


def has_race(program, memory_class):
    seen, barriers, simdgroup_barriers = [], 0, 0
    for what, kind, group, thread, at, size in program:
        if what == BARRIER:
            barriers += bool(kind & memory_class)
        elif what == SIMDGROUP_BARRIER:
            simdgroup_barriers += bool(kind & memory_class)
        else:
            seen.append(Seen(group, thread, kind, at, size, barriers, simdgroup_barriers))
    if memory_class == THREADGROUP:  # each threadgroup has its own
        pairs = (p for p in itertools.combinations(seen, 2) if p[0].group == p[1].group)
    else:
        pairs = itertools.combinations(seen, 2)
    return any(a.races_with(b) for a, b in pairs)


@st.composite
def accesses(draw):
    kind = draw(st.sampled_from([READ, WRITE, ATOMIC]))
    size = 4 if kind == ATOMIC else draw(st.sampled_from([1, 2, 4, 8]))
    at = size * draw(st.integers(0, 16 // size - 1))
    # Few places: collisions are the subject.
    return (ACCESS, kind, draw(st.integers(0, 1)), draw(st.sampled_from(THREADS)), at, size)


BARRIERS = st.tuples(
    st.sampled_from([BARRIER, SIMDGROUP_BARRIER]), st.integers(0, 3), *[st.just(0)] * 4
)
PROGRAMS = st.lists(accesses() | BARRIERS, min_size=2, max_size=14)


@pytest.fixture(scope="module")
def library():
    return Library(SOURCE)


@settings(max_examples=150, deadline=None)
@given(program=PROGRAMS, seed=st.integers(2, 1 << 30))
@pytest.mark.parametrize("memory_class", [DEVICE, THREADGROUP], ids=["device", "threadgroup"])
def test_detector_agrees_with_the_definition(library, memory_class, program, seed):
    buffers = {
        0: np.array(program, np.int32),
        1: np.int32(len(program)),
        3: np.empty(128, np.uint32),
    }
    inout, kernel = [], "on_threadgroup"
    if memory_class == DEVICE:
        buffers[2], inout, kernel = np.zeros(16, np.uint8), [2], "on_device"
    for order in (0, 1, seed):
        result = library.run(
            kernel,
            (2, 1, 1),
            (64, 1, 1),
            buffers,
            outputs=[3],
            inout=inout,
            options=Options(order=order),
            raise_errors=False,
        )
        kinds = {r.kind for r in result.reports} - {"uninitialised-read"}
        assert kinds == ({"data-race"} if has_race(program, memory_class) else set()), order
