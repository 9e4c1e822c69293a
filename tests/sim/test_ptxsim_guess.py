"""Prefill in the simulator where rows' maxima grow from block to block, in some rows of a warp: exponentials are then
computed anew."""

import math

import pytest
import torch

from bench.cases import attention as cases
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import distance, simulated
from wrappers import single_prefill_with_kv_cache_return_lse

pytestmark = pytest.mark.kernels
MEMORY = ROOT / "build" / "simulated"
EVERY, GROWTH = 150, 40.0  # keys after which scores fall, by so many log2 units: blocks come last first
CASES = {  # types of q, k and v; head_dim
    "bf16": ("bf16", "bf16", 64),
    "fp8": ("fp8", "fp8", 128),
    "bf16 over fp8": ("bf16", "fp8", 128),
    "shared scores": ("bf16", "bf16", 512),
}


@pytest.mark.parametrize("name", CASES)
def test_maxima_that_grow(name):
    query, cache, dim = CASES[name]
    rows, keys = 70, 900
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(rows, 2, dim, generator=gen)
    k, v = (0.5 * torch.randn(keys, 1, dim, generator=gen) for _ in range(2))
    q[..., 0] = torch.where(torch.arange(rows) % 3 == 0, math.sqrt(dim), 0.0)[:, None]
    k[..., 0] = (GROWTH * math.log(2) * (keys // EVERY - torch.arange(keys) // EVERY))[:, None]
    q, k, v = q.to(cases.DTYPES[query]), k.to(cases.DTYPES[cache]), (v + 1).to(cases.DTYPES[cache])

    def call():
        return single_prefill_with_kv_cache_return_lse(q, k, v, causal=True, o_dtype=torch.bfloat16)

    with simulated(ARCH, [], 2, memory=MEMORY):
        out, lse = call()
    want, want_lse = call()
    tolerance = cases.AttentionCase("", dtype=query, kv_dtype="" if query == cache else cache)
    assert distance(out, want.float(), tolerance.tolerance) <= 1
    assert distance(lse, want_lse, tolerance.lse_tolerance) <= 1
