"""Run by test_ptxsim_family.py for sm_100a: attention with a NaN key in a block that masks no key.

Prints, for each type and key, whether O and LSE of every row are NaN. The exponential of key 13 does not use the
special function unit, that of key 1 does.
"""

import math

import torch

from bench.cases.attention import AttentionCase, make_call
from tests.sim.workloads import simulated
from wrappers.attention.op import serve

# Of bf16, another test simulates the kernel, too.
for dtype, dim, nan in (("bf16", 64, math.nan), ("fp8", 128, 0x7F)):
    for key in (1, 13):
        case = AttentionCase(
            "", dtype=dtype, out_dtype="bf16", q_lens=(3,), kv_lens=(300,), heads_q=1, heads_kv=1, head_dim_qk=dim,
            head_dim_vo=dim, page_size=16,
        )  # fmt: skip
        p = make_call(case, "cpu")
        k = p.k.view(torch.uint8) if dtype == "fp8" else p.k
        k[p.requests.page_table[0, 0, key // 16], 0, key % 16, 5] = nan
        o, lse = torch.zeros(*p.q.shape, dtype=torch.bfloat16), torch.zeros(p.q.shape[:2])
        with simulated("sm_100a", [], 1):
            serve(p._replace(out=o, lse=lse))
        print(dtype, key, bool(o.isnan().all() and lse.isnan().all()))
