"""Prefill of head_dim 512 in the simulator: clusters of two CTAs, which load K and V together, and warpgroups that
share scores. Several clusters, rows for the first CTA of a cluster alone, and several orders of execution. The fixture
`clusters` chooses these kernels; the table of tiles does not."""

from dataclasses import replace

import pytest

from bench.cases.attention import AttentionCase
from cute_kernels.attention import dispatch, sm90
from cute_kernels.attention.request import KernelRequest
from tests.conftest import ARCH
from tests.sim import workloads
from tests.sim.workloads.attention import Scenario

SMS = 5  # of which two clusters take four
WIDE = KernelRequest(head_dim_qk=512, head_dim_vo=512, split_kv="never")
RAGGED = AttentionCase(  # tiles of 128 rows: the third request has 2 rows in its last one, the others have packed rows
    "causal", q_lens=(1, 0, 130, 3), kv_lens=(9, 33, 270, 140), heads_q=2, heads_kv=1, head_dim_qk=512,
    head_dim_vo=512, page_size=16, sink=1.0, data="peaks",
)  # fmt: skip
CASES = {  # case, and the mode to compare with `eager`
    "causal": (RAGGED, "late"),
    "full": (replace(RAGGED, causal=False, page_size=64, data="needles", kv_lens=(300, 0, 200, 1)), ""),
    "window, cap": (replace(RAGGED, window_left=70, soft_cap=9.0, heads_kv=2), ""),
    "one": (replace(RAGGED, q_lens=(129,), kv_lens=(200,), page_size=8), ""),
}


@pytest.mark.kernels
@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("name", CASES)
def test_clusters(name):
    (case, mode), run = CASES[name], workloads.RUN["attention"]
    scenario = Scenario(name, (case,), SMS)
    outcome = run(None, scenario, ARCH, mode="eager")
    assert outcome.error <= 1 and outcome.result.counts["st.async"] > 0
    if mode:
        assert outcome.bits == run(None, scenario, ARCH, mode=mode).bits


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize(
    "change, cluster",
    [
        ({}, 2),
        ({"causal": False}, 2),
        ({"source": "ragged"}, 2),
        ({"q": "fp16", "kv": "fp16", "out": "fp16", "window": True}, 2),
        ({"soft_cap": True, "alibi": True, "chunk": True}, 2),
        ({"page_size": 3}, 1),
        ({"custom_mask": True, "causal": False}, 1),
        ({"kv": "nvfp4"}, 1),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, 1),
    ],
)
def test_which_kernels_have_clusters(change, cluster):
    """Those whose K and V come by TMA, in the type of the MMAs, without a list of blocks."""
    op, spec = dispatch.select(replace(WIDE, **change), ARCH)
    tile = spec.tile
    assert op == "attention.sm90" and tile.cluster == cluster
    assert tile.m_choices == (tile.m * cluster,)
    if cluster > 1:
        for worse in ({"o_parts": 1, "s_parts": 1}, {"stages": 2}, {"n": 48}):
            refusal = sm90.supports(replace(spec, tile=replace(tile, **worse)))
            assert refusal is not None and refusal.field == "tile"


def test_a_cluster_needs_boxes_of_16_bits_and_no_list():
    for change in ({"page_size": 3}, {"custom_mask": True, "causal": False}, {"kv": "e4m3"}):
        spec = sm90.candidate(replace(WIDE, **change), ARCH)
        assert sm90.supports(spec) is None
        refusal = sm90.supports(replace(spec, tile=sm90.tile_table.CLUSTER_512))
        assert refusal is not None and "a cluster needs" in refusal.why


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_call_takes_a_kernel_that_no_device_has_run(dtype):
    """The table names no cluster, so that users get the kernel of one CTA."""
    spec = dispatch.select(replace(WIDE, q=dtype, kv=dtype, out=dtype), ARCH)[1]
    assert spec.tile.cluster == spec.tile.s_parts == 1
