"""Overloads that differ in address spaces only.

Metal tells ``f(device float*)`` from ``f(threadgroup float*)``; with the address spaces erased they
are one function defined twice. Which ones collide is left to the compiler to say: its
"redefinition" errors are read and all but the first of each are blanked out.
"""

from __future__ import annotations

import re

from .scan import blank, matching

_COLLISION = re.compile(
    r"(?m)^(\S[^\n]*?):(\d+):\d+: error: (?:redefinition of|multiple overloads of"
    r"|(?:conversion function|constructor|class member) cannot be redeclared)"
)


def drop_collisions(text: str, errors: str) -> str | None:
    """The text without the definitions that ``errors`` calls redefined; None if it names none."""
    places = {(file, int(line)) for file, line in _COLLISION.findall(errors)}
    if not places:
        return None
    for offset in sorted(_offsets(text, places), reverse=True):
        start, end = _definition_around(text, offset)
        text = text[:start] + blank(text[start:end]) + text[end:]
    return text


def _offsets(text: str, places: set[tuple[str, int]]) -> list[int]:
    found, position = [], 0
    file, line = "", 0
    for content in text.split("\n"):
        marker = re.match(r'# (\d+) "([^"]*)"', content)
        if marker:
            line, file = int(marker.group(1)) - 1, marker.group(2)
        else:
            line += 1
            if (file, line) in places:
                found.append(position)
        position += len(content) + 1
    return found


def _definition_around(text: str, offset: int) -> tuple[int, int]:
    """Begin and end of the function or class definition that the line at ``offset`` belongs to."""
    start = max(text.rfind(c, 0, offset) for c in ";{}") + 1
    label = re.search(r"(?:public|private|protected)\s*:", text[start:offset])
    if label:
        start += label.end()
    body, parameters = text.index("{", offset), text.find("(", offset)
    is_class = re.search(r"\b(?:struct|class)\b", text[start : offset + 60])
    if is_class and (parameters < 0 or body < parameters):
        return start, text.index(";", matching(text, body)) + 1
    end = matching(text, parameters) + 1
    if text[end:].lstrip().startswith("("):  # operator()(...)
        end = matching(text, text.index("(", end)) + 1
    while text[end] not in "{;":
        end = (matching(text, end) if text[end] == "(" else end) + 1
        in_initialiser = text[end] == "{" and re.search(r"[:,]\s*[\w<>:]+\s*$", text[offset:end])
        if in_initialiser:
            end = matching(text, end) + 1
    return start, (matching(text, end) if text[end] == "{" else end) + 1
