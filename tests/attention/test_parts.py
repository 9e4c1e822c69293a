"""Merges of tiles of more parts than a warp loads at once, and launches of more requests than it knows at once, in the
simulator."""

from dataclasses import replace

import pytest

from bench.cases.attention import AttentionCase
from tests.conftest import ARCH
from tests.sim.workloads import attention, simulated

LONG = AttentionCase(
    "long", function="decode", q_lens=(1,), kv_lens=(35 * 128 - 7,), heads_q=4, heads_kv=1, head_dim_qk=128,
    head_dim_vo=128, sink=True, data="needles",
)  # fmt: skip
CASES = {  # and multiprocessors, of which each has a part of a long request
    "35 parts": (LONG, 35),
    "12 parts": (LONG, 12),
    "10 parts, NVFP4": (replace(LONG, kv_dtype="nvfp4", kv_lens=(10 * 384,)), 10),
    "70 requests": (replace(LONG, q_lens=(1,) * 70, kv_lens=tuple(37 * i % 301 for i in range(70))), 7),
    "two of 70 requests": (replace(LONG, q_lens=(1,) * 70, kv_lens=(*(0,) * 66, 700, 0, 20, 0)), 5),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_parts_and_requests_of_many(name):
    case, sms = CASES[name]
    with simulated(ARCH, [], sms):
        _, error = attention.call(case)
    assert error <= 1
