"""The marker of tests that take long."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels: simulates many kernels: more than ten seconds")
    config.addinivalue_line("markers", "slow: takes seconds")
