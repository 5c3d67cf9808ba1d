"""Every Metal source of the project, as the one text that a Mac compiles just in time."""

from __future__ import annotations

import pytest

from tests.metal_host import METAL_ROOT, flatten, metal_sources, typecheck

SOURCES = metal_sources(METAL_ROOT)


@pytest.mark.parametrize("source", SOURCES)
def test_flattened_source_passes_the_type_check(source):
    """ASCII (flatten raises), no include path, real address spaces, every instantiation."""
    assert typecheck(flatten(SOURCES[source], [METAL_ROOT]), name=f"{source}.metal") == []


def test_there_are_sources():
    assert len(SOURCES) >= 10
