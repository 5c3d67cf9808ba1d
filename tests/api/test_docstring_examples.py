"""Every public name is documented, and its docstring's example runs."""

import doctest
import importlib
import inspect
import pkgutil

import chunkdelta
import pytest

PUBLIC = sorted(name for name in chunkdelta.__all__ if callable(getattr(chunkdelta, name)))


def modules() -> list[str]:
    walk = pkgutil.walk_packages(chunkdelta.__path__, "chunkdelta.")
    return [module.name for module in walk if not module.name.endswith("._ext")]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name):
    doc = inspect.getdoc(getattr(chunkdelta, name)) or ""
    assert ">>>" in doc, f"chunkdelta.{name} has no runnable example"


@pytest.mark.parametrize("name", modules())
def test_examples_run(name):
    result = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0
