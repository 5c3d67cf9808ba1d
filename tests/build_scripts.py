"""The scripts of cmake/ as modules; they are no part of the package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load(name: str) -> ModuleType:
    """The module of cmake/<name>.py."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "cmake" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
