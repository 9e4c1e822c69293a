"""Caches of e4m3 and e5m2 with one scale factor per token and head: the reference against float64, kernels in the
simulator, and refusals."""

from dataclasses import replace

import pytest
import torch

from bench.cases.attention import INT8_SCALES, TOKEN_SCALES, AttentionCase, expected, make_call
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import distance, simulated
from wrappers import KVCacheTarget, QueryOutput, RMSNorm, RotaryEmbedding, append_qkv
from wrappers.attention.op import serve

BASE = AttentionCase(
    "", q_lens=(1, 1, 1, 1), kv_lens=(300, 0, 9, 131), heads_q=8, heads_kv=2, head_dim_qk=64, head_dim_vo=64,
    page_size=16, kv_dtype=TOKEN_SCALES, function="decode", sink=True,
)  # fmt: skip
WIDE = replace(BASE, head_dim_qk=128, head_dim_vo=128)
CASES = {
    "8 rows": BASE,
    "int8": replace(WIDE, kv_dtype=INT8_SCALES, q_lens=(2, 2, 2, 1)),
    "int8, prefill": replace(BASE, kv_dtype=INT8_SCALES, function="context", q_lens=(70, 0, 3, 131)),
    "16 rows, NHD": replace(WIDE, q_lens=(3, 0, 3, 3), kv_lens=(300, 0, 9, 131), layout="NHD", soft_cap=5.0),
    "prefill": replace(BASE, function="context", q_lens=(70, 0, 3, 131), strided_q=True),
    "prefill, fp16, window": replace(
        WIDE,
        function="context",
        q_lens=(70, 5, 3, 131),
        dtype="fp16",
        window_left=100,
        cache="stacked",
    ),
    "window": replace(BASE, window_left=100, sink=False),
}
# Kernels that no other test compiles. Each part of them is in a kernel that runs without --all.
LARGE = {"prefill", "prefill, fp16, window", "16 rows, NHD", "int8, prefill"}


@pytest.mark.kernels
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in LARGE else ()) for n in CASES])
def test_simulated(name):
    case = CASES[name]
    p = make_call(case)
    out, lse = torch.full_like(p.q, torch.nan), torch.full(p.q.shape[:2], torch.nan)
    with simulated(ARCH, [], 2, memory=ROOT / "build" / "simulated"):
        serve(p._replace(out=out, lse=lse))
    want = expected(case, p)
    assert distance(out, want[0], 0.0, case.limit(want[0])) <= 1 and distance(lse, want[1], case.lse_tolerance) <= 1


# ---- written by append_qkv

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SLOTS = torch.tensor([17, -1, 3, 40, 8])


def rows_of(dim=128, seed=0, dtype=torch.bfloat16, unit=1.0):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(5, heads, dim, generator=gen) for heads in (4, 2, 2))
    rows = [(t * unit * torch.exp2(torch.randint(-9, 9, (5, 1, 1), generator=gen))).to(dtype) for t in (k, v)]
    return q.to(dtype), *rows


def cache_of(dim, layout="NHD", dtype=E4M3, stacked=False):
    """Return a target whose rows, and their scales, hold arbitrary bytes."""
    shape = (3, 16, 2) if layout == "NHD" else (3, 2, 16)
    kv, sf = torch.full((3, 2, *shape[1:], dim), 3.0).to(dtype), torch.full((3, 2, *shape[1:]), 7.0)
    if stacked:
        return KVCacheTarget(kv, layout, sf)
    return KVCacheTarget(kv.unbind(1), layout, sf.unbind(1))


def values_of(target):
    """Return K and V as (pages * P, H, D) in fp32, and their scales (pages * P, H)."""
    kv, sf = (t.unbind(1) if isinstance(t, torch.Tensor) else t for t in (target.kv, target.sf))
    if target.layout == "HND":
        kv, sf = ([t.transpose(1, 2) for t in both] for both in (kv, sf))
    return [(t.flatten(0, 1).float() * s.flatten(0, 1)[..., None], s.flatten(0, 1)) for t, s in zip(kv, sf)]


WRITES = {
    "plain": (dict(dim=128), {}, {}),
    "HND, fp16, any strides": (dict(dim=72, dtype=torch.float16), dict(layout="HND"), {}),
    "int8": (dict(dim=128), dict(dtype=torch.int8), {}),
    "int8, one vector past the row": (dict(dim=72), dict(dtype=torch.int8), {}),
    "int8, norm, RoPE": (dict(dim=128), dict(dtype=torch.int8), dict(
        norm=RMSNorm(torch.linspace(0.5, 1.5, 128).bfloat16(), torch.linspace(1, 2, 128).bfloat16()),
        rope=RotaryEmbedding(torch.tensor([5, 9, 0, 3, 7])), out=QueryOutput(dtype=E4M3, scale=0.25),
    )),
    "stacked e5m2": (dict(dim=128), dict(stacked=True, dtype=E5M2), {}),
    "norm, RoPE, 8-bit Q": (dict(dim=128), {}, dict(
        norm=RMSNorm(torch.linspace(0.5, 1.5, 128).bfloat16(), torch.linspace(1, 2, 128).bfloat16()),
        rope=RotaryEmbedding(torch.tensor([5, 9, 0, 3, 7])), out=QueryOutput(dtype=E4M3, scale=0.25),
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_rows_are_divided_by_their_largest_magnitude(name):
    """Of the reference. Rows without a slot, and rows of no token, stay as they were."""
    given, where, options = WRITES[name]
    q, k, v = rows_of(**given)
    target = cache_of(given["dim"], **where)
    append_qkv(q if options else None, k, v, target, SLOTS, **options)
    most, relative = {E4M3: (448.0, 2.0**-4), E5M2: (57344.0, 2.0**-3), torch.int8: (127.0, 0)}[
        where.get("dtype", E4M3)
    ]
    absolute = 2.0**-9 if relative else 0.5001
    for (got, scales), x in zip(values_of(target), (k, v)):
        assert (scales[[1, 16, 47]] == 7).all() and (got[[1, 16, 47]] == 21).all()
        if options and x is k:
            continue  # normalised and rotated
        held, rows = SLOTS >= 0, x.float()
        want = rows.abs().amax(-1) / most
        assert torch.equal(scales[SLOTS[held]], want[held])
        error = (got[SLOTS[held]] - rows[held]).abs()
        assert (error <= rows[held].abs() * relative + want[held][..., None] * absolute).all()


@pytest.mark.kernels
@pytest.mark.parametrize("name", WRITES)
def test_simulated_writes(name):
    """The bytes of the cache and of its scales are those of the reference, or next to them after a norm."""
    given, where, options = WRITES[name]
    q, k, v = rows_of(**given)
    targets = [cache_of(given["dim"], **where) for _ in range(2)]
    outs = [append_qkv(q if options else None, k, v, targets[0], SLOTS, **options)]
    with simulated(ARCH, [], 2, memory=ROOT / "build" / "simulated"):
        outs.append(append_qkv(q if options else None, k, v, targets[1], SLOTS, **options))
    for (want, scales), (got, own) in zip(*map(values_of, targets)):
        if options:
            torch.testing.assert_close(own, scales, rtol=1e-5, atol=0)
            step = scales[..., None] * (1.001 if where.get("dtype") is torch.int8 else 2**-9)
            assert ((got - want).abs() <= 2**-3 * want.abs() + step).all()
        else:
            assert torch.equal(own, scales) and torch.equal(got, want)
    if options:
        assert (outs[0].view(torch.uint8).int() - outs[1].view(torch.uint8).int()).abs().max() <= 1


HOSTILE = torch.tensor([0.0, -0.0, 1e-38, 1e-45, 3e38, float("inf"), float("-inf"), float("nan")])


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_rows_of_any_numbers(dtype):
    """Zeros, numbers below the normal ones, infinities and NaN: scales are normal numbers, NaN stays NaN, or is 0."""
    rows = (
        torch.stack([HOSTILE[[i, j]].repeat(32) for i in range(8) for j in (0, i)]).bfloat16()[:, None].repeat(1, 2, 1)
    )
    targets = [cache_of(64, dtype=dtype) for _ in range(2)]
    append_qkv(None, rows, rows, targets[0], torch.arange(16))
    with simulated(ARCH, [], 2, memory=ROOT / "build" / "simulated"):
        append_qkv(None, rows, rows, targets[1], torch.arange(16))
    for (want, scales), (got, own) in zip(*map(values_of, targets)):
        assert torch.equal(own, scales) and torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))
        assert (scales[:16] >= 2.0**-126).all() and scales.isfinite().all()


BAD = {
    "scales' type": (lambda t: t._replace(sf=tuple(s.half() for s in t.sf)), TypeError, "cache.kv .K.: dtype"),
    "scales' shape": (lambda t: t._replace(sf=tuple(s[:2] for s in t.sf)), ValueError, "cache.sf .K.: shape .2, 16,"),
    "cache's type": (lambda t: t._replace(kv=tuple(x.bfloat16() for x in t.kv)), TypeError, "cache.kv"),
    "a scale besides": (lambda t: t._replace(k_scale=2.0), ValueError, "cache.k_scale: 2.0, must be 1.0"),
    "interleaved": (lambda t: t._replace(v_sf_interleaved=True), ValueError, "cache.v_sf_interleaved: True"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_targets_are_refused(name):
    change, error, text = BAD[name]
    q, k, v = rows_of()
    with pytest.raises(error, match=f"^{text}"):
        append_qkv(None, k, v, change(cache_of(128)), SLOTS)
