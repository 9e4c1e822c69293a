"""Kernels of others in our simulator: what is on record; one of each peer that is installed, compiled anew."""

import os
from importlib.util import find_spec

import pytest

from tools import oracles


def test_all_cases_ran_and_were_right():
    rows = oracles.recorded()
    assert [oracles.key(row) for row in rows] == list(oracles.CASES)
    assert all(oracles.right(row) and int(row["mmas"]) > 0 for row in rows)


def test_a_wrong_result_is_none_that_is_right():
    row = oracles.recorded()[0]
    for name in ("error", "lse_error"):
        assert not oracles.right(row | {name: "0.1"}) and not oracles.right(row | {name: "nan"})


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", list(oracles.PEERS))
def test_a_kernel_that_is_compiled_anew(kernel):
    packages = {oracles.FLASH: "flash_attn", oracles.CUDNN: "cudnn"}
    if find_spec(packages[kernel]) is None if kernel in packages else oracles.SOURCE not in os.environ:
        pytest.skip(f"{kernel} is not there")
    row = next(row for row in oracles.recorded() if row["kernel"] == kernel)
    found = oracles.apart(oracles.key(row))
    errors = {
        name: pytest.approx(float(row[name]), rel=0.2) for name in ("error", "lse_error")
    }  # of torch's float32 sums
    assert {**found, **{name: float(found[name]) for name in errors}} == {**row, **errors}
