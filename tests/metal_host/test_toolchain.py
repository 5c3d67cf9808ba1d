"""Which compiler is used, what is cached, and that the runtime builds for the other architecture."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.metal_host import CompileError, Library
from tests.metal_host.build import build, generated_include
from tests.metal_host.native import FLAGS
from tests.metal_host.toolchain import MIN_CLANG, PACKAGE, _zig, cache_directory, toolchain

KERNEL = """#include <metal_stdlib>
kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = VALUE; }
"""


CACHED = (toolchain, cache_directory, generated_include)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache directory and no memory of the compiler."""
    monkeypatch.setenv("METAL_HOST_CACHE", str(tmp_path))
    for cached in CACHED:
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in CACHED:
        cached.cache_clear()


def test_compiler_is_recent_enough():
    version = toolchain().version
    assert version.startswith("clang version")
    assert int(version.split()[2].split(".")[0]) >= MIN_CLANG


def test_compiler_can_be_chosen(fresh):
    fresh.setenv("METAL_HOST_CXX", "zig")
    assert toolchain().is_zig
    toolchain.cache_clear()
    fresh.setenv("METAL_HOST_CXX", "no-such-compiler --flag")
    with pytest.raises(CompileError, match=r"no clang of version 17 .*no-such-compiler --flag"):
        toolchain()
    fresh.setenv("METAL_HOST_CXX", f"{sys.executable} --version")
    with pytest.raises(CompileError, match=r"tried: .*Python 3"):
        toolchain()


def test_objects_are_cached_by_content(fresh, tmp_path):
    def cached(source=KERNEL, value=1, **options):
        defaults = {"mode": "fast", "name": "k.metal", "defines": [f"VALUE={value}"]}
        return build(source, **{**defaults, **options}).was_cached

    assert not cached()
    assert cached()
    assert not cached(value=2)
    assert not cached(mode="check")
    assert not cached(auto_init="zero")
    assert cached(value=2)
    assert list(tmp_path.glob("*.so"))
    assert not [f for f in tmp_path.iterdir() if f.suffix in (".cpp", ".o")], "nothing is left over"


def test_unknown_kernels_and_modes_are_refused():
    with pytest.raises(CompileError, match=r"no entry point matches 'x'; it has: k"):
        Library(KERNEL, defines=["VALUE=1"], only="x")
    with pytest.raises(ValueError, match='expected mode "check" or "fast"; got \'slow\''):
        Library(KERNEL, mode="slow")


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_runtime_compiles_for(architecture, tmp_path):
    """The files that hold what differs between machines: registers, signals, the denormal mode."""
    for name in ("fiber", "signals"):
        done = subprocess.run(
            [
                *(*_zig(), "-target", f"{architecture}-linux-gnu", *FLAGS, "-Werror"),
                *("-c", str(PACKAGE / "runtime" / f"{name}.cpp"), "-o", str(tmp_path / name)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
