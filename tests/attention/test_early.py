"""Kernels find their first tile while the previous launch may still write lengths, offsets, page ids and slots. In the
simulator, these change meanwhile. The results must be those of the last values, and no kernel may read outside of its
tensors."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from bench.cases import attention as cases
from bench.cases import mla
from bench.cases.attention import AttentionCase
from bench.cases.mla import MlaCase
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


MIXED = (300, 40, 200)
LATENT = {  # a case, and the warp of its kernel that guesses
    "few rows": (MlaCase(record="656", lens=MIXED, heads=8, chosen=130, counted=True), 3),
    "few rows of many requests": (
        MlaCase(record="e4m3", lens=(*(9, 3, 40) * 14, 600), heads=3, page_size=16),
        3,
    ),
    "few rows, all keys": (MlaCase(record="e4m3", lens=MIXED, heads=8, page_size=16), 3),
    "few rows, two caches": (
        MlaCase(record="584", second_record="584", dim=512, lens=MIXED, heads=8, chosen=130, second=70, counted=True),
        3,
    ),
    "64 rows": (MlaCase(lens=MIXED, heads=20, page_size=64), 1),
    "64 rows over records": (MlaCase(record="656", lens=MIXED, heads=20, chosen=130, counted=True), 1),
    "64 rows of chosen keys": (MlaCase(lens=MIXED, heads=20, chosen=130, counted=True), 2),
}


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name, kind",
    [*product(LATENT, ["other requests", "any bytes"]), ("few rows of many requests", "another last request")],
)
def test_what_is_guessed_over_latents_does_not_show(name, kind):
    case, guessing = LATENT[name]
    inputs = mla.make(case, seed=len(name))
    want = mla.expected(case, inputs)
    second = () if inputs.second is None else (inputs.second.slots, inputs.second.counts)
    early = [t for t in (inputs.lens, inputs.table, inputs.slots, inputs.counts, *second) if t is not None]
    last, generator, waited = [t.clone() for t in early], torch.Generator().manual_seed(0), []
    for t in early:
        if kind == "any bytes":
            t.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        elif kind == "other requests":
            t.copy_(t.flip(0))
        else:
            t[-1] = t[0]

    def settle(warps: set[int]) -> None:
        if guessing in warps:
            waited.append(warps)
            for t, value in zip(early, last, strict=True):
                t.copy_(value)

    with simulated(ARCH, [], 5, before=settle):
        got = mla.call(case, inputs)
    assert waited and mla.error(case, got, want) <= 1
