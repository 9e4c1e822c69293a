"""The benchmark of top-k on the CPU, with a fake clock: cases, checks, who gets a row, the table, the plot."""

import sys
from dataclasses import replace

import pytest
import torch

from bench import __main__ as command
from bench import harness, plots, readme, results, topk
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


def test_a_name_says_what_the_inputs_are():
    i = topk.make("sweep-topk-bf16-3x100-k7", "cpu", 5)
    assert i.scores.shape == (3, 100) and i.scores.dtype == torch.bfloat16 and i.k == 7
    assert i.indices.shape == (3, 7) and i.table.shape == (3, 2) and i.bytes == 600
    assert i.lengths.tolist() == [100] * 3 and i.zeros.tolist() == [0] * 3
    assert torch.equal(i.scores, topk.make("topk-bf16-3x100-k7", "cpu", 5).scores)
    assert not torch.equal(i.scores, topk.make("topk-bf16-3x100-k7", "cpu", 6).scores)


@pytest.mark.parametrize("name", ["topk-fp64-3x100-k7", "topk-fp32-3x100", "topk-fp32-100-k7", f"{NAME}-x", ""])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="must end as"):
        topk.make(name, "cpu", 0)


def test_input_sets_are_many_and_differ():
    sets = topk.inputs_of(NAME, "cpu")
    assert len(sets) == SETS
    assert len({float(i.scores[0, 0]) for i in sets}) == SETS


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


def test_sorted_cases_ask_for_what_is_sorted():
    i = topk.make("topk-sorted-bf16-3x100-k7", "cpu", 5)
    assert i.sorted and not topk.make("topk-bf16-3x100-k7", "cpu", 5).sorted
    for name in ("ours", "torch"):
        assert topk.check(i, topk.PROVIDERS[name](i)) is None
    assert topk.check(i, topk.ragged(i)) == "not in descending order"


def test_equal_indices_are_found_apart_from_each_other():
    assert topk.check(inputs_with([[1.0, 3.0, 3.0, 3.0]], 3), torch.tensor([[1, 2, 1]])) == "an index comes twice"


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


def test_a_sample_runs_every_input_set(monkeypatch):
    costs, seen = Costs(ours=1000.0), []
    monkeypatch.setattr(topk, "PROVIDERS", costs.wrap({"ours": lambda i: seen.append(id(i)) or smallest(i)}))
    monkeypatch.setattr(topk, "check", lambda *_: None)
    topk.measure(NAME, TOP, setup_of(costs, "ours"))
    first, *timed = seen
    assert timed[:SETS] * (len(timed) // SETS) == timed and len(set(timed)) == SETS and timed[0] == first


def test_no_rows_where_nobody_passes(monkeypatch):
    monkeypatch.setattr(topk, "PROVIDERS", {"wrong": smallest})
    assert topk.measure(NAME, TOP, setup_of(Costs(), "wrong")) == []


def test_outputs_are_cases_of_their_own(monkeypatch, capsys):
    cost = {name: 1000.0 + n for n, name in enumerate(topk.FUNCTIONS)}
    costs = Costs(**{name.replace("-", "_"): us for name, us in cost.items()})
    monkeypatch.setattr(topk, "FUNCTIONS", costs.wrap(topk.FUNCTIONS | {"wrong": smallest}))
    found = topk.outputs(NAME, setup_of(costs))
    assert {r.case: r.timing.median for r in found} == {f"outputs-{f}-{NAME}": us for f, us in cost.items()}
    assert {r.provider for r in found} == {"ours"} and "no row: wrong" in capsys.readouterr().out


def test_host_time_is_that_of_the_slowest_function(monkeypatch):
    """Sorting is a launch of its own: it has no part."""
    costs = Costs(**{name.replace("-", "_"): 10.0 for name in topk.FUNCTIONS} | {"torch": 8.0})
    costs.cost |= {"top_k_per_row_decode": 12.0, "top_k_sorted": 99.0}
    monkeypatch.setattr(topk, "FUNCTIONS", costs.wrap(topk.FUNCTIONS))
    monkeypatch.setattr(topk, "PROVIDERS", costs.wrap({"torch": topk.PROVIDERS["torch"]}))
    found = topk.host(setup_of(costs))
    assert [(r.case, r.provider, r.timing.median) for r in found] == [
        (topk.HOST_CASE, "torch", 8), (topk.HOST_CASE, "ours", 12)
    ]  # fmt: skip
    assert found[1].note == "top_k_per_row_decode, the slowest function"


def test_the_command_appends_all_rows_of_a_run(monkeypatch, tmp_path):
    path, costs = tmp_path / "gpu.csv", Costs(ours=1000.0, torch=3000.0)
    copy = harness.Measurement("ceiling-copy", "torch", harness.Timing(5, 5, 5), gbps=4000.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(results, "environment", lambda: ENV)
    monkeypatch.setattr(harness, "ceilings", lambda _: (TOP, [replace(copy, case="ceiling-matmul-bf16"), copy]))
    monkeypatch.setattr(harness, "Setup", lambda providers, rounds: Setup(providers, rounds, "cpu", costs, costs))
    monkeypatch.setattr(topk, "PROVIDERS", costs.wrap({p: topk.PROVIDERS[p] for p in ("ours", "torch")}))
    monkeypatch.setattr(topk, "HEADLINE", (NAME, "topk-bf16-3x100-k7"))
    monkeypatch.setattr(topk, "outputs", lambda name, setup: [replace(copy, case=f"outputs-x-{name}", provider="ours")])
    monkeypatch.setattr(topk, "host", lambda setup: [replace(copy, case=topk.HOST_CASE)])
    argv = ["bench", "topk", "--cases", "topk-fp32", "--rounds", "2", "--results", str(path)]
    monkeypatch.setattr(sys, "argv", argv)
    command.main()
    assert [(r.case, r.provider) for r in results.read(path)] == [
        ("ceiling-copy", "torch"), *((NAME, p) for p in ("ours", "torch", "floor")),
        (f"outputs-x-{topk.OUTPUTS}", "ours"), (topk.HOST_CASE, "torch"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*argv, "--cases", "prefill"])
    with pytest.raises(SystemExit, match="no case begins with 'prefill'; there are: topk-fp32-3x100-k7, topk-bf16"):
        command.main()


# ---- README and plot


def run_rows(env=ENV):
    case = "topk-fp32-64x65536-k2048"
    return results.with_ratios(
        [
            env.row(case, "ours", 14.34),
            env.row(case, "torch", 101.5),
            env.row(case, "floor", 3.9),
            env.row(f"outputs-top_k-{case}", "ours", 14.9),
            env.row(f"outputs-top_k-sorted-{case}", "ours", 54.5),
            env.row(topk.HOST_CASE, "torch", 8.9),
            env.row(topk.HOST_CASE, "ours", 14.8),
            *(
                env.row(f"sweep-topk-fp32-{rows}x{length}-k256", p, us * rows + length)
                for rows in (1, 16)
                for length in (1024, 4096, 2048)
                for p, us in (("ours", 5.0), ("torch", 40.0), ("floor", 1.0))
            ),
        ]
    )


def test_measured_table_holds_the_figures_of_the_run(tmp_path):
    assert readme.measured_topk({}, tmp_path) == "Not measured yet."
    assert readme.measured_topk({"nvidia-h200": [ENV.row("prefill-x", "ours", 1.0)]}, tmp_path) == "Not measured yet."
    text = readme.measured_topk({"nvidia-h200": run_rows()}, tmp_path)
    assert "| `topk-fp32-64x65536-k2048` | 14.3 | 101.5 (7.08) |  | 3.9 (0.27) |" in text
    assert "All functions on `topk-fp32-64x65536-k2048`: `top_k` 14.9 us, `top_k-sorted` 54.5 us." in text
    assert "commit abc123" in text and "torch 8.9 us, ours 14.8 us" in text and "sweep" not in text


def test_small_numbers_keep_two_digits():
    """A floor of 0.0 us would say that reading takes no time."""
    assert [readme.number(x, 1) for x in (379.31, 1.04, 1.0, 0.96, 0.10, 0.0307)] == [
        "379.3", "1.0", "1.0", "0.96", "0.10", "0.031"
    ]  # fmt: skip
    assert [readme.number(x, 2) for x in (7.005, 0.284, 0.0964, 0.00456)] == ["7.00", "0.28", "0.096", "0.0046"]
    rows = [ENV.row("topk-fp32-1x32768-k2048", p, us) for p, us in (("ours", 6.8), ("floor", 0.031))]
    assert readme.topk_cells(results.with_ratios(rows))[1:] == ["6.8", "", "", "0.031 (0.0046)"]


def test_lengths_are_drawn_from_the_sweep(tmp_path, monkeypatch):
    drawn, save = [], plots.save
    monkeypatch.setattr(plots, "save", lambda fig, path, **kept: drawn.append(fig) or save(fig, path, **kept))
    beside, path = plots.draw_all({"g": run_rows()}, tmp_path)
    assert beside.name == "g-peers.png" and path.name == "g-topk-lengths.png"
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    one, many = drawn[1].axes
    assert one.get_title().startswith("1 row,") and many.get_title().startswith("16 rows,")
    lines = {line.get_label(): line.get_xydata().tolist() for line in many.get_lines()}
    assert lines.keys() == {"ours", "torch", "floor"}
    assert lines["torch"] == [[n, 640.0 + n] for n in (1024, 2048, 4096)]
    assert plots.draw_all({"g": [r for r in run_rows() if "sweep" not in r.case]}, tmp_path) == [beside]


def test_cases_have_names_that_are_understood():
    """The plot takes all lengths of the sweep; headline cases are told from them and from each other."""
    assert all(plots.TOPK_SWEEP.match(name) for name in topk.SWEEP)
    every = (*topk.HEADLINE, *topk.SORTED, *topk.SWEEP)
    assert len(set(every)) == len(every) and topk.OUTPUTS in topk.HEADLINE
    assert all(name.startswith("topk-") for name in topk.HEADLINE + topk.SORTED)
