"""The benchmark of top-k on the CPU, with a fake clock: cases, checks, who gets a row, the table, the plot."""

from dataclasses import replace

import pytest
import torch

from bench import harness, topk
from bench.harness import Ceilings, Setup
from tests.test_bench import ENV

NAME = "topk-fp32-3x100-k7"
SETS = 4  # input sets of NAME with a small L2
TOP = Ceilings(700.0, 4000.0)


class Costs:
    """What functions run, and a clock that charges for each of their runs."""

    def __init__(self, **cost):
        self.cost, self.log = cost, []

    def wrap(self, functions):
        return {name: lambda i, name=name, run=run: self.log.append(name) or run(i) for name, run in functions.items()}

    def measure(self, call, sets):
        self.log.clear()
        for i in sets:
            call(i)
        return sum(self.cost[name.replace("-", "_")] for name in self.log) / len(sets)


@pytest.fixture(autouse=True)
def small_l2(monkeypatch):
    monkeypatch.setattr(harness, "L2_BYTES", (SETS - 1) * 600)


def setup_of(costs, *providers):
    return Setup(providers, 3, "cpu", costs, costs)


def smallest(i):
    return i.scores.topk(i.k, largest=False).indices


def missing(i):
    raise ImportError("no such module")


# ---- cases


@pytest.mark.parametrize("name", ["topk-fp64-3x100-k7", "topk-fp32-3x100", "topk-fp32-100-k7", f"{NAME}-x", ""])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="must end as"):
        topk.make(name, "cpu", 0)


# ---- the check of a result


def inputs_with(scores, k):
    i = topk.make(NAME, "cpu", 0)
    return replace(i, scores=torch.tensor(scores), k=k)


@pytest.mark.parametrize("indices", [[0, 3], [3, 0], [0, 2], [2, 0]])
def test_right_indices_pass_in_any_order(indices):
    """Two scores are equal at the boundary: either will do."""
    i = inputs_with([[3.0, 1.0, 2.0, 2.0]], 2)
    for dtype in (torch.int32, torch.int64):
        assert topk.check(i, torch.tensor([indices], dtype=dtype)) is None


@pytest.mark.parametrize(
    "indices, word",
    [
        ([2, 2], "twice"),  # both values equal those of 2 and 3
        ([2, -1], "outside"),
        ([2, 4], "outside"),
        ([2, 1], "not the largest"),
        ([1, 0], "not the largest"),
        ([2], "not the largest"),
    ],
)
def test_wrong_indices_of_one_row_are_refused(indices, word):
    i = inputs_with([[1.0, 0.0, 3.0, 3.0]] * 2, 2)
    right = torch.tensor([3, 2], dtype=torch.int32)[: len(indices)]
    assert word in topk.check(i, torch.stack([right, torch.tensor(indices, dtype=torch.int32)]))


def test_sorted_cases_are_checked_for_their_order():
    i = replace(inputs_with([[3.0, 1.0, 4.0, 3.0]], 3), sorted=True)
    for indices, said in (([2, 0, 3], None), ([2, 3, 0], None), ([0, 2, 3], "not in descending order")):
        assert topk.check(i, torch.tensor([indices])) == said


# ---- who gets a row, and what stands in it


def test_measure_gives_rows_to_those_that_pass(monkeypatch, capsys):
    costs = Costs(ours=1000.0, torch=3000.0, wrong=1.0)
    peers = {"wrong": smallest, "missing": missing}
    monkeypatch.setattr(topk, "PROVIDERS", costs.wrap(topk.PROVIDERS | peers))
    found = topk.measure(NAME, TOP, setup_of(costs, "ours", "torch", *peers, "of attention"))
    assert [(r.case, r.provider) for r in found] == [(NAME, p) for p in ("ours", "torch", "floor")]
    ours, other, floor = found
    assert (ours.timing.median, other.timing.median) == (1000, 3000)  # of one call, not of all sets
    assert ours.gbps == pytest.approx(1200 / 1000e-6 / 1e9)
    assert floor.timing.median == pytest.approx(1200 / 4000e9 * 1e6) and floor.gbps == 4000
    said = capsys.readouterr().out
    assert "no row: wrong: not the largest scores" in said and "no row: missing: ImportError: no such module" in said
    rows = harness.rows_of(found, ENV)
    assert rows[1].ratio_to_ours == 3 and NAME in harness.table(found, rows, TOP)
