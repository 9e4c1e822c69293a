"""`append_qkv` against loops over rows in float64, its launches, plans and refusals, and dispatch."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import wrappers
from bench.cases import cache_write as cases
from bench.cases.cache_write import CacheWriteCase
from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import FROM_FIRST, INDICES, PAGES
from cute_kernels.cache_write.request import CacheWriteRequest
from cute_kernels.cache_write.spec import CacheWriteSpec
from tests.conftest import ARCH
from tests.sim.workloads import simulated
from tests.support.emulated import emulation
from wrappers import BlockTable, KVCacheTarget, PageLists, QueryOutput, RMSNorm, RotaryEmbedding, append_qkv, fp4
from wrappers.cache_write.call import CacheWriteCall, QueryTransform
from wrappers.cache_write.checks import KVCACHE
from wrappers.cache_write.op import serve
from wrappers.cache_write.rotation import turns

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FULL = CacheWriteCase(heads=(4, 2), tokens=7, norm="shared", rope="angles")


def angle(rope, dim, pair, position):
    """The angle of a pair at a position, and of Llama 3.1's rule."""
    frequency = rope.theta ** (-2 * pair / dim)
    if not rope.llama31:
        return position * frequency / rope.scale
    low, high, length = rope.llama31
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return position * frequency
    if wavelength > length / low:
        return position * frequency / rope.scale
    smooth = (length / wavelength - low) / (high - low)
    return position * ((1 - smooth) * frequency / rope.scale + smooth * frequency)


def turned(row, rope, position):
    """A row in float64, rotated pair by pair."""
    dim = rope.cos_sin_cache.shape[1] if rope.cos_sin_cache is not None else rope.rotary_dim or len(row)
    row = row.clone()
    for pair in range(dim // 2):
        if rope.cos_sin_cache is None:
            cos, sin = (f(angle(rope, dim, pair, position)) for f in (math.cos, math.sin))
        else:
            cos, sin = (rope.cos_sin_cache[position, pair + shift].item() for shift in (0, dim // 2))
        i, j = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + dim // 2)
        row[i], row[j] = row[i] * cos - row[j] * sin, row[j] * cos + row[i] * sin
    return row


def normal(row, weight, norm):
    if weight is None:
        return row
    return row / (row.square().mean() + norm.eps).sqrt() * (weight.double() + norm.offset)


def places_of(case, inputs):
    """(page, row, position) of every token; None for those that are not stored."""
    where, size, found = inputs["places"], case.page_size, []
    for token in range(case.tokens):
        if isinstance(where, PageLists):
            b, position = where.batch_indices[token].item(), where.positions[token].item()
            pages = where.kv_indices[where.kv_indptr[b] : where.kv_indptr[b + 1]].tolist()
            found.append((pages[position // size], position % size, position))
        elif isinstance(where, BlockTable):
            b = max(b for b in range(len(where.seq_lens)) if where.cu_seqlens_q[b] <= token)
            position = (where.seq_lens[b] - (where.cu_seqlens_q[b + 1] - token)).item()
            found.append((where.block_table[b, position // size].item(), position % size, position))
        else:
            slot = where[token].item()
            found.append((slot // size, slot % size, None) if slot >= 0 else None)
    return found


@pytest.mark.parametrize("case", [
    FULL,
    replace(FULL, norm="heads", rope="llama31", places="table", index=torch.int64, layout="HND"),
    replace(FULL, norm="k", rope="cache", places="lists", rotary_dim=32, stacked=False, dims=(64, 96),
            interleaved=True),
    replace(FULL, norm="", rope="angles", interleaved=True, rotary_dim=80, dims=(96, 96), beside=True, stacked=False),
])  # fmt: skip
def test_rows_against_loops(case):
    inputs = cases.make_inputs(case)
    kv = inputs["cache"].kv
    before = [t.clone() for t in (kv.unbind(1) if isinstance(kv, torch.Tensor) else kv)]
    places, q, rope, norm = places_of(case, inputs), inputs["q"].double(), inputs["rope"], inputs.get("norm", RMSNorm())
    got = append_qkv(**inputs)
    assert got is inputs["out"].out
    after = kv.unbind(1) if isinstance(kv, torch.Tensor) else kv
    keys, values = (t if case.layout == "NHD" else t.transpose(1, 2) for t in after)
    stored = [torch.zeros(t.shape[:2] if case.layout == "NHD" else (t.shape[0], t.shape[2]), dtype=torch.bool)
              for t in after]  # fmt: skip

    def weight(which, head):
        given = getattr(norm, which)
        return given[head] if given is not None and given.ndim == 2 else given

    for token, place in enumerate(places):
        position = rope.positions[token].item() if rope.positions is not None else place[2]
        has_row = rope.cos_sin_cache is None or position < len(rope.cos_sin_cache)
        for head in range(case.heads[0]):
            if not has_row:
                assert (got[token, head].view(torch.uint8) == cases.POISON).all()
                continue
            wanted = turned(normal(q[token, head], weight("q_weight", head), norm), rope, position)
            torch.testing.assert_close(got[token, head].double(), wanted, rtol=2**-8, atol=1e-5)
        for head in range(case.heads[1]) if has_row and place else ():
            page, row, _ = place
            wanted = turned(normal(inputs["k"][token, head].double(), weight("k_weight", head), norm), rope, position)
            torch.testing.assert_close(keys[page, row, head].double(), wanted, rtol=2**-8, atol=1e-5)
            assert torch.equal(values[page, row, head], inputs["v"][token, head])
            for side in stored:
                side[page, row] = True
    for side, old, new in zip(stored, before, after, strict=True):
        old, new = (t if case.layout == "NHD" else t.transpose(1, 2) for t in (old, new))
        assert torch.equal(old[~side].contiguous().view(torch.uint8), new[~side].contiguous().view(torch.uint8))
        assert side.any()


@pytest.mark.parametrize("dtype,scales", [(E4M3, 0.5), (E5M2, 0.37), (E4M3, torch.tensor([0.25, 3.0]))])
def test_rows_of_8_bits(dtype, scales):
    k = torch.randn(3, 2, 24).half() * 100
    k[0, 0, :5] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    cache = torch.zeros(2, 2, 4, 2, 24).to(dtype)
    append_qkv(None, k, -k, KVCacheTarget(cache, "NHD", None, scales, scales), torch.tensor([5, 0, -1]))
    by_head = torch.as_tensor(scales).float().expand(2)[:, None]
    most = torch.finfo(dtype).max
    for slot, token in ((5, 0), (0, 1)):
        for side, rows_of in enumerate((k, -k)):
            wanted = (rows_of[token].float() / by_head).clamp(-most, most).to(dtype).float()
            assert torch.equal(cache[slot // 4, side, slot % 4].float().nan_to_num(7e4), wanted.nan_to_num(7e4))
    assert cache.float().abs().gt(0).any(-1).any(-1).sum() == 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_nvfp4(interleaved):
    k, v = torch.randn(8, 2, 64).bfloat16(), torch.randn(8, 2, 64).bfloat16()
    codes, sf = (torch.zeros(2, 2, 2, 4, n, dtype=torch.uint8) for n in (32, 4))
    target = KVCacheTarget(codes, "HND", sf, 0.5, torch.tensor([0.25, 2.0]), interleaved)
    append_qkv(None, k, v, target, torch.arange(8))
    for head, v_scale in enumerate((0.25, 2.0)):
        for side, x, scale in ((0, k, 0.5), (1, v, v_scale)):
            data, factors = fp4.nvfp4_quantize(x[:, head], 1 / scale)
            assert torch.equal(codes[:, side, head].flatten(0, 1), data)
            found = sf[:, side, head].view(2, 4, 4)
            if side and interleaved:  # block s of row t at 4 s + t of the page's 16 bytes
                found = found.reshape(2, 4, 4).transpose(1, 2)
            assert torch.equal(found.flatten(0, 1), factors.view(torch.uint8))


def test_angles_are_exact_at_far_positions():
    for numbers in ((64, 1e4, 1.0), (64, 5e5, 8.0, 1.0, 4.0, 8192)):
        high, low = turns(torch.device("cpu"), *numbers)[0].double().chunk(2)
        rope = RotaryEmbedding(scale=numbers[2], theta=numbers[1], llama31=numbers[3:] or None)
        for pair in range(32):
            wanted = angle(rope, 64, pair, 131_071) / (2 * math.pi)
            assert abs((high[pair] + low[pair]).item() * 131_071 - wanted) < 1e-9 * max(1, wanted)


def test_launches():
    """What the kernel gets: the tensors as they are, int64 as words, the reciprocal of NVFP4's scales; one plan per
    form."""
    with emulation() as machine:
        for _ in range(2):
            append_qkv(**cases.make_inputs(replace(FULL, index=torch.int64, places="lists")))
        assert len(machine.plans) == 1 and len(machine.launches) == 2
        first = machine.launches[0]
        named = ("batch_indices", "positions", "kv_indices", "kv_indptr", "rope_positions")
        assert first["wide"] == sum(1 << INDICES.index(name) for name in named)
        assert first["k_groups"] == 8 and first["v_groups"] == 0 and first["lanes_log2"] == 3
        append_qkv(**cases.make_inputs(CacheWriteCase(cache="nvfp4")))
        append_qkv(**cases.make_inputs(replace(FULL, cache="e5m2", q8=True, scales="heads")))
        assert machine.launches[2]["k_scale"] == 1 / 0.37 and machine.launches[3]["q_fp8"].dtype == E5M2
        assert len(machine.launches[3]["k_scale_ptr"]) == 2 and len(machine.launches[3]["q_out"]) == 0
        inputs = cases.make_inputs(FULL)
        append_qkv(**inputs | {"q": inputs["q"][:0], "k": inputs["k"][:0], "v": inputs["v"][:0],
                               "places": inputs["places"][:0], "out": QueryOutput(),
                               "rope": inputs["rope"]._replace(positions=torch.zeros(0).int())})  # fmt: skip
        assert len(machine.launches) == 4
        assert machine.specs[0] == CacheWriteSpec("bf16", "bf16", True)
        append_qkv(**cases.make_inputs(CacheWriteCase(heads=(2, 2))))  # Q is copied; there is no table to rotate by


def test_q_without_a_cache():
    """A cache without pages: Q is transformed, nothing else is written."""
    wanted = append_qkv(**cases.make_inputs(FULL))
    inputs = cases.make_inputs(FULL)
    inputs["cache"] = KVCacheTarget(inputs["cache"].kv[:0])
    assert torch.equal(append_qkv(**inputs), wanted)
    inputs["out"].out.zero_()
    with emulation():
        assert torch.equal(append_qkv(**inputs), wanted)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


NOWHERE = {  # places of two tokens that name no row
    "no pages": PageLists(ints(0, 0), ints(0, 1), ints(), ints(0, 0)),
    "no requests": PageLists(ints(-1, -1), ints(0, 0), ints(), ints(0)),
    "no columns": BlockTable(torch.zeros(1, 0, dtype=torch.int32), ints(2), ints(0, 2)),
    "no rows": BlockTable(torch.zeros(0, 3, dtype=torch.int32), ints(), ints(0)),
}


@pytest.mark.parametrize("where", [emulation, pytest.param(lambda: simulated(ARCH, []), marks=pytest.mark.kernels)])
@pytest.mark.parametrize("name", NOWHERE)
def test_q_without_entries(name, where):
    """Q is written, K and V are not, and other functions that transform are no exception."""
    x, cache = (t.bfloat16() for t in (torch.ones(2, 1, 16), torch.zeros(1, 2, 4, 1, 16)))
    with where():
        assert torch.equal(append_qkv(x, x, x, KVCacheTarget(cache), NOWHERE[name]), x)
    assert not cache.any()


@pytest.mark.kernels
def test_lengths_of_more_requests_than_threads_have_rows():
    """One token of the first of 700 requests."""
    lens, total = torch.arange(700, dtype=torch.int32), torch.full((700,), -5, dtype=torch.int32)
    k, cache = torch.ones(1, 1, 16).bfloat16(), torch.zeros(2, 1, 4, 16).bfloat16()
    starts = torch.ones(701, dtype=torch.int32)
    starts[0] = 0
    table = torch.zeros(700, 1, dtype=torch.int32)
    transform = QueryTransform(rope=FROM_FIRST, kv_lens_out=total)
    call = CacheWriteCall(KVCACHE, k, k, cache, cache.clone(), False, PAGES, page_table=table, cu_seqlens=starts)
    with simulated(ARCH, []):
        serve(call._replace(kv_lens=lens, transform=transform))
    assert torch.equal(total, lens + starts.diff()) and cache[0, 0, 0].all() and not cache[0, 0, 1:].any()


@pytest.mark.kernels
@pytest.mark.parametrize("interleave", [False, True])
def test_elements_that_are_not_rotated_stay(interleave):
    x = torch.ones(1, 1, 32).bfloat16()
    x[..., 20], x[..., 22], x[..., 30] = math.inf, -math.inf, -0.0
    with simulated(ARCH, []):
        q, _ = wrappers.apply_rope_pos_ids(x, x, ints(1), rotary_dim=16, interleave=interleave)
    assert torch.equal(q[..., 16:].view(torch.int16), x[..., 16:].view(torch.int16))


def test_memory_that_is_shared_in_a_later_call():
    """A known plan notices what a first call refuses."""
    q, k, v = torch.randn(3, 4, 2, 16, generator=torch.Generator().manual_seed(0)).half()
    cache, slots = torch.zeros(3, 2, 8, 2, 16).half(), ints(0, 1, 2, 3)
    target, inside = KVCacheTarget(cache), cache[1, :, :4]
    with emulation():
        append_qkv(q, k, v, target, slots, out=QueryOutput(torch.empty_like(q)))
        append_qkv(q, k, v, target, slots, out=QueryOutput(torch.empty_like(q)))
        new = torch.empty_like(q)
        later = (q, k, v, k), (q, k, v, v), (q, inside[1], v, new), (q, k, inside[0], new), (inside[1], k, v, new)
        for *given, out in later:
            with pytest.raises(ValueError, match="overlaps the memory of"):
                append_qkv(*given, target, slots, out=QueryOutput(out))


BAD = {  # what other fields make wrong; test_append_qkv_refusals.py has the bad values of each alone
    "v: dtype torch.float16, must be that of k": lambda i: {"v": i["v"].half()},
    "k: strides": lambda i: {"k": i["k"][..., :1].expand(i["k"].shape)},
    "cache.kv (K): dtype torch.float16, must be one of": lambda i: {"cache": KVCacheTarget(i["cache"].kv.half())},
    "cache.v_sf_interleaved: True, must be False without cache.sf": lambda i: {
        "cache": KVCacheTarget(i["cache"].kv, v_sf_interleaved=True)},
    "norm.q_weight: shape (64,), must be (128,)": lambda i: {"norm": RMSNorm(torch.ones(64).bfloat16())},
    "norm.k_weight: strides (256, 1), must be contiguous": lambda i: {
        "norm": RMSNorm(None, torch.ones(2, 256).bfloat16()[:, :128])},
    "rope.rotary_dim: 24, must be a multiple of 16": lambda i: {"rope": i["rope"]._replace(rotary_dim=24)},
    "rope.cos_sin_cache: strides (130, 1), rows must begin at multiples of 16": lambda i: {
        "rope": i["rope"]._replace(cos_sin_cache=torch.ones(9, 130)[:, :128])},
    "out.out: shape": lambda i: {"out": QueryOutput(i["k"].clone())},
    "out.out: shape (7, 4, 128), overlaps the memory of cache.kv (K)": lambda i: {
        "out": QueryOutput(i["cache"].kv.flatten()[: i["q"].numel()].view(i["q"].shape))},
    "k: requires grad": lambda i: {"k": i["k"].clone().requires_grad_()},
    "q: requires grad": lambda i: {"q": i["q"].clone().requires_grad_()},
}  # fmt: skip


def refused(error, message, function, good, changes):
    """A changed call is refused on the CPU, and where a kernel has a plan of the good call or none. Nothing is
    written."""
    given = good | changes
    before = [t.clone() for t in cases.storages(given)]
    with pytest.raises(error, match=message):
        function(**given)
    for known in (False, True):
        with emulation() as machine:
            if known:
                function(**cases.copied(good, "cpu"))
            count = len(machine.launches)
            with pytest.raises(error, match=message):
                function(**given)
            assert len(machine.launches) == count
    assert all(map(torch.equal, before, cases.storages(given)))


@pytest.mark.parametrize("message", BAD)
def test_refusals(message):
    inputs = cases.make_inputs(FULL)
    refused((TypeError, ValueError, RuntimeError), f"^{re.escape(message)}", append_qkv, inputs, BAD[message](inputs))


@pytest.mark.parametrize("case", [replace(FULL, cache="e4m3", q8=True), CacheWriteCase(cache="nvfp4")])
def test_scales_in_host_memory_are_numbers(case):
    """Beside data of a GPU; a scale that is not positive is refused."""
    with emulation() as machine:
        machine.host_scales = True
        for scale in (0.5, torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5)):
            inputs = cases.make_inputs(case)
            if case.q8:
                inputs["out"] = inputs["out"]._replace(scale=scale)
            append_qkv(**inputs | {"cache": inputs["cache"]._replace(k_scale=scale, v_scale=scale)})
        for launch in machine.launches:
            want = 2.0 if case.cache == "nvfp4" else 0.5
            assert launch["k_scale"] == launch["v_scale"] == want and launch.get("q_scale", 0.5) == 0.5
            assert not len(launch["k_scale_ptr"]) and not len(launch["v_scale_ptr"])
        assert len(machine.launches) == 4 and len(machine.plans) == 1
        with pytest.raises(ValueError, match="^cache.v_scale: -1.0, must be positive"):
            append_qkv(**inputs | {"cache": inputs["cache"]._replace(v_scale=torch.tensor([-1.0]))})


def test_in_place_and_new_outputs():
    case = replace(FULL, in_place=True)
    inputs = cases.make_inputs(case)
    wanted = append_qkv(**cases.make_inputs(FULL))
    got = append_qkv(**inputs)
    assert got is inputs["q"] and torch.equal(got, wanted)
    again = cases.make_inputs(FULL)
    new = append_qkv(**again | {"out": None})
    assert torch.equal(new, wanted) and new is not again["q"]


def test_under_torch_compile():
    inputs, again = cases.make_inputs(FULL), cases.make_inputs(FULL)
    wanted = append_qkv(**inputs)
    got = torch.compile(lambda **given: append_qkv(**given), backend="eager", fullgraph=True)(**again)
    assert torch.equal(got, wanted)
    assert all(map(torch.equal, cases.storages(inputs), cases.storages(again)))


@pytest.mark.parametrize("shape", [(16,), (5, 32), (16, 48), (3, 2, 64), (2, 3, 5, 16), (0, 32)])
@pytest.mark.parametrize("scale", [1.0, 3, torch.tensor([0.37])])
def test_quantised_by_the_kernel_that_writes_caches(shape, scale):
    for x in (torch.randn(shape).bfloat16(), torch.randn(*shape[:-1], 2 * shape[-1]).half()[..., : shape[-1]]):
        want = fp4.nvfp4_quantize(x, scale)
        with emulation() as machine:
            for _ in range(2):
                got = wrappers.nvfp4_quantize(x.requires_grad_(), scale)
                assert all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(got, want, strict=True))
            assert len(machine.launches) == 2 * bool(x.numel()) and len(machine.plans) == bool(x.numel())
            wrappers.nvfp4_quantize(x.detach().float(), scale)  # in torch
            assert len(machine.launches) == 2 * bool(x.numel())


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(5, 32), (3, 2, 64), (16, 48), (2, 3, 5, 16)])
@pytest.mark.parametrize("scale", [2.5, torch.tensor([0.37])])
def test_quantised_in_the_simulator(shape, scale):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    with simulated(ARCH, []):
        got = wrappers.nvfp4_quantize(x, scale)
    for found, want in zip(got, fp4.nvfp4_quantize(x, scale), strict=True):
        assert found.view(torch.uint8).equal(want.view(torch.uint8))


@pytest.mark.kernels
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-9])
def test_codes_around_midpoints_in_the_simulator(scale):
    """Values between two codes, exactly if the scale is a power of two, and their neighbours on both sides."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    factors = torch.tensor([1.0, 1.125, 1.75, 0.4375, 2.0**-9, 3 * 2.0**-9, 30.0])
    x = (factors[:, None] * middles / scale).half()
    away = [torch.nextafter(x, torch.full_like(x, side)) for side in (0.0, 6e4)]
    top = (6 * factors[:, None] / scale).half()
    rows = torch.stack([torch.cat([top, a, -b, top], 1) for a, b in ((x, x), (away[0], away[1]))])
    with simulated(ARCH, []):
        got = wrappers.nvfp4_quantize(rows, scale)
    for found, want in zip(got, fp4.nvfp4_quantize(rows, scale), strict=True):
        assert found.view(torch.uint8).equal(want.view(torch.uint8))
    assert len(set(fp4.unpack(got[0]).flatten().tolist())) >= 14, "nearly all codes"


def test_dispatch():
    refused = "head_dim 576: must be at most 512"
    with pytest.raises(NotImplementedError, match=refused):
        dispatch.select(CacheWriteRequest("bf16", "bf16", True, 576), "sm_90a")
    assert dispatch.select(CacheWriteRequest("bf16", "bf16", False, 576), "sm_90a")[1].name == "bf16_bf16_append"
    with pytest.raises(NotImplementedError, match="architecture sm_80"):
        dispatch.select(CacheWriteRequest("bf16", "bf16"), "sm_80")
    for spec, why in (
        (CacheWriteSpec("fp32", "fp32"), "dtype fp32"), (CacheWriteSpec("bf16", "fp16"), "cache fp16"),
        (CacheWriteSpec("uint8", "nvfp4"), "cache nvfp4"), (CacheWriteSpec("bf16", "int4"), "cache int4"),
        (CacheWriteSpec("uint8", "uint8", True), "transform"), (CacheWriteSpec("bf16", "bf16", False, True), "gather"),
        (CacheWriteSpec("bf16", "e4m3", True, True), "gather"), (CacheWriteSpec("nvfp4", "bf16"), "dtype nvfp4"),
        (CacheWriteSpec("nvfp4", "fp32", True), "dtype nvfp4"),
    ):  # fmt: skip
        assert rows.supports(spec).startswith(why)
    assert dispatch.shipped("sm_80") == [] and len({s.name for _, s in dispatch.shipped("sm_90a")}) == 18
    assert [rows.lanes(d, 8) for d in (1, 16, 33, 64, 96, 128, 256, 512, 4096)] == [2, 2, 4, 4, 8, 8, 16, 32, 32]
    assert "append_qkv" in wrappers.__all__
