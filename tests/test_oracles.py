"""Kernels of others in our simulator: what is on record; one that is compiled anew, where flash-attn-4 is installed."""

import pytest

from tools import oracles


def test_all_cases_ran_and_were_right():
    rows = oracles.recorded()
    assert [row["case"] for row in rows] == list(oracles.CASES)
    assert all(oracles.right(row) and int(row["mmas"]) > 0 for row in rows)


def test_a_wrong_result_is_none_that_is_right():
    row = oracles.recorded()[0]
    for name in ("error", "lse_error"):
        assert not oracles.right(row | {name: "0.1"}) and not oracles.right(row | {name: "nan"})


@pytest.mark.kernels
def test_a_kernel_that_is_compiled_anew():
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    name = next(iter(oracles.CASES))
    assert oracles.apart(name) == oracles.recorded()[0]
