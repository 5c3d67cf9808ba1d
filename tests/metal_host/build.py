"""From a .metal source to a shared object: preprocess, rewrite, compile, cache."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .overloads import drop_collisions
from .rewrite import EntryPoint, Rewritten, rewrite
from .shim import swizzles_header
from .toolchain import (
    PACKAGE,
    CompileError,
    Toolchain,
    cache_directory,
    digest,
    publish,
    scratch_file,
    toolchain,
)

# What Metal means and C++ does not say by itself: literals are float, half and bfloat round after
# every operation, contraction within an expression only (MathModeSafe, MLX's default).
LANGUAGE_FLAGS = [
    "-std=c++17",
    "-x",
    "c++",
    "-nostdinc",
    "-fdeclspec",
    "-fno-exceptions",
    "-fno-rtti",
    "-Xclang",
    "-cl-single-precision-constant",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-ffp-contract=on",
    "-fno-strict-aliasing",
    "-fno-delete-null-pointer-checks",  # an unbound optional argument is a null pointer
    "-Wno-reserved-user-defined-literal",
    "-fno-caret-diagnostics",
    "-D__METAL__=1",
    "-D__METAL_VERSION__=320",
    "-D__METAL_MACOS__=1",
]
OBJECT_FLAGS = ["-w", "-fPIC", "-fvisibility=hidden", "-g1"]
MODE_FLAGS = {
    "fast": ["-O2"],
    "check": [
        "-O1",
        # Instrumented accesses are at most 16 bytes wide and must stay as written.
        "-fno-vectorize",
        "-fno-slp-vectorize",
        "-fsanitize=thread",
        "-mllvm",
        "-tsan-instrument-func-entry-exit=0",
        "-mllvm",
        "-tsan-instrument-read-before-write=1",
        "-fsanitize=bounds,alignment,shift-exponent,integer-divide-by-zero,"
        "signed-integer-overflow,float-cast-overflow,unreachable,return",
        "-fsanitize-recover=all",
    ],
}
# Content of private variables that the kernel did not initialise.
AUTO_INIT = ("pattern", "zero")

_ADDRESS_SPACES = "\n#define device\n#define constant\n#define threadgroup\n#define thread\n"
_NO_SANITIZER = '__attribute__((no_sanitize("thread"), nodebug))'
_EXPORT = 'extern "C" __attribute__((visibility("default")))'


@dataclass(frozen=True)
class Built:
    """A shared object, and what its source declares."""

    path: Path
    rewritten: Rewritten
    entries: tuple[EntryPoint, ...]
    was_cached: bool


@functools.cache
def generated_include() -> Path:
    """Directory of the generated header, made on first use."""
    text = swizzles_header()
    directory = cache_directory() / f"include-{digest(text)}"
    header = directory / "swizzles.h"
    if not header.exists():
        directory.mkdir(exist_ok=True)
        temporary = scratch_file(".h")
        temporary.write_text(text)
        publish(temporary, header)
    return directory


@functools.cache
def _library_digest() -> str:
    """Hash of the executing standard library, which is part of every kernel's text."""
    files = sorted([*(PACKAGE / "include").rglob("*"), PACKAGE / "runtime" / "abi.h"])
    return digest(*(f.read_bytes() for f in files if f.is_file()), swizzles_header())


def preprocess(
    source: str,
    name: str,
    include: Sequence[str | Path],
    defines: Sequence[str],
    library: Path,
    extra: Sequence[str] = (),
) -> tuple[str, str]:
    """Expands ``source``; returns the standard library's text and the user's, line markers kept.

    Raises:
      CompileError: the preprocessor failed, or a file is not ASCII.
    """
    directories = [library, *include]
    flags = [f for d in directories for f in ("-I", str(d))]
    text = f'#include <metal_stdlib>\n# 1 "{name}"\n{source}'
    done = toolchain().run(
        [*LANGUAGE_FLAGS, *extra, *(f"-D{d}" for d in defines), *flags, "-E", "-"], stdin=text
    )
    if done.returncode:
        raise CompileError(done.stderr)
    split = done.stdout.index(f'# 1 "{name}"')
    return done.stdout[:split], done.stdout[split:]


@dataclass(frozen=True)
class Translated:
    """C++ of a Metal source: the standard library's part, its own, and what it declares."""

    library: str
    code: str
    rewritten: Rewritten
    entries: tuple[EntryPoint, ...]


def translate(
    source: str,
    *,
    name: str,
    include: Sequence[str | Path] = (),
    defines: Sequence[str] = (),
    only: str | None = None,
) -> Translated:
    """Preprocesses and rewrites a Metal source; arguments and errors as for ``build``."""
    library, user = preprocess(
        source, name, include, defines, PACKAGE / "include", ["-I", str(generated_include())]
    )
    rewritten = rewrite(user)
    entries = tuple(e for e in rewritten.entries if only is None or re.fullmatch(only, e.host_name))
    if not entries:
        names = ", ".join(e.host_name for e in rewritten.entries) or "none"
        raise CompileError(f"{name}: no entry point matches {only!r}; it has: {names}")
    code = _ADDRESS_SPACES + rewritten.text + _entry_table(rewritten, entries)
    return Translated(library, code, rewritten, entries)


def compile_flags(mode: str, auto_init: str = "pattern") -> list[str]:
    """Flags of a kernel's translation unit, but for the architecture's."""
    return [
        *LANGUAGE_FLAGS,
        *OBJECT_FLAGS,
        *MODE_FLAGS[mode],
        f"-ftrivial-auto-var-init={auto_init}",
    ]


def build(
    source: str,
    *,
    name: str,
    mode: str,
    include: Sequence[str | Path] = (),
    defines: Sequence[str] = (),
    only: str | None = None,
    auto_init: str = "pattern",
) -> Built:
    """Compiles a Metal source, or finds the object of an earlier time.

    Args:
      source: text of the .metal file.
      name: what reports call it.
      mode: "fast" or "check".
      include: directories of ``#include``.
      defines: ``NAME`` or ``NAME=value``.
      only: regular expression; entry points whose host name it does not match in full are left out.
      auto_init: "pattern" or "zero", the content of uninitialised private variables.

    Raises:
      CompileError: with the compiler's message.
      RewriteError: the source uses a form that is not understood.
    """
    unit = translate(source, name=name, include=include, defines=defines, only=only)
    tools = toolchain()
    flags = [*compile_flags(mode, auto_init), *tools.architecture_flags()]
    key = digest(unit.code, _library_digest(), flags, tools.command, tools.version)
    target = cache_directory() / f"{key}.so"
    cached = target.exists()
    if not cached:
        _compile(tools, unit.library + unit.code, flags, target)
    return Built(target, unit.rewritten, unit.entries, cached)


def _entry_table(rewritten: Rewritten, entries: Sequence[EntryPoint]) -> str:
    code = ['\n# 1 "entry_points"\n']
    rows = []
    for i, entry in enumerate(entries):
        kernel = rewritten.kernels.get(entry.kernel)
        if kernel is None:
            raise CompileError(f"instantiation of {entry.kernel}, which is no kernel")
        binds = ", ".join(
            f"{{{b.kind}, {b.index}, {f'!!({b.condition})' if b.condition else '1'}}}"
            for b in kernel.bindings
        )
        count = len(kernel.bindings)
        limit = "0"
        if kernel.max_threads:
            limit = kernel.max_threads + entry.expression[len(entry.expression.split("<")[0]) :]
        # Not constant: the conditions are function constants, known when the object is loaded.
        code.append(
            f"static mh_bind mh_binds_{i}[] = {{ {binds or '{0, 0, 0}'} }}; "
            f"static {_NO_SANITIZER} void mh_call_{i}(const mh_entry* e, const mh_context* c) "
            f"{{ metal_host::call({entry.expression}, e, c); }}\n"
        )
        rows.append(f'{{"{entry.host_name}", mh_call_{i}, mh_binds_{i}, {count}, {limit}}}')
    code.append(f"{_EXPORT} const mh_entry mh_entries[] = {{ {', '.join(rows)} }};\n")
    code.append(f"{_EXPORT} const int mh_num_entries = {len(rows)};\n")
    unset = "".join(
        f'if (!mh_defined_{c.name}) mh_rt_unset_constant("{c.name}", {c.index}, &{c.name}, '
        f"sizeof {c.name}); "
        for c in rewritten.constants
    )
    code.append(f"{_EXPORT} {_NO_SANITIZER} void mh_declare_unset_constants() {{ {unset}}}\n")
    return "".join(code)


def _compile(tools: Toolchain, text: str, flags: Sequence[str], target: Path) -> None:
    source, unlinked, linked = scratch_file(".cpp"), scratch_file(".o"), scratch_file(".so")
    try:
        for _ in range(8):  # overloads that collide come to light in rounds
            source.write_text(text)
            done = tools.run([*flags, "-ferror-limit=0", "-c", str(source), "-o", str(unlinked)])
            if done.returncode == 0:
                break
            kept = drop_collisions(text, done.stderr)
            if kept is None:
                raise CompileError(done.stderr[:8000])
            text = kept
        else:
            raise CompileError(done.stderr[:8000])
        link(tools, ["-nostdlib", str(unlinked), "-lm", "-lc"], linked)
        publish(linked, target)
    finally:
        for file in (source, unlinked, linked):
            file.unlink(missing_ok=True)


def link(tools: Toolchain, arguments: Sequence[str], target: Path) -> None:
    """Links a shared object.

    Raises:
      CompileError: with the linker's message.
    """
    done: subprocess.CompletedProcess[str] = tools.run(["-shared", *arguments, "-o", str(target)])
    if done.returncode:
        raise CompileError(done.stderr)
