"""One text from a .metal file and its headers: the form that is compiled just in time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")


def flatten(path: Path, include: Sequence[Path]) -> str:
    """The source with every ``#include "..."`` replaced by the file's text, each file once.

    Line directives keep the places that reports name. ``#include <...>`` stays: those headers are
    Metal's own.

    Raises:
      FileNotFoundError: a header is neither beside its includer nor in ``include``.
      UnicodeDecodeError: a file is not ASCII.
    """
    return "".join(_lines(path, include, set()))


def _lines(path: Path, include: Sequence[Path], seen: set[Path]) -> list[str]:
    seen.add(path.resolve())
    out = [f'#line 1 "{path.name}"\n']
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
        match = _INCLUDE.match(line)
        if _ONCE.match(line):
            out.append("\n")
        elif not match:
            out.append(line + "\n")
        else:
            header = _find(match.group(1), path, include)
            if header.resolve() in seen:
                out.append("\n")
            else:
                out += _lines(header, include, seen)
                out.append(f'#line {number + 1} "{path.name}"\n')
    return out


def _find(name: str, includer: Path, include: Sequence[Path]) -> Path:
    for directory in (includer.parent, *include):
        if (directory / name).is_file():
            return directory / name
    raise FileNotFoundError(f'{includer}: #include "{name}" not found')
