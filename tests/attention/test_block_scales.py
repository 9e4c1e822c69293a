"""NVFP4's scale factors in uint8, as FlashInfer's and TensorRT-LLM's quantisers return them, give the same bits as in
e4m3, in every function that takes them."""

import pytest
import torch

from tests.host.test_plans import Recorder
from wrappers import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    FP4Tensor,
    append_paged_kv_cache,
    fp4,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    single_prefill_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa,
    xqa_batch_decode_with_kv_cache,
)
from wrappers.host import machine

E4M3, UINT8 = torch.float8_e4m3fn, torch.uint8
PAGES, P, HKV, HQ, D = 5, 16, 2, 8, 64
SCALE = D**-0.5
GEN = torch.Generator().manual_seed(0)
Q, KV = torch.randn(4, HQ, D, generator=GEN).half(), torch.randn(2, PAGES, P, HKV, D, generator=GEN)
CODES, FACTORS = nvfp4_quantize(KV)  # "NHD"
ROWS = torch.randn(2, 4, HKV, D, generator=GEN).half()
DATA, SF = nvfp4_quantize(ROWS.float())


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


TABLE, LENS, STARTS = torch.tensor([[2, 0], [1, 4]]).int(), ints(20, 9), ints(0, 2, 4)
INDEX = ints(0, 2, 4), ints(2, 0, 1, 4), ints(4, 9)  # page offsets, pages, keys in a last page
SLOTS = ints(0, 0, 1, 1), ints(0, 1, 0, 1)
HEADS = HQ, HKV, D


def context(name, sf):
    return trtllm_batch_context_with_kv_cache(
        Q, tuple(CODES), None, TABLE, LENS, 2, None, SCALE, 1.0, 2, STARTS, None, kv_layout="NHD", **{name: sf}
    )


def of_xqa(sf, flat=False):
    out, turn = torch.empty_like(Q[:2, None]), (lambda t: t.flatten(0, 2)) if flat else (lambda t: t)
    given = {"k_sf_cache": turn(sf[0]), "v_sf_cache": turn(sf[1])}
    xqa(Q[:2, None], *map(turn, CODES), TABLE, LENS[:, None], out, None, None, HKV, P, **given)
    return out


def paged(sf, name="kv_cache_sf"):
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0))
    wrapper.plan(STARTS, *INDEX, *HEADS, P, kv_data_type=UINT8)
    return wrapper.run(Q, tuple(CODES), **{name: sf})


def decode_class(sf):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    wrapper.plan(*INDEX, *HEADS, P, kv_data_type=UINT8)
    return wrapper.run(Q[:2], tuple(CODES), kv_cache_sf=sf)


def ragged(sf):
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0))
    wrapper.plan(STARTS, STARTS, *HEADS, kv_data_type=UINT8)
    return wrapper.run(Q, *DATA, kv_cache_sf=sf)


def appended(function, *where, factors):
    """Return the cache after a function has quantised and appended rows."""
    codes, factors = CODES.clone(), [t.clone() for t in factors]
    function(*ROWS, *where[:-1], tuple(codes), tuple(factors), *where[-1], 1.0, 1.0)
    return torch.cat([codes.flatten(), *(t.flatten().view(UINT8) for t in factors)])


def append_factors(sf):
    cache = torch.zeros(2, PAGES, P, HKV, D // 16).to(sf[0].dtype)
    append_paged_kv_cache(*SF, *SLOTS, tuple(cache), INDEX[1], INDEX[0], INDEX[2])
    return cache.view(UINT8)


BOTH = {  # name -> (result from factors of K and V, those factors)
    "context": (lambda sf: context("kv_cache_sf", sf), FACTORS),
    "context, kv_block_scales": (lambda sf: context("kv_block_scales", sf), FACTORS),
    "decode": (
        lambda sf: trtllm_batch_decode_with_kv_cache(
            Q, tuple(CODES), None, TABLE, LENS, None, SCALE, kv_layout="NHD", q_len_per_req=2, kv_cache_sf=sf),
        FACTORS,
    ),
    "xqa_batch_decode": (
        lambda sf: xqa_batch_decode_with_kv_cache(
            Q[:2], tuple(CODES), None, TABLE, LENS, None, SCALE, kv_cache_sf=sf),
        FACTORS,
    ),
    "xqa": (of_xqa, FACTORS),
    "xqa, flat": (lambda sf: of_xqa(sf, True), FACTORS),
    "paged": (paged, FACTORS),
    "paged, kv_block_scales": (lambda sf: paged(sf, "kv_block_scales"), FACTORS),
    "decode class": (decode_class, FACTORS),
    "ragged": (ragged, SF),
    "single": (lambda sf: single_prefill_with_kv_cache(Q, *DATA, kv_cache_sf=sf), SF),
    "append": (
        lambda sf: appended(
            nvfp4_quantize_append_paged_kv_cache, *SLOTS, (INDEX[1], INDEX[0], INDEX[2]), factors=sf),
        FACTORS,
    ),
    "append, slots": (
        lambda sf: appended(
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, ints(3, 40, -1, 17), (), factors=sf),
        FACTORS,
    ),
    "append factors": (append_factors, SF),
}  # fmt: skip


@pytest.mark.parametrize("types", [(UINT8, UINT8), (UINT8, E4M3), (E4M3, UINT8)])
@pytest.mark.parametrize("name", BOTH)
def test_factors_in_uint8(name, types):
    call, (k, v) = BOTH[name]
    want = call((k, v))
    assert want.float().abs().sum() > 0
    assert torch.equal(call((k.view(types[0]), v.view(types[1]))), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e5m2])
@pytest.mark.parametrize("name", BOTH)
def test_other_types_are_refused(name, dtype):
    call, (k, v) = BOTH[name]
    if name != "append factors":  # its cache is one of any type
        with pytest.raises(TypeError, match=f"dtype {dtype}, must be one of .*float8_e4m3fn, torch.uint8"):
            call((k.to(dtype), v.to(dtype)))


def test_one_tensor_of_both():
    stacked, both = CODES.transpose(0, 1).contiguous(), FACTORS.view(UINT8).transpose(0, 1).contiguous()
    found = xqa_batch_decode_with_kv_cache(Q[:2], stacked, None, TABLE, LENS, None, SCALE, kv_cache_sf=both)
    assert torch.equal(found, BOTH["xqa_batch_decode"][0](tuple(FACTORS)))


def test_a_plan_serves_both_types():
    """On a machine with kernels: a call with uint8 has the plan, and gives the kernel the bytes, of one with e4m3."""
    call, (k, v) = BOTH["xqa_batch_decode"]
    with machine.override(Recorder()) as here:
        for dtype in (E4M3, UINT8, E4M3):
            call((k.view(dtype), v.view(dtype)))
        assert len(here.plans) == 1 and len(here.launches) == 3
        given = [(launch["k_scales"], launch["v_scales"]) for _, _, launch in here.launches]
    for factors in given:
        assert [t.dtype for t in factors] == [UINT8, UINT8]
        assert [t.data_ptr() for t in factors] == [k.data_ptr(), v.data_ptr()]


def test_fp4():
    """`FP4Tensor` and the functions of `fp4`."""
    swizzled = torch.arange(512, dtype=UINT8).view(128, 4) % 100
    data = torch.zeros(5, 2, 16, dtype=UINT8)
    t = FP4Tensor(data, swizzled, 3)
    assert t.scale.dtype == E4M3 and t.scale.data_ptr() == swizzled.data_ptr()
    rows = fp4.read_scales(swizzled, 5, 4, 3)
    assert rows.dtype == E4M3
    assert torch.equal(rows.view(UINT8), fp4.read_scales(swizzled.view(E4M3), 5, 4, 3).view(UINT8))
    into = torch.zeros(2, 128, 4, dtype=UINT8)
    fp4.write_scales(rows, into[0].view(E4M3), 9)
    fp4.write_scales(rows.view(UINT8), into[1], 9)
    assert torch.equal(*into) and into.any()
    assert torch.equal(nvfp4_dequantize(CODES, FACTORS.view(UINT8)), nvfp4_dequantize(CODES, FACTORS))
    for bad in (torch.float16, torch.float8_e5m2):
        with pytest.raises(ValueError, match="scale: dtype .* must be one of torch.float8_e4m3fn, torch.uint8"):
            FP4Tensor(data, swizzled.to(bad))
