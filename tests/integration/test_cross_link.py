"""The macOS extension compiles, links, and leaves no symbol to chance; the check sees mistakes."""

import subprocess
import sys

import pytest

from tests.build_scripts import ROOT, load

pytest.importorskip("ziglang", reason="the cross compiler comes with the extra `test`")
cross_link, check_macho = load("cross_link"), load("check_macho")
WORK = ROOT / "build" / "cross-macos"

GOOD = """
#include "mlx/ops.h"
#include "mlx/backend/metal/device.h"
namespace mx = mlx::core;
extern "C" void call(mx::array& a, mx::Stream s) {
  a = mx::abs(a, s);
  mx::metal::get_command_encoder(s).set_input_array(a, 0);
}
"""
# Declared in a header of the wheel, and hidden in libmlx.
HIDDEN = """
#include "mlx/backend/metal/device.h"
extern "C" bool call() { return mlx::core::metal::is_nax_available(); }
"""
# libmlx exports abs(array const&, StreamOrDevice); this is what an older header might declare.
WRONG_SIGNATURE = """
#include "mlx/array.h"
namespace mlx::core { array abs(const array& a, int stream); }
extern "C" void call(mlx::core::array& a) { a = mlx::core::abs(a, 0); }
"""


def check_planted(source, folder):
    mlx = cross_link.download_mlx(WORK)
    (folder / "planted.cpp").write_text(source)
    # fmt: off
    subprocess.run(
        [sys.executable, ROOT / "cmake/zig/c++", "-std=c++20", "-D_METAL_", "-bundle",
         "-I", ROOT / "cmake/macos-stubs", "-I", mlx / "include", "-I", mlx / "include/metal_cpp",
         folder / "planted.cpp", mlx / "lib/libmlx.dylib", "-o", folder / "planted.so"],
        check=True, timeout=900,
    )
    # fmt: on
    return check_macho.check(folder / "planted.so", mlx / "lib/libmlx.dylib")[2]


@pytest.mark.mlx_wheel
def test_good_symbols_pass(tmp_path):
    assert check_planted(GOOD, tmp_path) == []


@pytest.mark.mlx_wheel
def test_a_hidden_symbol_is_found(tmp_path):
    (name,) = check_planted(HIDDEN, tmp_path)
    assert "is_nax_available" in name


@pytest.mark.mlx_wheel
def test_a_wrong_signature_is_found(tmp_path):
    (name,) = check_planted(WRONG_SIGNATURE, tmp_path)
    assert "3abs" in name


@pytest.mark.mlx_wheel
@pytest.mark.slow
def test_the_extension_links(tmp_path):
    """The whole extension, with the parts that only a Metal build compiles."""
    extension, libmlx = cross_link.build(WORK)
    from_mlx, _, missing = check_macho.check(extension, libmlx)
    assert missing == []
    assert from_mlx > 20
    # The Metal parts are in: the encoder dispatches.
    used = check_macho.Image.read(extension).undefined
    assert any("CommandEncoder21dispatch_threadgroups" in name for name in used)
