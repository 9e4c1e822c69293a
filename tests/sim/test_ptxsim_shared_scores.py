"""Prefill of head_dim 512 in the simulator: warpgroups that share scores, over K and V in pieces, in several orders of
execution; which kernels share scores."""

from dataclasses import replace

import pytest

from bench.cases.attention import AttentionCase
from cute_kernels.attention import dispatch, sm90
from cute_kernels.attention.request import KernelRequest
from tests.conftest import ARCH
from tests.sim import workloads
from tests.sim.workloads.attention import Scenario

SMS = 5
WIDE = KernelRequest(head_dim_qk=512, head_dim_vo=512, split_kv="never")
RAGGED = AttentionCase(  # the third request has 2 rows in its last tile, the others have packed rows
    "causal", q_lens=(1, 0, 130, 3), kv_lens=(9, 33, 270, 140), heads_q=2, heads_kv=1, head_dim_qk=512,
    head_dim_vo=512, page_size=16, sink=1.0, data="peaks",
)  # fmt: skip
CASES = {  # case, and the mode to compare with `eager`
    "causal": (RAGGED, "late"),
    "full": (replace(RAGGED, causal=False, page_size=64, data="needles", kv_lens=(300, 0, 200, 1)), ""),
    "window, cap": (replace(RAGGED, window_left=70, soft_cap=9.0, heads_kv=2), ""),
    "one": (replace(RAGGED, q_lens=(129,), kv_lens=(200,), page_size=8), ""),
    "no key first": (replace(RAGGED, q_lens=(1, 2), kv_lens=(0, 20)), ""),  # the first row of the page table is its own
}


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name",
    ["causal", "one", "no key first", *(pytest.param(x, marks=pytest.mark.full) for x in ("full", "window, cap"))],
)
def test_shared_scores(name):
    (case, mode), run = CASES[name], workloads.RUN["attention"]
    scenario = Scenario(name, (case,), SMS)
    outcome = run(None, scenario, ARCH, mode="eager")
    assert outcome.error <= 1
    if mode:
        assert outcome.bits == run(None, scenario, ARCH, mode=mode).bits


@pytest.mark.parametrize(
    "change, shared",
    [
        ({}, True),
        ({"causal": False}, True),
        ({"source": "ragged"}, True),
        ({"q": "fp16", "kv": "fp16", "out": "fp16", "window": True}, True),
        ({"soft_cap": True, "alibi": True, "chunk": True}, True),
        ({"page_size": 3}, False),
        ({"custom_mask": "bits", "causal": False}, False),
        ({"kv": "nvfp4"}, False),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, False),
    ],
)
def test_which_kernels_share_scores(change, shared):
    """They are the kernels in which TMA loads K and V of 16 bits, and which have no custom mask."""
    op, spec = dispatch.select(replace(WIDE, **change), ARCH)
    tile = spec.tile
    assert op == "attention.sm90" and (tile.pieces > 1) == shared
    if shared:
        for worse in ({"o_parts": 1}, {"load_warps": 2}, {"stages": 3}, {"n": 64}):
            refusal = sm90.supports(replace(spec, tile=replace(tile, **worse)))
            assert refusal is not None and refusal.field == "tile"


def test_pieces_need_tma_16_bits_and_no_custom_mask():
    tile = dispatch.select(WIDE, ARCH)[1].tile
    for change in ({"page_size": 3}, {"custom_mask": "bits", "causal": False}, {"kv": "e4m3"}):
        spec = sm90.candidate(replace(WIDE, **change), ARCH)
        assert sm90.supports(spec) is None
        refusal = sm90.supports(replace(spec, tile=tile))
        assert refusal is not None and "pieces need o_parts" in refusal.why
