"""The front door: a library is built, run, checked and counted."""

from __future__ import annotations

import doctest
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.metal_host import CompileError, Library, MetalError, Options, execute_plan, flatten

SUM = """
#include <metal_stdlib>
using namespace metal;
constant int factor [[function_constant(3)]];
template <typename T>
[[kernel]] void sum(const device T* x [[buffer(0)]], device T* y [[buffer(1)]],
                    constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]],
                    uint sg [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]],
                    uint group [[threadgroup_position_in_grid]]) {
  threadgroup float part[8];
  const float v = simd_sum(i < n ? float(x[i]) : 0.0);
  if (lane == 0) part[sg] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg == 0) {
    const float total = simd_sum(lane < 8 ? part[lane] : 0.0);
    if (lane == 0) y[group] = T(total * factor);
  }
}
template [[host_name("sum_f32")]] [[kernel]] decltype(sum<float>) sum<float>;
template [[host_name("sum_f16")]] kernel void sum<half>(const device half*, device half*,
                                                        constant uint&, uint, uint, uint, uint);
"""


def reference(x, groups):
    return np.pad(x, (0, groups * 256 - x.size)).reshape(groups, 256).sum(1, dtype=np.float64)


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize(
    ("kernel", "dtype", "bound"), [("sum_f32", "f4", 1e-6), ("sum_f16", "f2", 1e-3)]
)
def test_instantiations_give_the_sums(mode, kernel, dtype, bound):
    library = Library(SUM, mode=mode, constants={"factor": 2})
    x = np.random.default_rng(0).random(1000).astype(dtype)
    y = np.empty(4, dtype)
    library.run(kernel, (4, 1, 1), (256, 1, 1), {0: x, 1: y, 2: np.uint32(1000)}, outputs=[1])
    np.testing.assert_allclose(y, 2 * reference(x, 4), rtol=bound)
    assert library.kernels == ["sum_f32", "sum_f16"]


def test_counters_are_exact():
    library = Library(SUM, constants={3: 1})
    x, y = np.ones(1000, np.float32), np.empty(4, np.float32)
    buffers = {0: x, 1: y, 2: np.uint32(1000)}
    counters = library.run("sum_f32", (4, 1, 1), (256, 1, 1), buffers, outputs=[1]).counters
    assert counters.simd_reductions == 4 * (8 + 1)
    assert counters.threadgroup_barriers == 4
    assert counters.device_bytes_read == 1000 * 4 + 1024 * 4  # x, and n in every thread
    assert counters.device_bytes_written == 4 * 4
    assert counters.threadgroup_bytes_read == counters.threadgroup_bytes_written == 4 * 8 * 4
    assert counters.threadgroup_memory == 32


def test_orders_are_deterministic_by_seed():
    source = """#include <metal_stdlib>
using namespace metal;
kernel void ticket(device atomic_uint* next [[buffer(0)]], device uint* order [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  order[atomic_fetch_add_explicit(next, 1u, memory_order_relaxed)] = i;
}
"""
    library = Library(source, mode="fast")

    def order(seed):
        out = np.empty(256, np.uint32)
        buffers = {0: np.zeros(1, np.uint32), 1: out}
        options = Options(order=seed)
        library.run(
            "ticket", (4, 1, 1), (64, 1, 1), buffers, outputs=[1], inout=[0], options=options
        )
        return out.tolist()

    assert order(0) == list(range(256))
    assert order(1) == list(range(256))[::-1]
    assert order(7) == order(7) != order(8)
    assert sorted(order(7)) == list(range(256))


def test_a_refused_source_names_file_and_line():
    broken = SUM.replace("simd_sum(i < n", "simd_summ(i < n")
    with pytest.raises(CompileError, match=r"kernel\.metal:12"):
        Library(broken, constants={3: 1})


def test_flattened_source_needs_no_include_path(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "half.h").write_text(
        "#pragma once\ninline float f(float x) { return x / 2; }\n"
    )
    (tmp_path / "k.metal").write_text(
        '#include <metal_stdlib>\n#include "common/half.h"\n#include "common/half.h"\n'
        "kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]])\n"
        "{ y[i + 4] = f(i); }\n"
    )
    text = flatten(tmp_path / "k.metal", [tmp_path])
    with pytest.raises(CompileError, match="half"):
        Library((tmp_path / "k.metal").read_text() + "\n")
    for library in (Library(text), Library(tmp_path / "k.metal", include=[tmp_path])):
        with pytest.raises(MetalError, match=r"out-of-bounds: k\.metal:5"):
            library.run("k", (1, 1, 1), (32, 1, 1), {0: np.empty(35, np.float32)}, outputs=[0])


def plan(launches, scratch=(), host_data=()):
    return SimpleNamespace(op="test", launches=launches, scratch=scratch, host_data=host_data)


def launch(kernel, buffers, **fields):
    names = ("index", "role", "access", "offset_bytes")
    defaults = {"constants": [], "params": [], "threadgroup_memory": []}
    return SimpleNamespace(
        source="two",
        kernel=kernel,
        grid=(1, 1, 1),
        threadgroup=(32, 1, 1),
        buffers=[SimpleNamespace(**dict(zip(names, b, strict=True))) for b in buffers],
        **{**defaults, **fields},
    )


@pytest.fixture
def root(tmp_path):
    (tmp_path / "two.metal").write_text(
        """#include <metal_stdlib>
using namespace metal;
struct Params { float scale; };
kernel void first(const device float* x [[buffer(0)]], device float* t [[buffer(1)]],
                  constant Params& p [[buffer(2)]], threadgroup float* s [[threadgroup(0)]],
                  uint i [[thread_position_in_grid]]) {
  s[i] = x[i] * p.scale;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  t[i] = s[31 - i];
}
kernel void second(device float* t [[buffer(0)]], const device int* add [[buffer(1)]],
                   device float* y [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  y[i] = t[i] + add[i];
}
"""
    )
    return tmp_path


def two_launches(**change):
    params = SimpleNamespace(index=2, bytes=np.float32(3).tobytes())
    memory = SimpleNamespace(index=0, bytes=128)
    first = launch(
        "first",
        [(0, "x", "Read", 0), (1, "t", "Write", 0)],
        params=[params],
        threadgroup_memory=[memory],
    )
    second = launch(
        "second",
        [(0, "t", "Read", 0), (1, "add", "Read", 0), (2, "y", change.get("y", "Write"), 128)],
    )
    return plan(
        [first, second],
        [SimpleNamespace(role="t", bytes=128)],
        [SimpleNamespace(role="add", bytes=np.arange(32, dtype=np.int32).tobytes())],
    )


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_plan_gives_arrays_reports_and_counters(root, mode):
    x, y = np.arange(32, dtype=np.float32), np.zeros(64, np.float32)
    result = execute_plan(two_launches(), {"x": x, "y": y}, mode=mode, root=root)
    np.testing.assert_array_equal(result.arrays["y"][32:], 3 * x[::-1] + x)
    np.testing.assert_array_equal(result.arrays["y"][:32], 0)
    assert list(result.arrays) == ["y"]
    assert not y.any(), "the caller's arrays stay as they are"
    assert result.counters.threadgroup_barriers == 1
    assert result.counters.threadgroup_memory == 128


def test_plan_reports_what_breaks_its_bindings(root):
    arrays = {"x": np.ones(32, np.float32), "y": np.zeros(64, np.float32)}
    with pytest.raises(
        MetalError, match=r"read-only-write: two\.metal:13: write to read-only buffer 'y'"
    ):
        execute_plan(two_launches(y="Read"), arrays, root=root)
    with pytest.raises(MetalError, match="unwritten-output: 128 bytes of 'y'"):
        execute_plan(two_launches(), arrays, outputs=["y"], root=root)
    swapped = two_launches()
    swapped.launches.reverse()
    with pytest.raises(MetalError, match=r"uninitialised-read: two\.metal:13: .*scratch 't'"):
        execute_plan(swapped, arrays, root=root)
    pool = np.zeros(80, np.float32)
    with pytest.raises(ValueError, match="got arrays that overlap"):
        execute_plan(two_launches(), {"x": pool[:32], "y": pool[16:]}, root=root)
    with pytest.raises(ValueError, match=r"expected arrays for the roles of test, \['x', 'y'\]"):
        execute_plan(two_launches(), {"x": arrays["x"]}, root=root)


def test_documented_examples_run():
    modules = [sys.modules[f"tests.metal_host.{name}"] for name in ("run", "plan", "typecheck")]
    results = [doctest.testmod(m, extraglobs={"np": np}) for m in modules]
    assert all(r.attempted for r in results)
    assert not any(r.failed for r in results)
