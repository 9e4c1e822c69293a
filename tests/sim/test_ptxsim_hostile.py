"""Queries that are no numbers, in the simulator: they reach their own row alone, and are seen there."""

from dataclasses import replace

import pytest
import torch

from bench.cases import attention as cases
from bench.cases import mla
from bench.cases.attention import AttentionCase
from bench.cases.mla import MlaCase
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import simulated
from tests.sim.workloads.attention import distance, launched

pytestmark = pytest.mark.kernels
MEMORY = ROOT / "build" / "simulated"
LATER = "few rows, whole", "two CTAs, split", "decode, whole", "e4m3 cache"
LATENT = MlaCase(lens=(500,), heads=5)
LATENT_CASES = {
    "few rows, split": replace(LATENT, record="656", chosen=400),
    "few rows, whole": replace(LATENT, record="656", chosen=60),
    "64 rows, split": replace(LATENT, heads=20),
    "chosen, whole": replace(LATENT, heads=20, chosen=60),
    "two CTAs, split": replace(LATENT, heads=70),
}


def marked(names):
    """Return names as parameters, of which `--all` alone runs some."""
    return [pytest.param(name, marks=pytest.mark.full if name in LATER else ()) for name in names]


@pytest.mark.parametrize("name", marked(LATENT_CASES))
def test_a_query_of_latents(name):
    case = LATENT_CASES[name]
    i = mla.make(case)
    q = i.q.clone()
    q[0, 0, 3] = torch.nan
    with simulated(ARCH, [], 4, memory=MEMORY):
        out, lse = mla.call(case, i._replace(q=q))
    want = mla.expected(case, i)
    assert out[0, 0, 3].isnan().all() and lse[0, 3].isnan().all()
    out[0, 0, 3], lse[0, 3] = want.out[0, 0, 3].to(out.dtype), want.lse[0, 3].to(lse.dtype)
    assert mla.error(case, (out, lse), want) <= 1


CASES = {case.name: case for case in (
    AttentionCase("decode, split", function="decode", q_lens=(1,), kv_lens=(900,)),
    AttentionCase("decode, whole", function="decode", q_lens=(1,) * 3, kv_lens=(40, 9, 0), sink=1.0),
    AttentionCase("prompt, whole", q_lens=(70, 9), kv_lens=(90, 200)),
    AttentionCase("prompt, split", q_lens=(9,), kv_lens=(900,)),
    AttentionCase("e4m3 cache", function="decode", q_lens=(1,), kv_lens=(900,), kv_dtype="fp8"),
)}  # fmt: skip


@pytest.mark.parametrize("name", marked(CASES))
def test_a_query(name):
    case = CASES[name]
    problem = cases.make_call(case)
    problem.q[0, 1] = torch.nan
    want, want_lse = cases.expected(case, problem)
    assert want[0, 1].isnan().all() and want_lse[0, 1].isnan()
    with simulated(ARCH, [], 4, memory=MEMORY):
        out, lse = launched(case, problem)
    assert distance(out, want, 0.0, case.limit(want)) <= 1
    assert distance(lse, want_lse, case.lse_tolerance) <= 1
