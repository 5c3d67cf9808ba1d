"""From Metal to C++: the handful of forms that a C++ compiler does not take.

Works on preprocessed text and keeps its lines, so that every report names the user's file and line.

* ``[[...]]`` attributes are read (buffer index, built-in, ``threadgroup(n)``, ``function_constant``,
  ``max_total_threads_per_threadgroup``) and removed; each kernel's parameters become a binding table.
* ``template [[host_name("x")]] [[kernel]] decltype(f<..>) f<..>;`` and its other spellings become
  registered entry points.
* ``constant T name [[function_constant(i)]];`` becomes a value read from the runtime while the
  shared object is loaded.
* ``threadgroup T a[..];`` in a kernel becomes a reference into the runtime's arena, where it has
  red zones, a size that is added up, and undefined content.

What is not understood raises RewriteError: nothing is passed over in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .scan import (
    RewriteError,
    blank,
    matching,
    matching_angle,
    opening_of,
    origin_of,
    split_list,
    without_markers,
)

# Built-in attributes and their mh_bind_kind of runtime/abi.h.
BUILTINS = {
    "thread_position_in_grid": 2,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 4,
    "threads_per_grid": 5,
    "grid_size": 5,
    "threadgroups_per_grid": 6,
    "threads_per_threadgroup": 7,
    "dispatch_threads_per_threadgroup": 8,
    "thread_index_in_threadgroup": 9,
    "thread_index_in_simdgroup": 10,
    "simdgroup_index_in_threadgroup": 11,
    "simdgroups_per_threadgroup": 12,
    "threads_per_simdgroup": 13,
    "thread_execution_width": 13,
    "thread_index_in_quadgroup": 14,
    "quadgroup_index_in_threadgroup": 15,
    "quadgroups_per_threadgroup": 16,
    "dispatch_simdgroups_per_threadgroup": 17,
    "dispatch_quadgroups_per_threadgroup": 18,
    "grid_origin": 19,
}
MAX_BUFFER_INDEX = 30

ATTRIBUTE = re.compile(r"\[\[(.*?)\]\]", re.S)
CXX_ATTRIBUTE = re.compile(
    r"\s*(clang::|gnu::|maybe_unused|nodiscard|noreturn|fallthrough|likely|unlikely)"
)


@dataclass(frozen=True)
class Binding:
    """How one kernel parameter gets its value."""

    kind: str  # MH_BUFFER, MH_THREADGROUP_BUFFER or the number of a built-in
    index: str  # of a buffer, as an expression; "0" for built-ins
    condition: str | None = None  # the function constant that the argument depends on


@dataclass
class Kernel:
    """A kernel function or template."""

    name: str
    bindings: list[Binding]
    max_threads: str | None = None  # expression of max_total_threads_per_threadgroup


@dataclass(frozen=True)
class EntryPoint:
    """A function that can be launched: a kernel or an instantiation of a kernel template."""

    host_name: str
    expression: str  # C++ expression of the function
    kernel: str  # name of its Kernel


@dataclass(frozen=True)
class FunctionConstant:
    """A program-scope ``constant T name [[function_constant(index)]]``."""

    name: str
    type: str
    index: str  # as an expression


@dataclass
class Rewritten:
    """The C++ text and what was read from the Metal one."""

    text: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    entries: list[EntryPoint] = field(default_factory=list)
    constants: list[FunctionConstant] = field(default_factory=list)
    threadgroup_variables: list[str] = field(default_factory=list)


def rewrite(text: str) -> Rewritten:
    """Rewrites preprocessed Metal source.

    Args:
      text: the output of ``clang -E``, line markers included.

    Raises:
      RewriteError: the source uses a form that is not understood, or a buffer index above 30.
    """
    out = Rewritten()
    text = re.sub(r'\bextern\s+"C"\s*', "", text)
    text = _instantiations(text, out)
    text = _kernels(text, out)
    names = [e.host_name for e in out.entries]
    for name in {n for n in names if names.count(n) > 1}:
        raise RewriteError(f"two kernels are called {name}")
    text = _function_constants(text, out)
    text = _threadgroup_variables(text, out)

    def drop(match: re.Match[str]) -> str:
        keep = CXX_ATTRIBUTE.match(match.group(1))
        return match.group(0) if keep else blank(match.group(0))

    out.text = ATTRIBUTE.sub(drop, text)
    return out


def _instantiations(text: str, out: Rewritten) -> str:
    pieces, position = [], 0
    pattern = r'\btemplate\s*\[\[\s*host_name\s*\(\s*((?:"[^"]*"\s*)+)\)\s*\]\]'
    for match in re.finditer(pattern, text):
        end = text.index(";", match.end())
        body = ATTRIBUTE.sub("", text[match.end() : end]).strip()
        if body.endswith(")"):  # the full signature is given
            body = body[: opening_of(body, len(body) - 1, "(", ")")].rstrip()
        arguments = ""
        if body.endswith(">"):
            start = opening_of(body, len(body) - 1, "<", ">")
            body, arguments = body[:start], body[start:]
        name = re.search(r"([\w:]+)\s*$", body)
        if not name:
            raise RewriteError(f"instantiation not understood: {text[match.start() : end]}")
        host_name = "".join(re.findall(r'"([^"]*)"', match.group(1)))
        function = name.group(1)
        out.entries.append(EntryPoint(host_name, function + arguments, function.split("::")[-1]))
        pieces += [text[position : match.start()], blank(text[match.start() : end + 1])]
        position = end + 1
    return "".join(pieces) + text[position:]


_KERNEL_WORD = re.compile(r"\[\[\s*kernel\b(?:[^\]]|\](?!\]))*\]\]|\bkernel\b")
_KERNEL_HEAD = re.compile(
    r"(?:\s|\[\[.*?\]\]|\b(?:static|inline|void|kernel)\b|__attribute__\s*\(\(.*?\)\))*(\w+)\s*\(",
    re.S,
)
_TEMPLATE_HEAD = re.compile(r"\btemplate\s*<[^;{}]*>\s*(?:\[\[[^\]]*\]\]\s*)*$")


def _kernels(text: str, out: Rewritten) -> str:
    insertions: list[tuple[int, str]] = []
    for match in _KERNEL_WORD.finditer(text):
        head = _KERNEL_HEAD.match(text, match.end())
        if not head:
            continue
        name, opening = head.group(1), head.end() - 1
        parameters = split_list(without_markers(text[opening + 1 : matching(text, opening)]))
        before = text[: match.start()]
        template = _TEMPLATE_HEAD.search(before[max(0, len(before) - 4000) :])
        kernel = Kernel(name, _bindings(name, parameters))
        attributes = match.group(0) + text[match.end() : head.start(1)]
        limit = re.search(
            r"max_total_threads_per_threadgroup\s*\(((?:[^()]|\([^()]*\))*)\)", attributes
        )
        if limit:
            start = max(0, len(before) - 4000) + template.start() if template else match.start()
            prefix = template.group(0) if template else ""
            prefix = re.sub(r"\[\[.*?\]\]", "", without_markers(prefix)).replace("\n", " ")
            kernel.max_threads = f"mh_max_threads_{name}"
            insertions.append(
                (start, f"{prefix} constexpr int mh_max_threads_{name} = {limit.group(1)}; ")
            )
        out.kernels[name] = kernel
        if not template and not any(e.expression == name for e in out.entries):
            declaration = text[max(0, match.start() - 200) : head.start(1)]
            declaration = re.split(r"[;}]", declaration)[-1]
            host = re.search(r'host_name\s*\(\s*"([^"]*)"', declaration)
            out.entries.append(EntryPoint(host.group(1) if host else name, name, name))
    for position, extra in reversed(insertions):
        text = text[:position] + extra + text[position:]
    return re.sub(r"(?<!\[)\bkernel\b(?=\s+(?:void|\[\[|static|inline|[\w:]+_t\b))", "", text)


def _bindings(kernel: str, parameters: list[str]) -> list[Binding]:
    found: list[tuple[str, str | None, str | None]] = []
    for parameter in parameters:
        attributes = " , ".join(ATTRIBUTE.findall(parameter))
        buffer = re.search(r"\bbuffer\s*\(([^()]*)\)", attributes)
        threadgroup = re.search(r"\bthreadgroup\s*\(([^()]*)\)", attributes)
        optional = re.search(r"\bfunction_constant\s*\(([^()]*)\)", attributes)
        condition = optional.group(1).strip() if optional else None
        builtins = [word for word in re.findall(r"\w+", attributes) if word in BUILTINS]
        if buffer:
            found.append(("MH_BUFFER", buffer.group(1).strip(), condition))
        elif threadgroup:
            found.append(("MH_THREADGROUP_BUFFER", threadgroup.group(1).strip(), condition))
        elif builtins:
            found.append((str(BUILTINS[builtins[0]]), "0", None))
        elif re.search(r"\bthreadgroup\b", parameter):
            found.append(("MH_THREADGROUP_BUFFER", "0", condition))
        elif re.search(r"[*&]|\w\s*\[[^\[]", parameter):
            found.append(("MH_BUFFER", None, condition))
        else:
            raise RewriteError(f"kernel {kernel}: parameter without an attribute: {parameter}")
    taken = {index for kind, index, _ in found if kind == "MH_BUFFER"}
    free = (str(i) for i in range(1000) if str(i) not in taken)
    bindings = [Binding(kind, index or next(free), when) for kind, index, when in found]
    for b in bindings:
        if b.kind == "MH_BUFFER" and b.index.isdigit() and int(b.index) > MAX_BUFFER_INDEX:
            raise RewriteError(
                f"kernel {kernel}: buffer({b.index}), the last index is {MAX_BUFFER_INDEX}"
            )
    return bindings


def _function_constants(text: str, out: Rewritten) -> str:
    def declare(match: re.Match[str]) -> str:
        constant = FunctionConstant(match.group(2), match.group(1).strip(), match.group(3).strip())
        out.constants.append(constant)
        name, index = constant.name, constant.index
        return (
            f"static const bool mh_defined_{name} = metal_host::constant_is_defined({index}); "
            f"static const {constant.type} {name} = "
            f"metal_host::constant_value<{constant.type}>({index});" + blank(match.group(0))
        )

    text = re.sub(
        r"\bconstant\s+([\w:<>, ]+?)\s+(\w+)\s*"
        r"\[\[\s*function_constant\s*\(((?:[^()]|\([^()]*\))*)\)\s*\]\]\s*;",
        declare,
        text,
    )
    return re.sub(r"\bis_function_constant_defined\s*\(\s*(\w+)\s*\)", r"mh_defined_\1", text)


def _threadgroup_variables(text: str, out: Rewritten) -> str:
    pieces, position = [], 0
    for match in re.finditer(r"\b(?:static\s+)?threadgroup\b", text):
        if match.start() < position:
            continue
        before = without_markers(text[max(0, match.start() - 400) : match.start()]).rstrip()
        align = re.search(r"alignas\s*\(([^()]*)\)$", before)
        if align:
            before = before[: align.start()].rstrip()
        if not before or before[-1] not in ";{}":
            continue  # a parameter, a cast, a pointer's type
        end = _declaration_end(text, match.end())
        declaration = text[match.end() : end]
        flat = re.sub(r"<.*>", lambda m: " " * len(m.group(0)), declaration, flags=re.S)
        declarator = flat.split("[")[0].split(",")[0]
        if "*" in declarator or "&" in declarator:
            continue  # a local pointer into threadgroup memory
        if "(" in declarator or text[end] != ";":
            file, line = origin_of(text, match.start())
            raise RewriteError(
                f"{file}:{line}: threadgroup declaration not understood (an initialiser has no"
                f" effect in Metal): {text[match.start() : end + 20]!r}"
            )
        start = match.start()
        if align:
            start = text.rindex("alignas", 0, match.start())
        replacement = _arena_references(declaration, align.group(1) if align else None, out)
        pieces += [text[position:start], replacement, blank(text[start : end + 1])]
        position = end + 1
    return "".join(pieces) + text[position:]


def _declaration_end(text: str, i: int) -> int:
    while text[i] not in ";={":
        if text[i] in "([":
            i = matching(text, i)
        elif text[i] == "<":
            i = matching_angle(text, i)
        i += 1
    return i


def _arena_references(declaration: str, align: str | None, out: Rewritten) -> str:
    parts = split_list(declaration.strip())
    first = re.match(r"(.*?)(\w+)((?:\s*\[.*\])?)$", parts[0], re.S)
    if not first:
        raise RewriteError(f"threadgroup declaration not understood: threadgroup {declaration}")
    element, declarators = first.group(1).strip(), [first.group(2) + first.group(3), *parts[1:]]
    code = []
    for declarator in declarators:
        named = re.match(r"(\w+)(.*)$", declarator, re.S)
        if not named:
            raise RewriteError(f"threadgroup declaration not understood: {declarator}")
        name, dimensions = named.group(1), named.group(2).replace("\n", " ")
        alias = f"mh_type_{name}"
        number = len(out.threadgroup_variables)
        code.append(
            f"typedef {element} {alias} {dimensions}; {alias}& {name} = "
            f'*({alias}*)mh_rt_threadgroup_variable("{name}", {number}, sizeof({alias}), '
            f"{align or f'alignof({alias})'});"
        )
        out.threadgroup_variables.append(name)
    return " ".join(code).replace("\n", " ")
