"""Compiles and links the macOS arm64 extension on this machine, and checks its symbols.

MLX's macOS wheels come from PyPI, the compiler is ziglang's and CMake pip's (extra
`test`; CMake before 4 wants Apple's sw_vers). This is where the parts
of the C++ under ``#ifdef _METAL_`` are compiled without a Mac; it says nothing about running them.

    python cmake/cross_link.py [--work build/cross-macos]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_macho

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "macosx_14_0_arm64"


def mlx_version() -> str:
    """The version that pyproject.toml pins."""
    pin = re.search(r'"mlx==([0-9.]+);', (ROOT / "pyproject.toml").read_text())
    if pin is None:
        raise RuntimeError("pyproject.toml pins no mlx")
    return pin.group(1)


def download_mlx(work: Path) -> Path:
    """The macOS wheels of MLX, unpacked: the path of its package. Downloaded once per version."""
    version = mlx_version()
    unpacked = work / f"mlx-{version}-{PLATFORM}"
    if not unpacked.is_dir():
        wheels = work / "wheels"
        # fmt: off
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
             "--only-binary=:all:", "--platform", PLATFORM,
             "--python-version", f"{sys.version_info.major}.{sys.version_info.minor}",
             f"mlx=={version}", f"mlx-metal=={version}", "--dest", str(wheels)],
            check=True,
        )
        # fmt: on
        partial = unpacked.with_suffix(".partial")
        for wheel in wheels.glob(f"mlx*-{version}-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial)
        partial.rename(unpacked)
    return unpacked / "mlx"


def environment() -> dict[str, str]:
    """The wrappers of cmake/zig call ``python3``: it must be the one that has ziglang."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def build(work: Path) -> tuple[Path, Path]:
    """The linked extension, and the libmlx.dylib that it was linked with."""
    mlx = download_mlx(work)
    tree = work / "build"
    # fmt: off
    subprocess.run(
        [sys.executable, "-m", "cmake", "-S", str(ROOT), "-B", str(tree), "-G", "Ninja",
         "-DCMAKE_BUILD_TYPE=MinSizeRel", f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja', path=environment()['PATH'])}",
         f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/macos-cross.cmake'}",
         f"-DMLX_ROOT={mlx}", f"-DPython_EXECUTABLE={sys.executable}"],
        check=True, env=environment(), stdout=subprocess.DEVNULL,
    )
    # fmt: on
    subprocess.run(
        [sys.executable, "-m", "cmake", "--build", str(tree)], check=True, env=environment()
    )
    (extension,) = tree.glob("_ext*.so")
    return extension, mlx / "lib" / "libmlx.dylib"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "cross-macos")
    extension, libmlx = build(parser.parse_args().work.resolve())
    sys.argv[1:] = [str(extension), str(libmlx)]
    check_macho.main()


if __name__ == "__main__":
    main()
