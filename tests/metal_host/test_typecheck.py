"""The type check refuses what Apple's compiler refuses, and nothing of a good kernel."""

from __future__ import annotations

import pytest

from tests.metal_host import typecheck

GOOD = """#include <metal_stdlib>
using namespace metal;
struct Params { int n; float scale; };
template <typename T> inline T load(const device T* p, int i) { return p[i]; }
METAL_FUNC float mix_in(thread const float* x, threadgroup float* y) { y[0] = x[0]; return y[1]; }
struct Tile {
  float value[2];
  METAL_FUNC float sum() const thread { return value[0] + value[1]; }
};
template <typename T>
[[kernel]] void k(const device T* x [[buffer(0)]], device float4* y [[buffer(1)]],
                  constant Params& p [[buffer(2)]], device atomic_uint* c [[buffer(3)]],
                  uint i [[thread_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float buf[64];
  float own[2] = {1, 2};
  Tile tile;
  tile.value[0] = tile.value[1] = lane;
  simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(0.f);
  simdgroup_load(m, buf, 8);
  simdgroup_store(m, (device float*)y, 8);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float4 v = float4(load(x, i), 1, float2(2));
  v.xy = v.zw * p.scale;
  y[i] = v + vec<float, 4>(mix_in(own, buf)) * tile.sum();
  bfloat b = bfloat(1.0f);
  half h = half(v.x) + half(float(b));
  y[0].x = simd_sum(float(h));
  atomic_fetch_add_explicit(c, 1u, memory_order_relaxed);
}
template [[host_name("k_f")]] [[kernel]] decltype(k<float>) k<float>;
"""

# what is wrong, the good text, what stands there instead, line of the diagnostic, its words
MISTAKES = [
    (
        "pointer without address space",
        "const device T* p, int i",
        "const T* p, int i",
        4,
        "address space",
    ),
    (
        "device passed as threadgroup",
        "mix_in(own, buf)",
        "mix_in(own, (device float*)y)",
        24,
        "no matching function",
    ),
    (
        "threadgroup passed as thread",
        "mix_in(own, buf)",
        "mix_in(buf, buf)",
        24,
        "no matching function",
    ),
    ("write to constant", "v.xy = v.zw", "p.n = 3; v.xy = v.zw", 23, "const"),
    ("argument without device", "device float4* y [[", "float4* y [[", 11, "address space"),
    ("cast drops the space", "(device float*)y", "(float*)y", 20, ""),
    ("double", "float own[2]", "double own[2]", 15, "Metal has no type double"),
    ("implicit float to bfloat", "bfloat(1.0f)", "v.x", 25, "precision"),
    ("thread pointer unnamed", "thread const float* x", "const float* x", 5, "address space"),
    ("too many vector elements", "1, float2(2))", "1, 2, float2(2))", 22, "vector elements"),
    (
        "atomic in thread memory",
        "atomic_fetch_add_explicit(c,",
        "atomic_uint q; atomic_fetch_add_explicit(&q,",
        28,
        "no matching function",
    ),
    ("sum of bfloat", "simd_sum(float(h))", "simd_sum(b)", 27, "no matching function"),
    (
        "operator new",
        "float own[2] = {1, 2};",
        "float own[2] = {1, 2}; (void)new int;",
        15,
        "operator new",
    ),
    ("goto", "bfloat b", "goto end; end: bfloat b", 25, "goto"),
    (
        "uninitialised variable",
        "half h = half(v.x)",
        "float u; half h = half(u)",
        26,
        "uninitialized",
    ),
    ("undeclared name", "load(x, i)", "load(z, i)", 22, "undeclared"),
    (
        "simdgroup matrix of int",
        "simdgroup_float8x8 m =",
        "simdgroup_matrix<int, 8, 8> w; simdgroup_float8x8 m =",
        None,
        "float, half or bfloat",
    ),
    ("buffer 31", "buffer(3)", "buffer(31)", None, "the last index is 30"),
    (
        "parameter without attribute",
        "uint i [[thread_position_in_grid]]",
        "uint i",
        None,
        "without an attribute",
    ),
]


def test_good_kernel_has_no_diagnostic():
    assert typecheck(GOOD) == []


@pytest.mark.parametrize(
    ("good", "bad", "line", "words"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistake_is_refused_at_its_line(good, bad, line, words):
    source = GOOD.replace(good, bad, 1)
    assert source != GOOD
    diagnostics = typecheck(source)
    place = "" if line is None else f"kernel.metal:{line}: "
    assert any(place in d and words in d for d in diagnostics), diagnostics


def test_bytes_beyond_ascii_are_refused(tmp_path):
    path = tmp_path / "k.metal"
    path.write_text(GOOD + "// caf\u00e9\n", encoding="utf-8")
    (diagnostic,) = typecheck(path)
    assert diagnostic.startswith("k.metal: not ASCII")
