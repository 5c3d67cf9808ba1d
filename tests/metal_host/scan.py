"""Finding one's way in C++ text without parsing it: brackets, lists, blanks."""

from __future__ import annotations

import re

CLOSING = {"(": ")", "[": "]", "{": "}"}


class RewriteError(SyntaxError):
    """The source uses a form that the rewriter does not understand, or that Metal forbids."""


def matching(text: str, start: int) -> int:
    """Index of the bracket that closes the one at ``text[start]``; strings are skipped."""
    opening, closing = text[start], CLOSING[text[start]]
    depth, i = 0, start
    while i < len(text):
        c = text[i]
        if c == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif c == opening:
            depth += 1
        elif c == closing:
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise RewriteError(f"unbalanced {opening}")


def matching_angle(text: str, start: int) -> int:
    """Index of the ``>`` that closes the ``<`` at ``text[start]``; brackets inside are skipped."""
    depth, i = 0, start
    while i < len(text):
        c = text[i]
        if c == "<":
            depth += 1
        elif c == ">":
            depth -= 1
            if depth == 0:
                return i
        elif c in "([":
            i = matching(text, i)
        i += 1
    raise RewriteError("unbalanced <")


def opening_of(text: str, end: int, opening: str, closing: str) -> int:
    """Index of the bracket that opens the one which closes at ``text[end]``."""
    depth, i = 0, end
    while i >= 0:
        if closing == ">" and text[i] == ")":
            i = opening_of(text, i, "(", ")")
        elif text[i] == closing:
            depth += 1
        elif text[i] == opening:
            depth -= 1
            if depth == 0:
                return i
        i -= 1
    raise RewriteError(f"unbalanced {closing}")


def split_list(text: str) -> list[str]:
    """The comma-separated items of a parameter list, brackets and template arguments kept whole."""
    items, depth, last, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c in CLOSING:
            i = matching(text, i)
        elif c == "<":
            depth += 1
        elif c == ">" and depth:
            depth -= 1
        elif c == "," and depth == 0:
            items.append(text[last:i])
            last = i + 1
        i += 1
    items.append(text[last:])
    return [item for item in (x.strip() for x in items) if item]


def blank(text: str) -> str:
    """The line breaks of ``text``: what stands in for it without moving any later line."""
    return re.sub(r"[^\n]", "", text)


def without_markers(text: str) -> str:
    """``text`` without the preprocessor's line markers."""
    return re.sub(r"(?m)^#.*$", "", text)


def origin_of(text: str, position: int, name: str = "kernel.metal") -> tuple[str, int]:
    """File and line that ``text[position]`` came from, by the preprocessor's line markers."""
    file, line, start = name, 1, 0
    for marker in re.finditer(r'(?m)^# (\d+) "([^"]*)".*\n', text[:position]):
        line, file, start = int(marker.group(1)), marker.group(2), marker.end()
    return file, line + text.count("\n", start, position)
