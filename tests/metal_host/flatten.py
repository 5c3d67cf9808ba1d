"""The texts that are compiled just in time, from the build's own flattener (cmake/flatten_metal.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
METAL_ROOT = REPOSITORY / "metal"

_spec = importlib.util.spec_from_file_location(
    "flatten_metal", REPOSITORY / "cmake" / "flatten_metal.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules.setdefault(_spec.name, _module)
_spec.loader.exec_module(_module)

flatten = _module.flatten
metal_sources = _module.metal_sources
