"""Caches of e4m3 and e5m2 with one scale factor per token and head: the reference against float64, kernels in the
simulator, and refusals."""

from dataclasses import replace

import pytest
import torch

from bench.cases.attention import LSE_TOLERANCE, TOKEN_SCALES, AttentionCase, expected, make_call
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import distance, simulated
from wrappers.attention.op import serve

BASE = AttentionCase(
    "", q_lens=(1, 1, 1, 1), kv_lens=(300, 0, 9, 131), heads_q=8, heads_kv=2, head_dim_qk=128, head_dim_vo=128,
    page_size=16, kv_dtype=TOKEN_SCALES, function="decode", sink=True,
)  # fmt: skip
CASES = {
    "8 rows": BASE,
    "16 rows, NHD": replace(BASE, q_lens=(3, 0, 3, 3), kv_lens=(300, 0, 9, 131), layout="NHD", soft_cap=5.0),
    "head_dim 64, window": replace(BASE, head_dim_qk=64, head_dim_vo=64, window_left=100, sink=False),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_simulated(name):
    case = CASES[name]
    p = make_call(case)
    out, lse = torch.full_like(p.q, torch.nan), torch.full(p.q.shape[:2], torch.nan)
    with simulated(ARCH, [], 2, memory=ROOT / "build" / "simulated"):
        serve(p._replace(out=out, lse=lse))
    want = expected(case, p)
    assert distance(out, want[0], 0.0, case.limit(want[0])) <= 1 and distance(lse, want[1], LSE_TOLERANCE) <= 1
