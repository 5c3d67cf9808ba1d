"""The C++ compiler that turns kernels into shared objects, and where they are kept.

``METAL_HOST_CXX`` chooses the compiler: a command, or ``zig`` for the one that ``pip install
ziglang`` brings. Without it the newest ``clang++`` of at least version 17 on the path is taken, and
ziglang's where there is none. (Measured: clang 19 and zig 0.17, which is clang 22, run the whole
suite; clang 14 has no arithmetic on ``__bf16`` and does not know the half-precision flags.)

``METAL_HOST_CACHE`` chooses the directory of built objects, else ``$XDG_CACHE_HOME`` or
``~/.cache``, ``/chunkdelta/metal_host``. File names are hashes of everything that goes into a file,
so the directory may be shared, kept and deleted at will.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

MIN_CLANG = 17
PACKAGE = Path(__file__).resolve().parent


class CompileError(RuntimeError):
    """The compiler refused a source; the message is its own."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler command and its version line."""

    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        return "zig" in Path(self.command[0]).name

    def run(
        self, arguments: list[str], stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the compiler; the caller looks at the return code."""
        return subprocess.run(
            [*self.command, *arguments], input=stdin, capture_output=True, text=True, check=False
        )

    def architecture_flags(self) -> list[str]:
        """Half-precision conversions in hardware; no wider vectors, no run-time dispatch."""
        machine = platform.machine()
        if machine in ("x86_64", "AMD64"):
            return ["-march=x86_64_v3" if self.is_zig else "-march=x86-64-v3"]
        if machine in ("aarch64", "arm64"):
            return ["-fsigned-char"] if self.is_zig else ["-march=armv8.2-a+fp16", "-fsigned-char"]
        raise CompileError(f"the Metal host runner knows x86-64 and aarch64 only; got {machine}")


def _zig() -> tuple[str, ...] | None:
    try:
        import ziglang  # type: ignore[import-untyped]
    except ImportError:
        return None
    return (str(Path(ziglang.__file__).parent / "zig"), "c++")


def _candidates() -> list[tuple[str, ...]]:
    chosen = os.environ.get("METAL_HOST_CXX")
    zig = _zig()
    if chosen == "zig":
        if not zig:
            raise CompileError("METAL_HOST_CXX=zig, but ziglang is not installed")
        return [zig]
    if chosen:
        return [tuple(chosen.split())]
    names = [f"clang++-{v}" for v in range(30, MIN_CLANG - 1, -1)] + ["clang++"]
    found = [(path,) for path in map(shutil.which, names) if path]
    return [*found, zig] if zig else [*found]


@functools.cache
def toolchain() -> Toolchain:
    """The compiler in use.

    Raises:
      CompileError: there is no clang of at least version 17 and no ziglang.
    """
    tried = []
    for command in _candidates():
        try:
            out = subprocess.run(
                [*command, "--version"], capture_output=True, text=True, check=False
            ).stdout
        except OSError as error:
            tried.append(f"{' '.join(command)}: {error}")
            continue
        version = re.search(r"clang version (\d+)[^\n]*", out)
        if version and int(version.group(1)) >= MIN_CLANG:
            return Toolchain(command, version.group(0))
        tried.append(f"{' '.join(command)}: {out.splitlines()[0] if out else 'no version'}")
    raise CompileError(
        f"no clang of version {MIN_CLANG} or later (pip install ziglang brings one); tried: "
        + ("; ".join(tried) or "nothing")
    )


@functools.cache
def cache_directory() -> Path:
    """The directory of built objects, made if need be."""
    chosen = os.environ.get("METAL_HOST_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    path = Path(chosen) if chosen else base / "chunkdelta" / "metal_host"
    path.mkdir(parents=True, exist_ok=True)
    return path


def digest(*parts: object) -> str:
    """A file-name-sized hash of everything given."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part if isinstance(part, bytes) else repr(part).encode())
        h.update(b"\0")
    return h.hexdigest()[:24]


def publish(built: Path, target: Path) -> None:
    """Moves a finished file into the cache in one step: other processes build the same ones."""
    os.replace(built, target)


def scratch_file(suffix: str) -> Path:
    """A new empty file in the cache directory."""
    handle, name = tempfile.mkstemp(suffix=suffix, dir=cache_directory())
    os.close(handle)
    return Path(name)
