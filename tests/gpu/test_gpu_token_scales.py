"""Caches with a scale per token and head on a Hopper GPU: decode and prefill against the reference, scales of any
magnitude, rows that append_qkv writes and attention reads, graphs."""

from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases.attention import INT8_SCALES, TOKEN_SCALES, AttentionCase, expected, make_call
from tests.support.gpu import CUDA, close, feature, repeated, same
from wrappers.attention.op import serve

E4M3 = torch.float8_e4m3fn

DECODE = AttentionCase(
    "", q_lens=(1, 1, 1, 1, 1), kv_lens=(3000, 0, 9, 131, 517), heads_q=8, heads_kv=2, head_dim_qk=128,
    head_dim_vo=128, page_size=16, kv_dtype=TOKEN_SCALES, function="decode", sink=True,
)  # fmt: skip
PREFILL = replace(DECODE, function="context", q_lens=(300, 0, 3, 131, 70), strided_q=True)
D64 = {"head_dim_qk": 64, "head_dim_vo": 64}
CASES = {
    "decode": DECODE, "decode, 4 tokens": replace(DECODE, q_lens=(4, 0, 4, 4, 3), layout="NHD", soft_cap=5.0),
    "decode, page 64, d64, window": replace(DECODE, page_size=64, window_left=200, **D64),
    "decode, page 5": replace(DECODE, page_size=5), "decode, d256": replace(DECODE, head_dim_qk=256, head_dim_vo=256),
    "decode, stacked": replace(DECODE, cache="stacked", heads_q=2, dtype="fp16"),
    "decode, e4m3 queries": replace(DECODE, dtype="fp8", out_dtype="bf16"),
    "decode, many": replace(DECODE, q_lens=(1,) * 200, kv_lens=tuple(37 * i % 900 for i in range(200))),
    "prefill": PREFILL, "prefill, fp16, full": replace(PREFILL, dtype="fp16", causal=False),
    "prefill, d64, cap": replace(PREFILL, soft_cap=5.0, **D64), "prefill, page 1": replace(PREFILL, page_size=1),
    "decode, int8": replace(DECODE, kv_dtype=INT8_SCALES), "prefill, int8": replace(PREFILL, kv_dtype=INT8_SCALES),
    "decode, int8, 4 tokens, d64": replace(DECODE, kv_dtype=INT8_SCALES, q_lens=(4, 0, 4, 4, 3), layout="NHD", **D64),
    "decode, int8, page 5, e4m3 queries": replace(
        DECODE, kv_dtype=INT8_SCALES, page_size=5, dtype="fp8", out_dtype="bf16"
    ),
    "prefill, window": replace(PREFILL, window_left=100, heads_q=2),
}  # fmt: skip


def run(p):
    out = torch.full((*p.q.shape[:2], p.dim_vo), torch.nan, dtype=torch.float16 if p.q.dtype == torch.float16
                     else torch.bfloat16, device=CUDA)  # fmt: skip
    lse = torch.full(p.q.shape[:2], torch.nan, device=CUDA)
    serve(p._replace(out=out, lse=lse))
    return out, lse


OWN, OWN_INT8 = (f"{kv}, a scale per token and head" for kv in ("e4m3", "int8"))


@pytest.mark.parametrize("name", CASES)
@feature(*(f"{op} KV {kv}" for op in ("decode", "prefill") for kv in (OWN, OWN_INT8)))
def test_attention(name):
    case = CASES[name]
    p = make_call(case, CUDA)
    got, want = run(p), expected(case, p)
    assert ((got[0].float() - want[0]).abs() <= case.limit(want[0])).all()
    close(got[1], want[1], case.lse_tolerance, case.lse_tolerance, name)
    same(run(p), got, name)


@pytest.mark.parametrize("name", ["decode", "decode, 4 tokens", "prefill", "prefill, fp16, full"])
@pytest.mark.parametrize("unit", [-30, 0, 12])
def test_factors_of_any_magnitude(name, unit):
    """Factors of V differ by up to 2^12 from token to token, around a power of two; those of K are small or zero."""
    case = CASES[name]
    if case.dtype == "fp16" and abs(unit) > 10:
        pytest.skip("V is no fp16 number")
    p = make_call(case, CUDA)
    gen = torch.Generator(CUDA).manual_seed(1)
    power = torch.randint(-6, 7, p.v_scales.shape, generator=gen, device=CUDA)
    few = torch.randint(0, 9, p.k_scales.shape, generator=gen, device=CUDA) > 0
    p = p._replace(v_scales=p.v_scales * 2.0 ** (power + unit), k_scales=p.k_scales * few)
    got, want = run(p), expected(case, p)
    largest = 4.0 * 2.0 ** (6 + unit)
    assert ((got[0].float() - want[0]).abs() <= 2e-2 * largest + 2e-2 * want[0].abs()).all()
    seen = want[0].abs() > 0.05 * largest
    assert ((got[0].float() - want[0]).abs() <= 2e-2 * want[0].abs())[seen].float().mean() > 0.98
    same(run(p), got, name)


def test_rows_are_written_and_read_in_one_graph():
    """A decode step of a layer: two launches, which a graph repeats with other rows, slots and lengths."""
    kv, sf = torch.zeros(40, 2, 2, 16, 128, device=CUDA).to(E4M3), torch.zeros(40, 2, 2, 16, device=CUDA)
    kv.view(torch.uint8).fill_(0x7F)
    sf.fill_(torch.nan)
    lens, slots = torch.zeros(2, device=CUDA).int(), torch.full((2,), -1, device=CUDA)
    table = torch.arange(40, device=CUDA).view(2, 20).int()
    q, k, v = (torch.zeros(2, heads, 128, device=CUDA).bfloat16() for heads in (8, 2, 2))
    target = wrappers.KVCacheTarget(kv, "HND", sf)
    keys, values = (torch.randn(2, 320, 2, 128, device=CUDA).bfloat16() for _ in range(2))
    wrappers.append_qkv(None, keys.flatten(0, 1), values.flatten(0, 1), target, torch.arange(640, device=CUDA))

    def step():
        wrappers.append_qkv(None, k, v, target, slots)
        return wrappers.trtllm_batch_decode_with_kv_cache(q, kv, None, table, lens, None, 128**-0.5, kv_cache_sf=sf)

    replay = repeated(CUDA, step)
    for length in (33, 250, 90):
        both = length, length // 2
        lens.copy_(torch.tensor(both))
        slots.copy_(torch.tensor([length - 1, 320 + length // 2 - 1]))
        for t in (q, k, v):
            t.normal_()
        out = replay()
        for b, n in enumerate(both):
            keys[b, n - 1], values[b, n - 1] = k[b], v[b]
            s = torch.einsum("hgd,nhd->hgn", q[b].float().view(2, 4, -1), keys[b, :n].float()) * 128**-0.5
            want = torch.einsum("hgn,nhd->hgd", s.softmax(-1), values[b, :n].float()).flatten(0, 1)
            assert (out[b].float() - want).abs().max() < 0.15


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@feature(f"append rows quantised to {OWN}", f"append rows quantised to {OWN_INT8}")
def test_writes_equal_those_of_the_reference(dtype):
    k, v = (torch.randn(300, 3, 96).bfloat16() * 2.0 ** torch.randint(-20, 20, (300, 3, 1)) for _ in range(2))
    slots = torch.randperm(400)[:300]
    found = []
    for device in ("cpu", CUDA):
        kv = torch.zeros(25, 2, 16, 3, 96, device=device).to(dtype)
        sf = torch.zeros(25, 2, 16, 3, device=device)
        rows = (t.bfloat16().to(device) for t in (k, v))
        wrappers.append_qkv(None, *rows, wrappers.KVCacheTarget(kv, "NHD", sf), slots.to(device))
        found.append((kv.view(torch.uint8).cpu(), sf.cpu()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
