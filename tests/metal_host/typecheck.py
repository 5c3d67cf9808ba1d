"""The front end's opinion: address spaces, types and what Metal does not have.

Compiles a source against a standard library of declarations with real ``address_space`` attributes
(include_tc/), for diagnostics only, and looks over the text for what C++ has and Metal has not. A
strong approximation of Apple's compiler, not a replacement.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .build import LANGUAGE_FLAGS, preprocess
from .overloads import drop_collisions
from .rewrite import EntryPoint, rewrite
from .scan import RewriteError, matching, matching_angle, origin_of
from .toolchain import PACKAGE, CompileError, scratch_file, toolchain

_SPACES = r"(?:device|constant|threadgroup|thread|object_data|threadgroup_imageblock)"
_SCALARS = [
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "half",
    "float",
    "bfloat",
]
_OTHER_SCALARS = [
    "void",
    "bool",
    "int8_t",
    "uint8_t",
    "int16_t",
    "uint16_t",
    "int32_t",
    "uint32_t",
    "int64_t",
    "uint64_t",
    "size_t",
    "bfloat16_t",
    "float16_t",
]

_NOT_IN_METAL = {
    "double": "type double",
    "goto": "goto",
    "try": "exceptions",
    "throw": "exceptions",
    "catch": "exceptions",
    "virtual": "virtual functions",
    "dynamic_cast": "run-time types",
    "typeid": "run-time types",
    "new": "operator new",
    "delete": "operator delete",
    "thread_local": "thread_local",
    "asm": "inline assembly",
}

_WARNINGS = [
    "-Wno-everything",
    "-Wimplicit-float-conversion",
    "-Wuninitialized",
    "-Wsometimes-uninitialized",
    "-Wconditional-uninitialized",
    "-Wreturn-type",
    "-Wshift-count-overflow",
    "-Warray-bounds",
    "-Wunused-value",
    "-Wparentheses",
]
# Warnings that count; the rest only inform.
_SERIOUS = ("uninitialized", "control", "shift", "array index")

_PRELUDE = (
    "#define device __attribute__((address_space(1)))\n"
    "#define constant const __attribute__((address_space(2)))\n"
    "#define threadgroup __attribute__((address_space(3)))\n"
    "#define thread\n"
    "namespace metal_host { bool constant_is_defined(int); template <class T> T constant_value(int); }\n"
    "threadgroup void* mh_rt_threadgroup_variable(const char*, int, ulong, ulong);\n"
) + "".join(
    f"#define {t}{n}(...) metal::make_vector<metal::{t}{n}>(__VA_ARGS__)\n"
    for t in _SCALARS
    for n in "234"
)


def typecheck(
    source: str | Path,
    *,
    name: str | None = None,
    include: Sequence[str | Path] = (),
    defines: Sequence[str] = (),
    only: str | None = None,
) -> list[str]:
    """Diagnostics of a Metal source; an empty list when it passes.

    Args:
      source: path of a .metal file, or the text itself (anything with a line break in it).
      name: what the diagnostics call the text; default its file name, or "kernel.metal".
      include: directories for ``#include "..."``.
      defines: ``NAME`` or ``NAME=value``.
      only: regular expression on host names: checks the bodies of these instantiations only.

    Example:
      >>> typecheck('''
      ... #include <metal_stdlib>
      ... kernel void k(device float* y [[buffer(0)]]) { threadgroup float* p = y; }
      ... ''')  # doctest: +ELLIPSIS
      ["kernel.metal:3: error: cannot initialize a variable of type ..."]
    """
    if isinstance(source, Path) or "\n" not in source:
        path = Path(source)
        name = name or path.name
        try:
            source = path.read_text(encoding="ascii")
        except UnicodeDecodeError as error:
            return [f"{name}: not ASCII: {error}"]
    name = name or "kernel.metal"
    try:
        library, user = preprocess(source, name, include, defines, PACKAGE / "include_tc")
    except CompileError as error:
        return [str(error)]
    diagnostics = _lint(user)
    try:
        rewritten = rewrite(user)
    except RewriteError as error:
        return [*diagnostics, str(error)]
    entries = [e for e in rewritten.entries if only is None or re.fullmatch(only, e.host_name)]
    text = library + _PRELUDE + _native_vectors(rewritten.text) + _instantiate(entries)
    return diagnostics + _compile(text)


# ---- from struct vectors to native ones ----------------------------------------------------------


def _native_vectors(text: str) -> str:
    """What the text needs to be C++ with address spaces and native vectors."""
    # Arena references are threadgroup memory.
    text = re.sub(r"\btypedef (.*?) (mh_type_\w+) (.*?); ", r"typedef threadgroup \1 \2 \3; ", text)
    text = _vector_constructors(text)
    # Member functions have no address space here.
    text = re.sub(
        r"(\)\s*(?:const\s+)?)(thread|device|constant|threadgroup)\b(?=\s*(?:noexcept\s*)?[:{;])",
        r"\1",
        text,
    )
    # Array parameters are pointers.
    text = re.sub(
        r"(?<=[(,])(\s*(?:const\s+)?(?:constant|device|threadgroup)\b[^,();*&{}\[\]=]*?)\b(\w+)"
        r"\s*\[[^\[\]]*\](?=\s*[,)])",
        r"\1* \2",
        text,
    )
    return _vector_variables(text)


def _vector_constructors(text: str) -> str:
    """vec<T, N>(...) becomes metal::make_vector<vec<T, N>>(...)."""
    out, position = [], 0
    for match in re.finditer(r"\b(?:metal::)?vec\s*<", text):
        if match.start() < position or text[: match.start()].rstrip().endswith("operator"):
            continue
        try:
            end = matching_angle(text, match.end() - 1)
        except (RewriteError, IndexError):
            continue
        if text[end + 1 : end + 2] in ("(", "{"):
            out += [
                text[position : match.start()],
                f"metal::make_vector<{text[match.start() : end + 1]}>",
            ]
            position = end + 1
    return "".join(out) + text[position:]


_PARAMETER = re.compile(
    r"\s*(?:const\s+|device\b|constant\b|thread\b|threadgroup\b|[A-Za-z_]\w*\s+[A-Za-z_]\w*\s*[,)]|$)"
)


def _vector_variables(text: str) -> str:
    """float2 v(a, b); becomes float2 v = float2(a, b);"""
    out, position = [], 0
    types = "|".join(_SCALARS)
    for match in re.finditer(rf"\b((?:{types})[234])\s+(\w+)\s*\(", text):
        end = matching(text, match.end() - 1)
        is_variable = text[end + 1 : end + 40].lstrip().startswith(";")
        is_function = _PARAMETER.match(text[match.end() : end + 1])
        if match.start() >= position and is_variable and not is_function:
            out += [
                text[position : match.start()],
                f"{match.group(1)} {match.group(2)} = {match.group(1)}(",
            ]
            position = match.end()
    return "".join(out) + text[position:]


def _instantiate(entries: Sequence[EntryPoint]) -> str:
    uses = (f"static auto* mh_entry_{i} = &{e.expression};\n" for i, e in enumerate(entries))
    return '\n# 1 "entry_points"\n' + "".join(uses)


# ---- the compiler --------------------------------------------------------------------------------


def _compile(text: str) -> list[str]:
    for _ in range(8):
        done = _front_end(text)
        kept = drop_collisions(text, done.stderr) if done.returncode else None
        if kept is None:
            break
        text = kept
    return _significant(done.stderr)


def _front_end(text: str) -> subprocess.CompletedProcess[str]:
    tools = toolchain()
    flags = [*LANGUAGE_FLAGS, *tools.architecture_flags(), *_WARNINGS, "-ferror-limit=0"]
    if not tools.is_zig:
        return tools.run([*flags, "-fsyntax-only", "-"], stdin=text)
    source, unused = scratch_file(".cpp"), scratch_file(".o")
    try:  # zig's driver knows no -fsyntax-only
        source.write_text(text)
        return tools.run([*flags, "-O0", "-c", str(source), "-o", str(unused)])
    finally:
        source.unlink(missing_ok=True)
        unused.unlink(missing_ok=True)


def _significant(messages: str) -> list[str]:
    out = []
    for block in re.split(r"(?m)^(?=\S.*?:\d+:\d+: (?:error|warning): )", messages):
        # Structs may be copied between address spaces in Metal; C++ has no such copy operators.
        if re.search(
            r"implicit (?:copy|move) (?:assignment operator|constructor)\) not viable: .*address space",
            block,
        ):
            continue
        match = re.match(r"(.*?):(\d+):\d+: (error|warning): (.*)", block)
        if not match:
            continue
        file, line, severity, text = match.groups()
        if (
            str(PACKAGE) in file
        ):  # the library's own static_assert: what instantiated it is the place
            notes = re.findall(r"(?m)^(.*?):(\d+):\d+: note: in instantiation", block)
            file, line = next((n for n in notes if str(PACKAGE) not in n[0]), (file, line))
        narrows = "precision" in text and "__bf16" in text.split(" to ")[-1]
        if severity == "error" or narrows or any(word in text for word in _SERIOUS):
            out.append(f"{file}:{line}: {severity}: {text}")
    return out


# ---- the text ------------------------------------------------------------------------------------


def _lint(user: str) -> list[str]:
    """What C++ has and Metal has not, and pointers that name no address space."""
    blanked = re.sub(
        r'(?m)^[^#\n].*"[^\n]*$',
        lambda line: re.sub(r'"[^"]*"', lambda s: '"' + " " * (len(s[0]) - 2) + '"', line[0]),
        user,
    )
    found: list[tuple[int, str]] = []
    for word, what in _NOT_IN_METAL.items():
        for match in re.finditer(rf"\b{word}\b", blanked):
            deleted = word == "delete" and blanked[: match.start()].rstrip().endswith("=")
            if not deleted:
                found.append((match.start(), f"'{word}': Metal has no {what}"))
    found += _pointers_without_space(blanked)
    out = []
    for position, text in sorted(found):
        file, line = origin_of(user, position)
        out.append(f"{file}:{line}: lint: {text}")
    return out


def _pointers_without_space(text: str) -> list[tuple[int, str]]:
    names = set(_SCALARS) | set(_OTHER_SCALARS) | {t + n for t in _SCALARS for n in "234"}
    names |= set(re.findall(r"\b(?:struct|class|typename)\s+(\w+)", text))
    names |= set(re.findall(r"\busing\s+(\w+)\s*=", text))
    names |= set(re.findall(r"\btypedef\b[^;]*?\b(\w+)\s*;", text))
    types = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    pattern = re.compile(
        r"(?<=[(,;{}])(\s*(?:\#[^\n]*\n\s*)*)"
        rf"(?P<type>(?:(?:const|volatile|static|inline|constexpr|METAL_FUNC|{_SPACES})\s+)*"
        rf"(?:{types})(?:\s*<[^<>;(){{}}]*(?:<[^<>;]*>[^<>;(){{}}]*)?>)?"
        rf"\s*(?:const\s*|volatile\s*|{_SPACES}\s*)*)"
        r"[*&]+\s*(?:const\s+|restrict\s+|__restrict\s+)*(?P<name>\w+)\s*(?=[,)=;\[{])"
    )
    return [
        (m.start("type"), f"pointer or reference '{m['name']}' without an address space")
        for m in pattern.finditer(text)
        if not re.search(rf"\b{_SPACES}\b", m["type"])
    ]
