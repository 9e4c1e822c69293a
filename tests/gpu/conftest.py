"""What all tests on a GPU have in common: they need kernels and a Hopper GPU."""

from pathlib import Path

import pytest

from tests.support.gpu import HOPPER


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even read these tests for `--quick`."""
    return True if config.getoption("--quick") else None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.kernels)
    item.add_marker(HOPPER)
