"""Rows written to caches on a Hopper GPU: all memory after a call against the reference on the CPU, and against itself.

Caches are poisoned, so that a byte that should not have been written is noticed. Kernels come from a bundle where one
is built (`make cubins`), else they are compiled as they are met, seconds each.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

import wrappers
from bench.cases import cache_write as cases
from bench.cases.cache_write import CacheWriteCase
from cute_kernels.cache_write import dispatch
from tests.sim.workloads.cache_write import cache_write_cases, cache_write_features
from tests.sim.workloads.prepared import GatherCase, PreparedScenario, compared, prepared
from tests.support.flash_attn_batches import appended
from tests.support.gpu import CUDA, feature
from tests.support.rope_calls import good_call
from wrappers import KVCacheTarget, append_qkv, fp4, nvfp4_dequantize, nvfp4_quantize
from wrappers.cache_write import plan
from wrappers.flashinfer import rope
from wrappers.host import machine

FEATURES = {"bf16": "copied bf16", "fp16": "copied fp16", "uint8": "copied one byte", "e4m3": "quantised to e4m3",
            "e5m2": "quantised to e5m2", "nvfp4": "quantised to NVFP4"}  # fmt: skip
COPIES = (("bf16", "bf16"), ("fp16", "fp16"), ("uint8", "uint8"))
QUANTISED = (("bf16", "e4m3"), ("fp16", "e4m3"), ("bf16", "e5m2"), ("bf16", "nvfp4"), ("fp16", "nvfp4"))
WIDE = (*COPIES[:2], *QUANTISED)
TOKENS = (1, 2, 31, 64, 257, 4099)
PAGE_SIZES = (1, 3, 5, 16, 64, 256)
SIMULATED = {
    f"{spec.name}, {scenario.name}": scenario
    for _, spec in dispatch.shipped("sm_90a")
    for scenario in cache_write_cases(spec)
    if not isinstance(scenario, PreparedScenario)
} | {scenario.name: scenario for scenario in cache_write_features()}
PREPARED = {
    f"{spec.name}, {scenario.name}": (spec.dtype, scenario.calls)
    for _, spec in dispatch.shipped("sm_90a")
    for scenario in cache_write_cases(spec)
    if isinstance(scenario, PreparedScenario)
}


def types(*pairs):
    """Pairs of types as parameters of a test, which carry their features."""
    return [pytest.param(*pair, marks=feature(f"append rows {FEATURES[pair[1]]}")) for pair in pairs]


def sized(case):
    """The case with pages for all tokens, whatever they are, and a page size that its cache allows."""
    size = case.page_size if not case.interleaved_sf else -(-case.page_size // 4) * 4
    return replace(case, page_size=size, pages=3 * -(-case.tokens // size))


def matches(case, seed=0):
    """Run a case twice on the GPU, on equal memory: the results equal each other, and the reference."""
    inputs = cases.make_inputs(case, "cpu", seed)
    first, second = cases.copied(inputs, CUDA), cases.copied(inputs, CUDA)
    cases.function_of(case)(**first)
    cases.function_of(case)(**second)
    cases.function_of(case)(**inputs)
    assert all(map(torch.equal, cases.storages(first), cases.storages(second))), (case, seed)
    got = cases.copied(first, "cpu")
    assert cases.difference(case, got, inputs) <= 1, (case, seed)


@pytest.mark.parametrize("name", SIMULATED)
def test_cases_of_the_simulator(name):
    for case in SIMULATED[name].calls:
        matches(case)


def makes_equal(case, dtype):
    """Make a call twice on the GPU: what it writes equals itself, and what the reference writes."""
    (run, got), (again, second), (expect, wanted) = (prepared(case, dtype, device) for device in (CUDA, CUDA, "cpu"))
    for call in (run, again, expect):
        call()
    assert all(map(torch.equal, cases.storages(got), cases.storages(second))), case
    assert cases.difference(compared(case, dtype), cases.copied(got, "cpu"), wanted) <= 1, case


@pytest.mark.parametrize("name", PREPARED)
def test_prepared_calls_of_the_simulator(name):
    dtype, calls = PREPARED[name]
    for case in calls:
        makes_equal(case, dtype)


@pytest.mark.parametrize("form", ["table", "csr", "ragged"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_attention_calls_are_rotated(form, dim):
    """Prompts, chunks and single tokens over pages of any size, with many more rows than a GPU holds."""
    for size in (1,) if form == "ragged" else (1, 5, 16, 64):
        case = GatherCase(form, size, dim, queries=(700, 1, 64), keys=(700, 2049, 300), heads=(8, 2))
        for dtype in ("bf16", "fp16"):
            makes_equal(case, dtype)


@pytest.mark.parametrize("form", ["equal", "packed", "entries"])
@pytest.mark.parametrize("graph", [False, True])
def test_keys_that_flash_attention_appends(form, graph):
    """Appended and rotated, then attended to: as on the CPU, also from a graph."""
    given, *_ = appended(form)
    if form == "packed":
        given["cu_seqlens_k_new"] = given["cu_seqlens_q"]
    angle = torch.rand(64, 32, generator=torch.Generator().manual_seed(0)) * 6
    given |= {"rotary_cos": angle.cos().half(), "rotary_sin": angle.sin().half(), "rotary_interleaved": False}
    there = cases.copied(given, CUDA)
    if graph:
        wrappers.flash_attn_with_kvcache(**cases.copied(there, CUDA))
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            got = wrappers.flash_attn_with_kvcache(**there)
        captured.replay()
    else:
        got = wrappers.flash_attn_with_kvcache(**there)
    want = wrappers.flash_attn_with_kvcache(**given)
    for found, right in zip(got, want):
        torch.testing.assert_close(found.cpu(), right, rtol=4e-3, atol=4e-3)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(there[name].cpu(), given[name], rtol=2**-10, atol=2**-12)


@pytest.mark.parametrize("dtype,cache", types(*COPIES, *QUANTISED))
@pytest.mark.parametrize("places", [
    pytest.param("slots", marks=feature("append places slot mapping")),
    pytest.param("lists", marks=feature("append places CSR page lists")),
    pytest.param("table", marks=feature("append places block table")),
])  # fmt: skip
def test_tokens_and_pages(places, dtype, cache):
    base = CacheWriteCase(dtype, cache, places=places)
    for number, (tokens, size) in enumerate(product(TOKENS, PAGE_SIZES)):
        index, layout = (torch.int32, torch.int64)[number % 2], ("NHD", "HND")[number // 2 % 2]
        heads, scales = (0, (1, 2, 3, 8)[number % 4]), ("float", "tensor", "heads")[number % 3]
        case = replace(base, tokens=tokens, page_size=size, index=index, layout=layout, heads=heads, scales=scales)
        matches(sized(replace(case, interleaved_sf=number % 2 == 1)), number)


@pytest.mark.parametrize("dtype,cache", types(*COPIES, *QUANTISED))
def test_dims(dtype, cache):
    step = 16 if cache == "nvfp4" else 1
    for number, dim in enumerate(
        (1, 2, 5, 8, 16, 17, 24, 33, 40, 63, 64, 65, 96, 127, 128, 192, 256, 320, 512, 576, 1025)
    ):
        dim = -(-dim // step) * step
        other = -(-(dim * 2 // 3 + 1) // step) * step
        base = CacheWriteCase(dtype, cache, tokens=37, dims=(dim, dim), data="normal" if number % 2 else "special")
        base = replace(base, data="normal") if dtype == "uint8" else base
        matches(sized(base), number)
        matches(
            sized(replace(base, dims=(dim, other), stacked=False, beside=number % 2 == 0, shift=number % 3)), number
        )


@feature("append rows of Q and K with RMS norm", "append rows of Q and K with RoPE")
@pytest.mark.parametrize("dtype,cache", WIDE)
@pytest.mark.parametrize("rotation", ["", "angles", "llama31", "cache"])
@pytest.mark.parametrize("norm", ["", "shared", "heads", "k"])
@pytest.mark.parametrize("threads", [1, plan.THREADS])  # all rows of a token for a group of lanes, or one
def test_norms_and_rotations(threads, norm, rotation, dtype, cache, monkeypatch):
    monkeypatch.setattr(plan, "THREADS", threads)
    machine.current.plans.clear()
    shift = WIDE.index((dtype, cache)) + len(norm) + len(rotation)
    for number, dim in enumerate((16, 48, 64, 80, 96, 128, 192, 256, 512)):
        heads = ((32, 8), (5, 1), (0, 3), (1, 1))[(number + shift) % 4]
        rotary = (None, 16, dim, -(-dim // 32) * 16)[number % 4]
        case = CacheWriteCase(
            dtype, cache, (7, 64, 300)[number % 3], heads, (dim, dim), norm=norm, rope=rotation, rotary_dim=rotary,
            interleaved=number % 2 == 1, q8=cache not in ("bf16", "fp16") and number % 3 == 0,
            scales=("float", "heads")[number % 2], index=(torch.int32, torch.int64)[number // 2 % 2],
            places=("slots", "lists", "table")[number % 3], in_place=number % 5 == 1, shift=number % 7 == 6,
        )  # fmt: skip
        matches(sized(case), number)


@pytest.mark.parametrize("name", rope.__all__)
def test_rope_functions(name):
    """What each function returns and writes, against the CPU."""
    for dtype in (torch.bfloat16, torch.float16):
        for outputs in (True, False):
            given = {key: t for key, t in good_call(name, dtype).items() if outputs or not key.endswith("_out")}
            on_device = cases.copied(given, CUDA)
            want, got = (getattr(wrappers, name)(**args) for args in (given, on_device))
            wanted, found = (cases.tensors_of([result, args]) for result, args in ((want, given), (got, on_device)))
            assert len(wanted) == len(found)
            for a, b in zip(found, wanted, strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
                step = 2**-2 if a.element_size() == 1 else 2**-7  # of a rounded value
                torch.testing.assert_close(a.cpu().float(), b.float(), rtol=step, atol=1e-2)


@feature("append rows of Q and K with RoPE in place")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("places,rotation", [
    ("requests", "angles"), ("requests", "llama31"), ("rows", "angles"), ("rows", "llama31"), ("rows", "cache"),
])  # fmt: skip
def test_rows_rotated_in_place(places, rotation, dtype):
    """Q and K of a packed tensor, of all sizes: no other byte changes."""
    sizes = product((16, 48, 64, 80, 128, 256, 512), ((32, 8), (5, 1), (1, 1)), (2, 33, 1000))
    for number, (dim, heads, tokens) in enumerate(sizes):
        case = CacheWriteCase(
            dtype, dtype, tokens, heads, (dim, dim), places=places, rope=rotation,
            rotary_dim=(None, 16, dim // 32 * 16 or 16)[number % 3], interleaved=number % 2 == 1,
            index=(torch.int32, torch.int64)[number // 2 % 2], hostile=number % 5 == 4, shift=number % 7 == 6,
        )  # fmt: skip
        matches(case, number)


@feature("append rows of Q and K with RoPE")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
@pytest.mark.parametrize("joined", [True, False])  # one launch, or two
def test_rows_rotated_and_quantised(joined, cache, dtype):
    for number, (dim, heads, tokens) in enumerate(product((64, 80, 128, 512), ((32, 8), (5, 1)), (2, 33, 1000))):
        case = CacheWriteCase(
            dtype, cache, tokens, heads, (dim, dim), places="rows", rope="cache", stacked=joined,
            rotary_dim=(16, dim // 32 * 16, dim)[number % 3], interleaved=number % 2 == 1,
            index=(torch.int32, torch.int64)[number // 2 % 2], hostile=number % 5 == 4,
        )  # fmt: skip
        matches(case, number)


@pytest.mark.parametrize("dtype,cache", [*COPIES, *QUANTISED])
@pytest.mark.parametrize("places", ["slots", "lists", "table"])
def test_hostile_values(places, dtype, cache):
    """Nothing beside the named rows is written, and the device still works."""
    for seed, index in product(range(6), (torch.int32, torch.int64)):
        case = CacheWriteCase(
            dtype, cache, 200, places=places, hostile=True, index=index, page_size=(1, 5, 16)[seed % 3]
        )
        matches(sized(case), seed)
        if dtype != "uint8":
            rotation = ("angles", "cache")[seed % 2]
            matches(sized(replace(case, heads=(2, 2), rope=rotation, norm="shared")), seed)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype,cache", [*COPIES, *QUANTISED])
def test_random_bytes_in_index_tensors(dtype, cache):
    """Any bits: all accesses stay inside, whatever is written. Pages before and after the cache keep their bytes."""
    gen = torch.Generator().manual_seed(0)
    for number in range(30):
        places = ("slots", "lists", "table")[number % 3]
        case = sized(CacheWriteCase(dtype, cache, 100, places=places, index=(torch.int32, torch.int64)[number % 2]))
        inputs = cases.copied(cases.make_inputs(case, "cpu", number), CUDA)
        named = ("batch_indices", "positions", "kv_indices", "kv_indptr", "places")
        for t in cases.tensors_of([value for name, value in inputs.items() if name in named]):
            t.copy_(torch.randint(-(1 << 63), (1 << 63) - 1, t.shape, generator=gen).to(t.dtype))
        cases.function_of(case)(**inputs)
        torch.cuda.synchronize()
        cache_tensors = cases.tensors_of(inputs.get("paged_kv_cache", inputs.get("cache")))
        for t in cache_tensors[:1]:
            flat = torch.empty(0, dtype=torch.uint8, device=CUDA).set_(t.untyped_storage())
            begin = t.storage_offset() * t.element_size()
            assert (flat[:begin] == cases.POISON).all()
            assert (flat[-begin:] == cases.POISON).all()


def test_many_tokens_with_one_slot():
    """One of the tokens is stored, element by element, and nothing else is written."""
    k = torch.randn(1000, 2, 128, device=CUDA).bfloat16()
    kv = torch.zeros(4, 2, 16, 2, 128, device=CUDA, dtype=torch.bfloat16)
    append_qkv(None, k, k, KVCacheTarget(kv), torch.full((1000,), 21, device=CUDA))
    stored = kv[1, 0, 5]
    assert (k == stored).any(0).all() and kv.ne(0).any(-1).any(-1).nonzero().tolist() == [[1, 0, 5], [1, 1, 5]]


@feature("append with CUDA graph replay")
@pytest.mark.parametrize("dtype,cache", WIDE)
def test_graphs(dtype, cache):
    """A captured call reads new rows and new places when it is replayed."""
    case = sized(CacheWriteCase(dtype, cache, 33, (4, 2), norm="shared", rope="angles"))
    first, other = cases.make_inputs(case), cases.make_inputs(case, seed=1)
    given = cases.copied(first, CUDA)
    append_qkv(**given)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_qkv(**given)
    for mine, new in zip(cases.storages(given), cases.storages(other), strict=True):
        mine.copy_(new)
    graph.replay()
    append_qkv(**other)
    assert cases.difference(case, cases.copied(given, "cpu"), other) <= 1


@feature("append rows quantised to NVFP4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16,), (4099, 48), (64, 8, 128), (1000, 3, 96), (7, 5, 3, 64), (33, 1040)])
def test_nvfp4_quantize(shape, dtype):
    x = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(0)).to(dtype)
    for part, scale in ((x[..., : shape[-1]], 1.0), (x[..., : shape[-1]].contiguous(), torch.tensor([0.37]))):
        device = part.to(CUDA) if part.is_contiguous() else x.to(CUDA)[..., : shape[-1]]
        got = nvfp4_quantize(device, scale.to(CUDA) if isinstance(scale, torch.Tensor) else scale)
        for a, b in zip(got, fp4.nvfp4_quantize(part, scale), strict=True):
            assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@feature("append values dequantised from NVFP4")
@pytest.mark.parametrize("shape", [(16,), (4099, 48), (64, 8, 128), (7, 5, 3, 64), (33, 1040), (8192, 8, 128)])
def test_nvfp4_dequantize(shape):
    """The bits of torch on the CPU. The last shape has more CTAs than the GPU holds."""
    gen = torch.Generator().manual_seed(0)
    data = torch.randint(256, (*shape[:-1], shape[-1]), generator=gen).to(torch.uint8)  # twice as many columns
    scales = torch.randint(127, (*shape[:-1], shape[-1] // 8), generator=gen).to(torch.uint8)
    for strided, scale in ((False, 300.0), (True, torch.tensor([0.37]))):
        part, factors = data[..., : shape[-1] // 2], scales[..., : shape[-1] // 16]
        want = fp4.nvfp4_dequantize(part, factors, scale)
        if strided:
            part, factors = data.to(CUDA)[..., : shape[-1] // 2], scales.to(CUDA)[..., : shape[-1] // 16]
            scale = scale.to(CUDA)
        got = nvfp4_dequantize(part.to(CUDA), factors.to(CUDA), scale)
        assert torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))


@feature("append values dequantised from NVFP4")
def test_every_code_is_dequantised_with_every_factor():
    data, scales = cases.every_code_and_factor()
    got = nvfp4_dequantize(data.to(CUDA), scales.to(CUDA), 300.0).cpu()
    torch.testing.assert_close(got, fp4.nvfp4_dequantize(data, scales, 300.0), rtol=0, atol=0, equal_nan=True)


@feature("append values dequantised from NVFP4")
def test_dequantised_in_a_graph():
    """A captured call reads new codes, factors and a new scale when it is replayed."""
    gen = torch.Generator().manual_seed(0)
    data, scales = (torch.randint(127, (50, n), generator=gen).to(torch.uint8) for n in (32, 4))
    given = data.to(CUDA), scales.to(CUDA), torch.tensor([2.0], device=CUDA)
    nvfp4_dequantize(*given)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = nvfp4_dequantize(*given)
    for tensor, new in zip(given, (data + 1, scales.flip(0), torch.tensor([3.0])), strict=True):
        tensor.copy_(new)
    graph.replay()
    assert torch.equal(got.cpu(), fp4.nvfp4_dequantize(data + 1, scales.flip(0), 3.0))


def test_far_offsets():
    """A cache of more than 2^32 bytes, and rows of more than 2^31 elements apart."""
    pages = 70_000
    kv = torch.zeros(pages, 2, 16, 8, 128, device=CUDA, dtype=torch.bfloat16)
    rows = torch.randn(4, 8, 128, device=CUDA).bfloat16()
    slots = torch.tensor([pages * 16 - 1, pages * 16, 0, (pages - 2) * 16], device=CUDA)
    append_qkv(None, rows, -rows, KVCacheTarget(kv), slots)
    for token, (page, row) in ((0, (pages - 1, 15)), (2, (0, 0)), (3, (pages - 2, 0))):
        assert torch.equal(kv[page, 0, row], rows[token]) and torch.equal(kv[page, 1, row], -rows[token])
    assert kv[1 : pages - 2].ne(0).any().item() is False
