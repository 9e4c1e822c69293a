"""The prefill family on a Hopper GPU, against the same calls on the CPU and against itself bit by bit: every page size,
ragged K and V, custom masks, ALiBi, RoPE, graphs whose lengths are planned anew; small pages of decode and xqa.

Sizes are small and kernels few, since those that no bundle holds are compiled at their first call.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import attention, family
from bench.cases.cache_write import copied
from bench.cases.family import FamilyCase
from tests.attention import test_chunked, test_ragged_deepseek
from tests.support import gpu
from tests.support.flash_attn_batches import Batch
from tests.support.gpu import CUDA, captured, close, feature, same
from tools import matrix

BASE = FamilyCase()
PACKED = replace(BASE, q_lens=(1, 5, 0, 16), kv_lens=(131, 5, 7, 300))
PAGES = (1, 2, 5, 16, 24, 64, 300)
TWO = {"page 5": {"page_size": 5}, "ragged": {"form": "ragged"}}
FORMS = TWO | {"page 64": {"page_size": 64}}
MODIFIERS = {
    "window": {"window_left": 37},
    "cap": {"causal": False, "soft_cap": 4.0},
    "custom": {"custom": True},
    "custom-window": {"custom": True, "window_left": 37, "causal": False},
    "ranges": {"ranges": True},
    "ranges-windows": {"ranges": True, "window_left": 37, "range_window": 20},
    "ranges-cap": {"ranges": True, "soft_cap": 4.0},
    "prefix": {"prefix": True},
    "prefix-window-cap": {"prefix": True, "window_left": 90, "soft_cap": 4.0},
    "alibi": {"mode": "ALIBI"},
    "alibi-cap-window": {"mode": "ALIBI", "soft_cap": 4.0, "window_left": 37},
    "rope": {"mode": "ROPE_LLAMA"},
    "rope-full": {"mode": "ROPE_LLAMA", "causal": False, "window_left": 90},
}


def features(case):
    """Names of the rows of the support table that the case shows."""
    qk, vo = case.head_dim_qk, case.head_dim_vo
    names = {
        f"Q, K and V {case.dtype}": True,
        f"head_dim {qk}" + ("" if qk == vo else f" (Q, K) and {vo} (V)"): True,
        f"page size {case.page_size}": case.paged,
        "requests CSR page lists": case.paged,
        "requests ragged K and V": not case.paged,
        "with a causal mask": case.causal and not case.custom,
        "with full attention": not case.causal and not case.custom,
        "with a sliding window": case.window_left >= 0,
        "with a soft cap": bool(case.soft_cap),
        "with sinks": case.form == "sinks",
        "with LSE": True,
        "with a custom mask": case.custom,
        "with ranges of keys": case.ranges,
        "with a prefix": case.prefix,
        "with ALiBi": case.mode == "ALIBI",
        "with RoPE": case.mode == "ROPE_LLAMA",
    }
    return sorted({f"prefill {name}" for name, has in names.items() if has} & matrix.NAMES)


def grid(*axes, base=BASE):
    """Parameters of a test: `base` with every combination of changes, each with its features."""
    found = []
    for combination in itertools.product(*(axis.items() for axis in axes)):
        case = replace(base, **{field: value for _, change in combination for field, value in change.items()})
        name = "-".join(name for name, _ in combination)
        found.append(pytest.param(replace(case, name=name), id=name, marks=feature(*features(case))))
    return found


def as_expected(case, got, t):
    want = [x.float() for x in family.answer(replace(case, on_device=False), t, "cpu")]
    close([x.cpu() for x in got], want, case.tolerance, case.tolerance, case.name)


def matches_cpu(case, seed=0):
    """Close to the CPU's result, and the same bits in a second call."""
    t = family.make(case, seed)
    first = family.answer(case, t, CUDA)
    as_expected(case, first, t)
    same(family.answer(case, t, CUDA), first, case.name)
    return first


@pytest.mark.parametrize("case", grid({f"page {p}": {"page_size": p} for p in PAGES}))
def test_page_sizes(case):
    """In both layouts, as one tensor or two, as slices of wider ones; of many query rows and of few."""
    first = matches_cpu(case)
    for layout, stacked, strided in itertools.product(("NHD", "HND"), (True, False), (True, False)):
        variant = replace(case, layout=layout, stacked=stacked, strided=strided)
        same(family.answer(variant, family.make(case), CUDA), first, f"{layout} {stacked=} {strided=}")
    matches_cpu(replace(case, q_lens=PACKED.q_lens, kv_lens=PACKED.kv_lens))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@feature("prefill requests ragged K and V")
def test_ragged_layouts(layout):
    first = matches_cpu(replace(BASE, form="ragged", layout=layout))
    same(first, matches_cpu(replace(BASE, form="ragged", layout=layout, strided=True)))
    matches_cpu(replace(PACKED, form="ragged", layout=layout))


DIMS = {f"d{qk}x{vo}": {"head_dim_qk": qk, "head_dim_vo": vo} for qk, vo in ((128, 128), (192, 128), (256, 256))}


@pytest.mark.parametrize("case", grid({"page 1": {"page_size": 1}, "ragged": {"form": "ragged"}}, DIMS))
def test_head_dims(case):
    matches_cpu(case)


@pytest.mark.parametrize("case", grid({"page 24": {"page_size": 24}, "ragged": {"form": "ragged"}}, base=PACKED))
def test_fp16(case):
    matches_cpu(replace(case, dtype="fp16"))


@pytest.mark.parametrize("case", grid(FORMS, MODIFIERS))
def test_modifiers(case):
    matches_cpu(case)
    matches_cpu(replace(case, q_lens=PACKED.q_lens, kv_lens=PACKED.kv_lens), seed=1)


@pytest.mark.parametrize("case", grid({"page 5": {}}, {"": {}, "window": {"window_left": 37}}))
def test_sinks(case):
    matches_cpu(replace(case, form="sinks"))


ONE = replace(BASE, form="single", q_lens=(70,), kv_lens=(200,))


OF_ONE = {name: change for name, change in MODIFIERS.items() if not change.keys() & {"ranges", "prefix"}}


@pytest.mark.parametrize("case", grid({"causal": {}} | OF_ONE, base=ONE))
def test_one_request(case):
    """Of the function, and as a batch of one: the same bits."""
    first = matches_cpu(case)
    same(first, matches_cpu(replace(case, form="ragged")), case.name)


@pytest.mark.parametrize("case", grid(TWO, {"custom": {"custom": True}}))
def test_forms_of_what_plan_takes(case):
    """Index tensors and masks of the host or the device, masks of bools or bits: the same bits."""
    t = family.make(case)
    first = family.answer(case, t, CUDA)
    for on_device, packed in itertools.product((True, False), (True, False)):
        variant = replace(case, on_device=on_device, packed=packed)
        same(family.answer(variant, t, CUDA), first, f"{on_device=} {packed=}")


def test_pages_of_one_row_without_their_dimension():
    case = replace(BASE, page_size=1)
    t = family.make(case)
    wrapper = family.plan(case, family.wrapper_of(case, CUDA), t)
    q, cache = family.placed(case, t, CUDA)
    want = wrapper.run(q, cache)
    assert torch.equal(wrapper.run(q, tuple(x[:, 0] for x in cache)), want)


# ---- graphs


LENGTHS = {  # two plans of as many query rows, the first of which is captured
    "few rows first": (((1, 0, 219), (1, 0, 230)), ((70, 90, 60), (200, 400, 61))),
    "many rows first": (((70, 90, 60), (200, 400, 61)), ((200, 0, 20), (700, 3, 20))),
}
GRAPHS = {"plain": {}, "custom": {"custom": True}, "rope": {"mode": "ROPE_LLAMA"}}


@feature("prefill with CUDA graph replay at other lengths")
@pytest.mark.parametrize("lengths", list(LENGTHS))
@pytest.mark.parametrize("case", grid(TWO, GRAPHS))
def test_a_graph_holds_for_a_later_plan(case, lengths):
    """Of other lengths, pages and bits of the mask, in tensors that are written anew."""
    cases = [replace(case, q_lens=q, kv_lens=kv, room=1000) for q, kv in LENGTHS[lengths]]
    wrapper = family.wrapper_of(case, CUDA, **family.buffers(cases[0], CUDA))
    t = family.make(cases[0])
    family.plan(cases[0], wrapper, t)
    static, out = family.placed(cases[0], t, CUDA), family.outputs(cases[0], CUDA)
    wrapper.run(*static, **out, return_lse=True)  # finds or compiles the kernel
    graph, result = captured(lambda **given: wrapper.run(*static, **given, return_lse=True), out)
    for seed, now in enumerate((cases[0], cases[1], cases[0])):
        t = family.make(now, seed)
        family.plan(now, wrapper, t)
        for to, source in zip(_flat(static), _flat(family.placed(now, t, CUDA)), strict=True):
            to.copy_(source)
        for x in out.values():
            x.fill_(math.nan)
        graph.replay()
        as_expected(now, result, t)
        same(result, wrapper.run(*static, return_lse=True), "as without a graph")


def _flat(arguments):
    return [x for argument in arguments for x in (argument if isinstance(argument, tuple) else (argument,))]


def test_run_never_synchronises():
    for case in (BASE, replace(BASE, form="ragged"), replace(BASE, mode="ROPE_LLAMA"), replace(BASE, custom=True)):
        t = family.make(case)
        wrapper = family.plan(case, family.wrapper_of(case, CUDA), t)
        arguments = family.placed(case, t, CUDA)
        wrapper.run(*arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            wrapper.run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- small pages of the functions with page tables


TABLES = attention.AttentionCase("", q_lens=BASE.q_lens, kv_lens=BASE.kv_lens, heads_q=8, heads_kv=2, sink=True)
CACHES = {"": {}, "e4m3": {"kv_dtype": "fp8"}, "nvfp4": {"kv_dtype": "nvfp4"}}
SIZES = gpu.values("page_size", 1, 5, 24)
DECODE = replace(TABLES, q_lens=(1, 1, 1, 1), kv_lens=(2000, 1, 0, 300), function="decode", window_left=500)


@pytest.mark.parametrize("case", gpu.grid(TABLES, gpu.values("page_size", 1, 2, 5, 24, 300)))
def test_context(case):
    gpu.matches_reference(case, CUDA)
    gpu.matches_reference(replace(case, layout="NHD", separate_tables=True), CUDA)


@pytest.mark.parametrize("case", gpu.grid(DECODE, CACHES, SIZES) + gpu.grid(DECODE, gpu.values("page_size", 2, 300)))
def test_decode(case):
    gpu.matches_reference(case, CUDA)
    if case.kv_dtype != "nvfp4":  # whose kernel of more rows no bundle holds
        gpu.matches_reference(replace(case, q_lens=(3, 0, 1, 4), layout="NHD", separate_tables=True), CUDA)


@pytest.mark.parametrize("case", gpu.grid(replace(DECODE, dtype="fp16", function="xqa"), CACHES, SIZES))
def test_xqa(case):
    gpu.matches_reference(case, CUDA)


@feature("prefill with scales a head")
@pytest.mark.parametrize("rows", [5, 200])
def test_scales_a_head(rows):
    gen = torch.Generator().manual_seed(0)
    shapes = (rows, 8, 128), (500, 2, 128), (500, 2, 128)
    given = [torch.randn(*shape, generator=gen).to(torch.float8_e4m3fn) for shape in shapes]
    scales = [torch.rand(x.shape[1], generator=gen) + 0.5 for x in given]

    def call(device):
        q, k, v, *factors = (x.to(device) for x in given + scales)
        named = dict(zip(("q_scale", "k_scale", "v_scale"), factors, strict=True))
        return wrappers.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True, o_dtype=torch.bfloat16, **named)

    got, want = call(CUDA), call("cpu")
    close([x.cpu() for x in got], [x.float() for x in want], 0.05, 0.05, limit_lse=0.01)
    same(call(CUDA), got)


# ---- scales on the host, as FlashInfer's tests give them


def in_graph(call):
    """Return the results of an eager call and of a replayed graph."""
    first = [t.clone() for t in call()]
    graph, result = captured(call, {})
    for t in result:
        t.view(torch.uint8).zero_()
    graph.replay()
    same(result, first, "as without a graph")
    return first


def test_appended_rows_with_a_scale_on_the_host():
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(5, 2, 64, generator=gen).half().to(CUDA) for _ in "kv")
    slots = torch.tensor([7, -1, 0, 64, 31], dtype=torch.int32, device=CUDA)
    cache = tuple(torch.zeros(4, 16, 2, 32, dtype=torch.uint8, device=CUDA) for _ in "kv")
    factors = tuple(torch.zeros(4, 16, 2, 4, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn) for _ in "kv")

    def call(v_scale):
        wrappers.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, v, slots, cache, factors, 0.5, v_scale)
        return *cache, *(t.view(torch.uint8) for t in factors)

    want = in_graph(lambda: call(0.25))
    assert all(t.any() for t in want)
    same(in_graph(lambda: call(torch.tensor([0.25]))), want)
    with pytest.raises(ValueError, match="^v_scale: -1.0, must be positive and finite"):
        call(torch.tensor([-1.0]))


def test_attention_with_scales_on_the_host():
    """Beside one that the device reads."""
    case = replace(DECODE, window_left=-1)
    inputs, _ = gpu.call_of(case, CUDA)

    def call(*scales):
        given = inputs | dict(zip(("bmm1_scale", "bmm2_scale"), scales, strict=True))
        return [t for t in gpu.run(case.function, given) if t is not None]

    want = in_graph(lambda: call(0.25, 0.5))
    same(in_graph(lambda: call(torch.tensor(0.25), torch.tensor([0.5]))), want)
    same(in_graph(lambda: call(torch.tensor(0.25), torch.full((1,), 0.5, device=CUDA))), want)


@feature("prefill with chunked attention")
@pytest.mark.parametrize("form", ["ragged", "paged"])
@pytest.mark.parametrize("q_lens", [(150, 3), (1, 5)])
def test_chunked_attention(q_lens, form):
    batch = Batch(q_lens, (333, 700), page=16, dtype=torch.bfloat16, heads=(4, 2))
    want = batch.want(causal=True, chunk=96)[0].float()
    vars(batch).update(copied(vars(batch), CUDA))
    got = test_chunked.call(batch, 96, form).cpu()
    close((got, None), (want, None), 2e-2, 2e-2)


# ---- ragged prefill with TensorRT-LLM's signature

MLA_Q, MLA_KV = (70, 1, 0, 150, 5), (200, 259, 3, 90, 0)
MLA_DIMS = ((192, 128), (128, 128), (256, 256))


def ragged_mla(dims, dtype, q_lens=MLA_Q, kv_lens=MLA_KV, **options):
    """Return the arguments of `trtllm_ragged_attention_deepseek` on the CPU."""
    return test_ragged_deepseek.made(q_lens, kv_lens, dims, dtype, (4, 4)) | options


def as_ragged_mla(got, given):
    want = [x.float() for x in wrappers.trtllm_ragged_attention_deepseek(**given)]
    limit, limit_lse = (0.05, 1e-2) if given["query"].element_size() == 1 else (1e-2, 1e-3)
    close([x.cpu() for x in got], want, limit, limit, limit_lse=limit_lse)


@pytest.mark.parametrize("dims", MLA_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("is_causal", [True, False])
@feature("prefill requests ragged K and V", "prefill with LSE", "prefill with sinks")
def test_trtllm_ragged_attention_deepseek(is_causal, dtype, dims):
    """With sinks and a window and without, and the same bits in a second call."""
    sinks = torch.tensor([0.5, -math.inf, 2.0, -1.0])
    for options in ({}, {"attention_sinks": sinks}, {"window_left": 37, "bmm2_scale": torch.tensor([0.5])}):
        given = ragged_mla(dims, dtype, is_causal=is_causal, **options)
        there = copied(given, CUDA)
        got = wrappers.trtllm_ragged_attention_deepseek(**there)
        as_ragged_mla(got, given)
        same(wrappers.trtllm_ragged_attention_deepseek(**there), got)


@pytest.mark.parametrize("dims", MLA_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@feature("prefill requests ragged K and V", "prefill with LSE")
def test_merged_chunks_of_a_context(dtype, dims):
    """Together they are causal attention to all keys."""
    q_lens, kv_lens = (70, 1, 20), (300, 259, 20)
    given = ragged_mla(dims, dtype, q_lens, kv_lens)
    there, context = copied(given, CUDA), [n - m for m, n in zip(q_lens, kv_lens)]
    merged = test_ragged_deepseek.part(there, context, q_lens, causal=True)
    for first in range(0, max(context), 128):
        lens = [min(max(n - first, 0), 128) for n in context]
        merged = wrappers.merge_state(*merged, *test_ragged_deepseek.part(there, [first] * 3, lens))
    as_ragged_mla(merged, given | {"is_causal": True})


@feature("prefill with CUDA graph replay at other lengths")
def test_a_graph_of_ragged_rows_serves_other_lengths():
    given = ragged_mla((192, 128), torch.bfloat16, is_causal=True)
    there = copied(given, CUDA)
    wrappers.trtllm_ragged_attention_deepseek(**there)
    graph, result = captured(wrappers.trtllm_ragged_attention_deepseek, there)
    for q_lens, kv_lens in (((1, 0, 220, 5, 0), (9, 1, 530, 5, 7)), (MLA_Q, MLA_KV)):
        other = ragged_mla((192, 128), torch.bfloat16, q_lens, kv_lens, is_causal=True)
        for name in ("query", "key", "value", "cum_seq_lens_q", "cum_seq_lens_kv"):
            there[name].copy_(other[name])
        for t in result:
            t.fill_(math.nan)
        graph.replay()
        as_ragged_mla(result, other)
