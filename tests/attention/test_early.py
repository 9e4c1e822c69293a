"""What decode guesses while the launch before still writes lengths, offsets and page ids, in the simulator: results are
those of what that launch writes last, and nothing outside the tensors is read meanwhile."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from bench.cases import attention as cases
from bench.cases.attention import AttentionCase
from tests.conftest import ARCH
from tests.sim.workloads import distance, simulated

EARLY = {0, 1, 2}  # the warps that guess: of a CTA, they are the first ones past griddepcontrol.wait that have read
SOME = AttentionCase(
    "early", function="decode", q_lens=(1, 2, 1), kv_lens=(300, 40, 700), heads_q=4, heads_kv=2, page_size=16
)
CASES = {
    "some": SOME,
    "a block less": replace(SOME, kv_lens=(300, 40, 600)),
    "empty": replace(SOME, kv_lens=(0, 0, 700)),
    "all empty": replace(SOME, kv_lens=(0, 0, 0)),
    "more than a warp knows": replace(SOME, q_lens=(*(1,) * 32, 2), kv_lens=(*(9,) * 31, 300, 140)),
    "pages of any size": replace(SOME, page_size=5),
}


def stale(kind: str, lens: torch.Tensor, offsets: torch.Tensor, table: torch.Tensor) -> None:
    """Overwrites what a launch reads with what it may find too early."""
    generator = torch.Generator().manual_seed(0)
    if kind == "zeros":
        lens.zero_()
        offsets.zero_()
    elif kind == "other requests":
        lens.copy_(lens.flip(0) + 70)
    elif kind == "a length":  # one value of one sequence
        lens[0] += 70
    elif kind == "the last query":
        offsets[-1] -= 1
    elif kind == "any bytes":
        for t in (lens, offsets):
            t.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    table.fill_(-5)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name, kind",
    [
        *product(["some"], ("the same", "zeros", "other requests", "a length", "the last query")),
        *product(CASES, ["any bytes"]),
    ],
)
def test_what_is_guessed_does_not_show(name, kind):
    case = CASES[name]
    problem = cases.make_call(case)
    want, want_lse = cases.expected(case, problem)
    function, arguments = cases.FUNCTIONS[case.function]
    inputs = arguments(case, problem)
    early = [inputs[key] for key in ("seq_lens", "cum_seq_lens_q", "block_tables")]
    last = [t.clone() for t in early]
    stale(kind, *early)
    waited = []

    def settle(warps: set[int]) -> None:
        if warps & EARLY:
            waited.append(warps)
            for t, value in zip(early, last):
                t.copy_(value)

    with simulated(ARCH, [], 5, before=settle):
        out, lse = function(**inputs)
    assert waited
    assert distance(out.view_as(want), want, 0.0, case.limit(want)) <= 1
    assert distance(lse, want_lse, case.lse_tolerance) <= 1
