"""The runtime on aarch64, under QEMU's user emulation: same bits, same reports as here."""

from __future__ import annotations

import platform
import shutil
import subprocess

import numpy as np
import pytest

from tests.metal_host import Library, Options
from tests.metal_host.build import compile_flags, translate
from tests.metal_host.report import KINDS
from tests.metal_host.toolchain import PACKAGE, _zig, toolchain

pytestmark = [
    pytest.mark.skipif(
        shutil.which("qemu-aarch64") is None, reason="needs qemu-aarch64 (Debian: qemu-user)"
    ),
    pytest.mark.skipif(platform.machine() == "aarch64", reason="every other test runs on aarch64"),
]

SOURCE = """#include <metal_stdlib>
using namespace metal;
#define KERNEL(name)                                                                        \\
  kernel void name(device float* y [[buffer(0)]], const device float* x [[buffer(1)]],       \\
                   uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]])
KERNEL(exchange) {
  threadgroup float a[64];
  a[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[63 - i] + simd_sum(x[i]) + simd_shuffle_xor(x[i], 3);
}
KERNEL(halves) { y[i] = float(half(x[i]) * 0.1h + half(1) / half(x[i] + 1)) + float(bfloat(x[i] * 1.01f)); }
KERNEL(functions) { y[i] = sqrt(x[i]) + fma(x[i], 0.1f, 1.0f) + floor(x[i] * 0.3f); }
KERNEL(products) {
  simdgroup_float8x8 a, b;
  simdgroup_load(a, x, 8);
  simdgroup_load(b, x, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(a, a, b, a);
  if (i < 32) y[i] = a.thread_elements()[0];
}
KERNEL(race) {
  threadgroup float a[64];
  a[i] = i;
  y[i] = a[i ^ 1];
}
KERNEL(overrun) { y[i + 1] = 1; }
KERNEL(divergent) {
  if (i < 5) threadgroup_barrier(mem_flags::mem_none);
}
KERNEL(misaligned) { y[i] = i == 0 ? ((const device float4*)(x + 1))[0].x : 0; }
KERNEL(null) { y[i] = *(const device float*)(ulong(i)); }
KERNEL(endless) {
  while (x[i] >= 0) y[i] += 1;
}
"""


def native():
    library = Library(SOURCE)
    for kernel in library.kernels:
        y, x = np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
        reports = library.run(
            kernel,
            (1, 1, 1),
            (64, 1, 1),
            {0: y, 1: x},
            inout=[0],
            options=Options(cpu_seconds=0.2),
            raise_errors=False,
        ).reports
        yield kernel, [r.kind for r in reports], y


def emulated(directory):
    unit = translate(SOURCE, name="kernel.metal")
    (directory / "kernel.cpp").write_text(unit.library + unit.code)
    target = [*_zig(), "-target", "aarch64-linux-musl", "-fsigned-char"]
    runtime = [str(f) for f in sorted((PACKAGE / "runtime").glob("*.cpp"))]
    driver = str(PACKAGE / "cross" / "driver.cpp")
    steps = [
        [*target, *compile_flags("check"), "-c", "kernel.cpp", "-o", "kernel.o"],
        [*target, "-std=c++17", "-O2", "-static", driver, *runtime, "kernel.o", "-o", "run"],
        ["qemu-aarch64", "./run"],
    ]
    for step in steps:
        done = subprocess.run(step, cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        head, bits = line.split(":")
        kernel, *kinds = head.split()
        y = np.array([int(b, 16) for b in bits.split()], np.uint32).view(np.float32)
        yield kernel, [KINDS[int(k)] for k in kinds], y


def test_same_bits_and_reports(tmp_path):
    assert toolchain(), "translate needs a compiler"
    here, there = list(native()), list(emulated(tmp_path))
    assert [(k[0], set(k[1])) for k in there] == [(k[0], set(k[1])) for k in here]
    for (kernel, kinds, y), (*_, got) in zip(here, there, strict=True):
        if not kinds:
            np.testing.assert_array_equal(got, y, err_msg=kernel)
    found = {kernel: set(kinds) for kernel, kinds, _ in there if kinds}
    assert "data-race" in found.pop("race")
    assert found == {
        "overrun": {"out-of-bounds"},
        "divergent": {"barrier-divergence"},
        "misaligned": {"undefined-behaviour"},
        "null": {"out-of-bounds"},
        "endless": {"hang"},
    }
