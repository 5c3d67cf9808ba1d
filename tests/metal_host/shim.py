"""The generated part of the executing standard library: swizzles of vec<T, N>."""

from __future__ import annotations

import itertools
from collections.abc import Iterator


def _swizzles(n: int) -> Iterator[str]:
    """Properties of a vector of n: all pairs; of three and four, permutations and splats."""
    for names in ("xyzw", "rgba"):
        for k in (2, 3, 4):
            for picks in itertools.product(range(n), repeat=k):
                distinct = len(set(picks))
                if k > 2 and distinct not in (1, k):
                    continue
                name = "".join(names[i] for i in picks)
                base = "".join("xyzw"[i] for i in picks)
                if names == "xyzw":
                    values = ", ".join(f"e[{i}]" for i in picks)
                    yield f"MH_FN vec<T, {k}> get_{base}() const {{ return vec<T, {k}>({values}); }}"
                    if distinct == k:
                        stores = " ".join(f"e[{i}] = o.e[{j}];" for j, i in enumerate(picks))
                        yield f"MH_FN void put_{base}(const vec<T, {k}>& o) {{ {stores} }}"
                put = f", put = put_{base}" if distinct == k else ""
                yield f"__declspec(property(get = get_{base}{put})) vec<T, {k}> {name};"


def swizzles_header() -> str:
    """The text of ``metal_host/swizzles.h``: MH_SWIZZLES_2, MH_SWIZZLES_3 and MH_SWIZZLES_4."""
    lines = ["#pragma once"]
    for n in (2, 3, 4):
        lines.append(f"#define MH_SWIZZLES_{n} " + " ".join(_swizzles(n)))
    return "\n".join(lines) + "\n"
