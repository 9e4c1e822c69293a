"""FP8 prefill in the simulator: every value of V comes through the transposition to its place, whatever the swizzle and
the tail, and O is promoted. Factors a head, also of bf16 queries over e4m3 K and V."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.cases import attention as cases
from bench.cases.attention import AttentionCase
from cute_kernels.attention.sm90 import tile_table
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import distance, simulated
from wrappers import single_prefill_with_kv_cache_return_lse
from wrappers.attention.op import serve

pytestmark = pytest.mark.kernels
MEMORY = ROOT / "build" / "simulated"
ALONE = AttentionCase("", dtype="fp8", out_dtype="bf16", heads_q=1, heads_kv=1, sink=False)
DIMS = ((64, 64), (128, 128))  # boxes of 128 and of 32 keys


def run(case, **changes):
    """(problem, out, lse)."""
    p = cases.make_call(case)._replace(**changes)
    shape = len(p.q), case.heads_q, case.head_dim_vo
    out, lse = torch.full(shape, math.nan, dtype=torch.bfloat16), torch.full(shape[:2], math.nan)
    with simulated(ARCH, [], 2, memory=MEMORY):
        serve(p._replace(out=out, lse=lse))
    return p, out, lse


@pytest.mark.parametrize("dims", [DIMS[0], pytest.param(DIMS[1], marks=pytest.mark.full)])
def test_v_reaches_its_place(dims):
    """A row that sees its own key alone gives the bits of its V: of all keys of two blocks, the second of them cut."""
    n = tile_table.column("fp8")[dims].general.n
    length = n + 37
    qk, vo = dims
    case = replace(ALONE, q_lens=(length,), kv_lens=(length,), head_dim_qk=qk, head_dim_vo=vo, window_left=0)
    p, out, _ = run(case)
    rows = p.v[p.requests.page_table[0, 1, : -(-length // case.page_size)]].float()  # (pages, 1, P, D)
    want = rows.transpose(1, 2).reshape(-1, 1, vo)[:length]
    assert torch.equal(out.float(), want)


def test_long_rows_do_not_lose_what_they_add_up():
    """An 8-bit MMA adds up towards zero in few bits: the mean of 4,096 equal values would come out 6 % short."""
    keys, value = 4096, 1.125
    case = replace(ALONE, q_lens=(1,), kv_lens=(keys,), causal=False, page_size=64, head_dim_qk=128, head_dim_vo=128)
    p = cases.make_call(case)
    v = torch.full(p.v.shape, value).to(p.v.dtype)
    _, out, lse = run(case, q=torch.zeros_like(p.q), v=v)
    assert (out.float() - value).abs().max() < 0.02 * value
    assert abs(float(lse) - math.log2(keys)) < 1e-3


def test_a_sequence_of_more_than_16384_keys():
    """P of more than 16,384 keys is raised by 2^7, so that row_max follows in 15 blocks, of the 20 in the window."""
    lens = {"q_lens": (3,), "kv_lens": (16_500,), "window_left": 2400}
    case = replace(ALONE, **lens, head_dim_qk=64, head_dim_vo=64, page_size=64)
    p, out, lse = run(case)
    want, want_lse = cases.expected(case, p)
    assert distance(out, want, case.tolerance) <= 1 and distance(lse, want_lse, case.lse_tolerance) <= 1


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_scales_a_head(dtype):
    """Scales of e4m3 k and v and of q, with heads of a KV head as rows of one tile and as tiles of their own."""
    gen, case = torch.Generator().manual_seed(0), replace(ALONE, dtype=dtype)
    for rows in (5, 70):
        shapes = (rows, 4, 128), (90, 2, 128), (90, 2, 128)
        q, k, v = (torch.randn(*shape, generator=gen).to(torch.float8_e4m3fn) for shape in shapes)
        q = q.to(cases.DTYPES[dtype])
        scales = {f"{n}_scale": torch.rand(x.shape[1], generator=gen) + 0.5 for n, x in zip("qkv", (q, k, v))}
        call = partial(single_prefill_with_kv_cache_return_lse, q, k, v, causal=True, o_dtype=torch.bfloat16, **scales)
        with simulated(ARCH, [], 2, memory=MEMORY):
            out, lse = call()
        want, want_lse = call()
        assert distance(out, want.float(), case.tolerance) <= 1 and distance(lse, want_lse, case.lse_tolerance) <= 1
