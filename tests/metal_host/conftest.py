"""The host runner is a stand-in for machines without a Mac's GPU: it runs on Linux only."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.platform == "linux":
        return
    skip = pytest.mark.skip(reason="the host runner's fibers and signals are Linux's; run selftest")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)
