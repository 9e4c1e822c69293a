"""trtllm_batch_context_with_kv_cache around the kernel: validation, the path to a launch, torch.compile."""

import math
import timeit
from dataclasses import replace

import pytest
import torch

from bench.cases import attention as cases
from cute_kernels.attention import geometry
from cute_kernels.attention.args import AttentionArgs
from tests.fake_machine import FakeMachine
from wrappers import FP4Tensor, attention, explain, fp4, machine, reference, scratch, trtllm_batch_context_with_kv_cache
from wrappers.reference import PagedProblem

E4M3 = torch.float8_e4m3fn
PLAIN = cases.EDGE["plain"]


def inputs_of(case=PLAIN, **changes):
    return cases.make_inputs(case) | changes


def check(inputs, result, tolerance=1e-2):
    want_o, want_lse = cases.reference_of(inputs)
    o, lse = result if inputs["return_lse"] else (result, None)
    torch.testing.assert_close(o.float(), want_o, rtol=tolerance, atol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


# ---- the reference as the CPU's backend


@pytest.mark.parametrize("name", cases.EDGE)
def test_cpu_writes_out_and_lse_in_place(name):
    inputs = inputs_of(cases.EDGE[name])
    o, lse = trtllm_batch_context_with_kv_cache(**inputs)
    assert o is inputs["out"] and lse is inputs["lse"]
    check(inputs, (o, lse), cases.EDGE[name].tolerance)


def test_positional_order_is_upstreams():
    i = inputs_of()
    names = (
        "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale batch_size "
        "cum_seq_lens_q cum_seq_lens_kv window_left"
    ).split()
    o = trtllm_batch_context_with_kv_cache(
        *(i[n] for n in names), None, torch.float16, None, None, "HND", None, i["sinks"], None, None, True
    )
    assert o.dtype == torch.float16
    check(i | {"return_lse": False}, o)


@pytest.mark.parametrize(
    "hint",
    [
        {"max_q_len": 1 << 20},
        {"max_kv_len": None},
        {"workspace_buffer": None},
        {"cum_seq_lens_kv": None},
        {"enable_pdl": True},
        {"enable_pdl": False},
        {"multi_ctas_kv_counter_buffer": torch.zeros(4)},
        {"use_fp16_softmax": False, "uses_spcompress": False},
        {"skip_softmax_threshold_scale_factor": 0.0},
        {"seq_lens": torch.tensor(PLAIN.kv_lens, dtype=torch.uint32)},
        {"logits_soft_cap": 0.0},
        {"window_left": -5},
        {"bmm1_scale": torch.tensor(64**-0.5), "bmm2_scale": torch.tensor([1.0])},
    ],
    ids=lambda h: "-".join(h),
)
def test_what_must_not_change_a_bit(hint):
    want = trtllm_batch_context_with_kv_cache(**inputs_of())
    got = trtllm_batch_context_with_kv_cache(**inputs_of(**hint))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_bmm2_scale_multiplies_the_output_only():
    o, lse = trtllm_batch_context_with_kv_cache(**inputs_of())
    o2, lse2 = trtllm_batch_context_with_kv_cache(**inputs_of(bmm2_scale=2))
    assert torch.equal(o2, o * 2) and torch.equal(lse2, lse)


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16, E4M3])
def test_fp8_query_output_types(out_dtype):
    inputs = inputs_of(replace(PLAIN, dtype="fp8"), out_dtype=out_dtype, bmm2_scale=3.0)
    o, _ = trtllm_batch_context_with_kv_cache(**inputs)
    assert o.dtype == (out_dtype or E4M3)
    want, _ = cases.reference_of(inputs)
    assert torch.equal(o.float(), (fp4.e4m3(want) if o.dtype == E4M3 else want.to(out_dtype)).float())


def test_fp8_output_saturates():
    inputs = inputs_of(replace(PLAIN, dtype="fp8"), bmm2_scale=1e6)
    o, _ = trtllm_batch_context_with_kv_cache(**inputs)
    assert o.float().abs().max() == 448 and not o.float().isnan().any()


@pytest.mark.parametrize("start", [None, 0, 77])
def test_nvfp4_output(start):
    inputs = inputs_of(replace(PLAIN, dtype="fp8", heads_q=6, heads_kv=2, q_lens=(0, 50), kv_lens=(4, 61)))
    want, _ = cases.reference_of(inputs)
    tokens = len(want)
    inputs |= {"o_sf_scale": 300.0, "o_sf_vec_size": 16, "out_dtype": "nvfp4", "return_lse": False}
    if start is not None:
        scale = torch.full((128, 24), 7.0).to(E4M3)
        inputs |= {"out": FP4Tensor(torch.zeros(tokens, 6, 32, dtype=torch.uint8), scale, start)}
    out = trtllm_batch_context_with_kv_cache(**inputs)
    assert isinstance(out, FP4Tensor) and out.original_shape == (tokens, 6, 64)
    data, scales = fp4.nvfp4_quantize(want.flatten(1), 300.0)
    assert torch.equal(out.data.flatten(1), data)
    got = fp4.read_scales(out.scale, tokens, 24, start or 0)
    assert torch.equal(got.float(), scales.float())
    if start is not None:
        assert out.data is inputs["out"].data and out.scale is scale
        assert (scale.view(torch.uint8) == torch.tensor(7.0).to(E4M3).view(torch.uint8)).sum() >= (128 - tokens) * 24


@pytest.mark.parametrize("dtype", ["bf16", "nvfp4"])
def test_no_tokens(dtype):
    extra = {"out_dtype": "nvfp4", "o_sf_scale": 1.0} if dtype == "nvfp4" else {}
    inputs = inputs_of(replace(PLAIN, q_lens=(0, 0)), out=None, lse=None, return_lse=True) | extra
    o, lse = trtllm_batch_context_with_kv_cache(**inputs)
    assert o.shape[0] == 0 and lse.shape == (0, 4)


def test_kv_cache_sf_is_an_alias():
    inputs = inputs_of(replace(PLAIN, kv_dtype="nvfp4"))
    want = trtllm_batch_context_with_kv_cache(**inputs)[0].clone()
    inputs["kv_cache_sf"] = inputs.pop("kv_block_scales")
    assert torch.equal(trtllm_batch_context_with_kv_cache(**inputs)[0], want)


# ---- validation

BAD = cases.refusals()
POOL = inputs_of()["kv_cache"]
T, HQ, D = 42, 4, 64  # tokens, heads and head_dim of the plain case


@pytest.mark.parametrize("name", BAD)
def test_refused_before_anything_is_written(name):
    change, error, message = BAD[name]
    inputs = inputs_of(**change)
    with pytest.raises(error, match=message):
        trtllm_batch_context_with_kv_cache(**inputs)
    if "out" not in change:
        assert inputs["out"].isnan().all()


def test_nvfp4_cache_needs_scales_of_its_shape():
    inputs = inputs_of(replace(PLAIN, kv_dtype="nvfp4"))
    k, v = inputs["kv_block_scales"]
    for bad, error, message in (
        (None, ValueError, "kv_block_scales: required"),
        ((k, v[:, :1]), ValueError, r"kv_block_scales \(V"),
        ((k, v.float()), TypeError, "kv_block_scales: K is"),
        ((k.float(), v.float()), TypeError, r"kv_block_scales \(K\): dtype"),
    ):
        with pytest.raises(error, match=message):
            trtllm_batch_context_with_kv_cache(**inputs | {"kv_block_scales": bad})


# ---- the path to a launch, with a kernel that computes in torch what AttentionArgs say


def emulate(spec, launches):
    """A kernel of `spec` on any device: checks what compiled code would, then runs the reference."""

    def kernel(*flat):
        a = AttentionArgs(*flat)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]
        batch = a.kv_lens.shape[0]
        cached = {"": dtype, "e4m3": torch.float8_e4m3fn, "nvfp4": torch.uint8}[spec.kv.dtype]
        types = [dtype, cached, cached, dtype, *[torch.uint8] * 3]
        if [t.dtype for t in (a.q, a.k, a.v, a.o, a.k_scales, a.v_scales, a.o8)] != types:
            raise TypeError("dtype")
        if a.page_table.dtype != torch.int32:
            raise TypeError("dtype")
        if [t.ndim for t in flat[:17]] != [3, 4, 4, 3, 2, 1, 1, 3, 1, 1, 1, 1, 4, 4, 3, 2, 3]:
            raise ValueError("rank")
        if any(t.device.type != "cpu" for t in flat[:17]):
            raise ValueError("device")
        if any(t.stride(-1) != 1 for t in (a.q, a.k, a.v, a.o, a.page_table, a.kv_lens, a.cu_seqlens_q, a.sink)):
            raise ValueError("last stride")
        assert a.page_table.shape[:2] == (batch, 2) and a.cu_seqlens_q.shape == (batch + 1,)
        assert a.kv_lens.dtype == a.cu_seqlens_q.dtype == a.drafts.dtype == torch.int32
        assert all(t.dtype == torch.float32 for t in (a.lse, a.sink, a.scale, a.out_scale, a.part))
        packed = 2 if spec.kv.dtype == "nvfp4" else 1
        assert a.k.shape[3] * packed == spec.head_dim_qk and a.v.shape[3] * packed == spec.head_dim_vo
        for scales, values in ((a.k_scales, a.k), (a.v_scales, a.v)):
            found = (len(values) if packed == 2 else 0, values.shape[3] * packed // 16)
            assert (scales.shape[0], scales.shape[3]) == found
        assert a.lse.shape[1] == a.q.shape[1] and all(isinstance(x, float) for x in flat[17:21])
        assert (len(a.o8) == 0) != (len(a.o) == 0) and (spec.split or len(a.o8) == 0)
        group = a.q.shape[1] // a.k.shape[1] if spec.pack_gqa else 1
        tiles = sum(-(-n * group // spec.tile.m) for n in a.cu_seqlens_q.diff().tolist()) * (a.q.shape[1] // group)
        assert type(a.grid) is int and 1 <= a.grid <= 132 and (a.grid >= tiles or a.grid == 132)
        parts = 2 * a.grid
        if a.chunk:
            blocks = [-(-n // spec.tile.n) for n in a.kv_lens.tolist()]
            counts = [n * group for n in a.cu_seqlens_q.diff().tolist()]
            rows = [-(-n // geometry.tile_m(spec, n)) for n in counts]  # as the kernel cuts them
            parts = sum(m * max(1, -(-n // a.chunk)) for m, n in zip(rows, blocks)) * a.k.shape[1]
        assert len(a.part) >= parts if spec.split else len(a.part) == 0
        assert not spec.split or a.ticket >= 0 and len(a.tickets) - a.ticket >= (len(a.part) if a.chunk else a.grid)
        assert not spec.split or a.part.shape[1:] == (spec.tile.m, spec.head_dim_vo + 4) and a.part.is_contiguous()
        assert type(a.enable_pdl) is int and type(a.window_left) is int and 0 <= a.window_left <= 1 << 30
        assert type(a.chunk) is type(a.interleaved) is int and (spec.split or a.chunk == 0 and a.skip == -math.inf)
        assert a.tickets.dtype == torch.int32 and not a.tickets.any() and -1 <= a.ticket < len(a.tickets)
        launches.append(a)
        window = a.window_left if spec.mask.window and a.window_left < 1 << 30 else -1
        scale = a.scale_log2 / reference.LOG2E * (a.scale if len(a.scale) else 1.0)
        k_scales, v_scales = (t.view(torch.float8_e4m3fn) if len(t) else None for t in (a.k_scales, a.v_scales))
        problem = PagedProblem(
            a.q, a.k, a.v, a.page_table, a.kv_lens, a.cu_seqlens_q, scale,
            a.out_factor * (a.out_scale if len(a.out_scale) else 1.0), spec.mask.causal, window,
            a.soft_cap if spec.soft_cap or spec.split else 0.0, a.sink if len(a.sink) else None, k_scales, v_scales,
            bool(a.interleaved), a.drafts if len(a.drafts) else None,
        )  # fmt: skip
        o, lse = reference.paged_attention(problem)
        reference.store(o, a.o8.view(torch.float8_e4m3fn) if len(a.o8) else a.o)
        if len(a.lse):
            a.lse.copy_(lse)

    return kernel


@pytest.fixture
def here():
    """A machine whose kernels compute in torch; its `launches` are those of this test's calls, `specs` its kernels."""
    fake = FakeMachine(lambda op, spec: fake.specs.append(spec) or emulate(spec, fake.launches))
    fake.launches, fake.specs = [], []
    with machine.override(fake):
        yield fake


@pytest.fixture
def launches(here):
    return here.launches


@pytest.mark.parametrize("name", cases.EDGE)
def test_launch_of_every_case(here, launches, name):
    case = cases.EDGE[name]
    inputs = inputs_of(case)
    for _ in range(2):  # a new plan, then the same one
        inputs["out"].fill_(math.nan)
        check(inputs, trtllm_batch_context_with_kv_cache(**inputs), case.tolerance)
    assert len(launches) == 2 and len(here.plans) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"out": None},
        {"out": None, "out_dtype": torch.bfloat16},
        {"lse": None},
        {"lse": None, "return_lse": False},
        {"sinks": None},
        {"bmm1_scale": torch.tensor(0.11), "bmm2_scale": torch.tensor([0.7])},
        {"bmm1_scale": 1, "bmm2_scale": 2},
        {"seq_lens": torch.tensor(PLAIN.kv_lens, dtype=torch.uint32)},
        {"window_left": 3, "logits_soft_cap": 4.0, "causal": False},
        {"kv_cache": list(POOL)},
        {"max_q_len": 1},
        {"max_q_len": 1 << 30},
    ],
    ids=lambda c: "-".join(c),
)
def test_launch_variants(launches, change):
    inputs = inputs_of(**change)
    result = trtllm_batch_context_with_kv_cache(**inputs)
    assert len(launches) == 1
    check(inputs, result)
    o = result[0] if inputs["return_lse"] else result
    assert o.is_contiguous() and o.dtype == torch.bfloat16


def test_allocated_output_of_a_strided_query_is_contiguous(launches):
    inputs = inputs_of(cases.EDGE["strided-q"], out=None)
    assert trtllm_batch_context_with_kv_cache(**inputs)[0].is_contiguous()
    check(inputs, trtllm_batch_context_with_kv_cache(**inputs))


def test_pdl_and_lse_without_return(launches):
    for pdl, want in ((None, 1), (True, 1), (False, 0)):
        inputs = inputs_of(enable_pdl=pdl, return_lse=False)
        assert trtllm_batch_context_with_kv_cache(**inputs) is inputs["out"]
        assert launches[-1].enable_pdl == want and not inputs["lse"].isnan().any()


def test_values_and_token_counts_share_a_plan(here):
    short, long = replace(PLAIN, page_size=64), replace(PLAIN, q_lens=(9, 41), page_size=64, kv_lens=(20, 60))
    for case in (short, long):
        for window in (1, 7):
            inputs = inputs_of(case, window_left=window, bmm1_scale=0.1 * window, logits_soft_cap=3.0 + window)
            check(inputs, trtllm_batch_context_with_kv_cache(**inputs))
    assert len(here.plans) == 1


@pytest.mark.parametrize(
    "a,b",
    [
        ({}, {"window_left": 2}),
        ({}, {"logits_soft_cap": 2.0}),
        ({}, {"causal": False}),
        ({}, {"seq_lens": torch.tensor(PLAIN.kv_lens, dtype=torch.uint32)}),
        ({"max_q_len": 37}, {"max_q_len": 100}),
    ],
    ids=["window", "cap", "causal", "uint32", "bound"],
)
def test_plans_do_not_mix(launches, a, b):
    for change in (a, b, a, b):
        inputs = inputs_of(replace(PLAIN, q_lens=(5, 37), kv_lens=(19, 37)), **change)
        check(inputs, trtllm_batch_context_with_kv_cache(**inputs))


def test_layouts_of_equal_shape_do_not_mix(launches):
    case = replace(PLAIN, heads_kv=4, heads_q=4, page_size=8)
    square = replace(case, heads_kv=8, heads_q=8)  # P = Hkv: HND and NHD have the same shape
    for layout in ("HND", "NHD", "HND", "NHD"):
        inputs = inputs_of(replace(square, layout=layout))
        check(inputs, trtllm_batch_context_with_kv_cache(**inputs))


def test_a_tuple_of_stacked_caches_is_refused_after_a_stacked_one(launches):
    inputs = inputs_of(cases.EDGE["stacked"])
    trtllm_batch_context_with_kv_cache(**inputs)
    inputs["kv_cache"] = (inputs["kv_cache"], inputs["kv_cache"])
    with pytest.raises(ValueError, match=r"kv_cache \(K\)"):
        trtllm_batch_context_with_kv_cache(**inputs)
    assert len(launches) == 1


def test_plans_are_bounded(here):
    here.max_plans = 3
    for pages in range(8):
        trtllm_batch_context_with_kv_cache(**inputs_of(replace(PLAIN, spare_pages=pages)))
        assert len(here.plans) <= 3
    assert len(here.launches) == 8


def test_page_tables_take_turns(here, launches):
    """The view of the last table is kept: another table, and another storage or shape of the same one, are seen."""
    here.of = lambda *args: lambda *flat: launches.append(AttentionArgs(*flat))
    first, second = inputs_of(), inputs_of(PLAIN)
    second["block_tables"] = second["block_tables"].flip(0)
    for inputs in (first, second, first):
        trtllm_batch_context_with_kv_cache(**inputs)
        assert torch.equal(launches[-1].page_table[:, 1], inputs["block_tables"])
    moved = first["block_tables"].flip(0)
    first["block_tables"].set_(moved)
    trtllm_batch_context_with_kv_cache(**first)
    assert launches[-1].page_table.data_ptr() == moved.data_ptr()
    first["block_tables"].resize_(2, 2)
    trtllm_batch_context_with_kv_cache(**first)
    assert launches[-1].page_table.shape == (2, 2, 2)


def test_nothing_is_launched_without_tokens(launches):
    o, lse = trtllm_batch_context_with_kv_cache(**inputs_of(replace(PLAIN, q_lens=(0, 0)), out=None, lse=None))
    assert o.shape == (0, 4, 64) and lse.shape == (0, 4)
    none = replace(PLAIN, q_lens=(), kv_lens=())
    assert trtllm_batch_context_with_kv_cache(**inputs_of(none, out=None))[0].shape == (0, 4, 64)
    assert not launches


@pytest.mark.parametrize("name", BAD)
def test_refused_before_a_launch(launches, name):
    """As on the CPU, with a plan and without."""
    change, error, message = BAD[name]
    for _ in range(2):
        with pytest.raises(error, match=message):
            trtllm_batch_context_with_kv_cache(**inputs_of(**change))
        assert not launches
        trtllm_batch_context_with_kv_cache(**inputs_of())
        launches.clear()


@pytest.mark.parametrize(
    "case,change,error,message",
    [
        (replace(PLAIN, dtype="fp8"), {}, NotImplementedError, "query: torch.float8"),
        (replace(PLAIN, kv_dtype="fp8"), {}, NotImplementedError, "kv_cache: torch.float8"),
        (replace(PLAIN, kv_dtype="nvfp4"), {}, NotImplementedError, "kv_cache: torch.uint8"),
        (PLAIN, {"out_dtype": "nvfp4", "out": None, "o_sf_scale": 1.0}, NotImplementedError, "out_dtype: nvfp4"),
        (PLAIN, {"out_dtype": torch.float16, "out": None}, NotImplementedError, "out_dtype: torch.float16"),
        (PLAIN, {"bmm1_scale": -1.0}, NotImplementedError, "bmm1_scale: -1.0"),
        (replace(PLAIN, page_size=24), {}, NotImplementedError, "kv_cache: page size 24"),
        (replace(PLAIN, page_size=512), {}, NotImplementedError, "kv_cache: page size 512"),
        (replace(PLAIN, head_dim_qk=48, head_dim_vo=48), {}, NotImplementedError, r"head_dim \(48, 48\)"),
        (PLAIN, {"query": torch.zeros(T * HQ * D + 1).bfloat16()[1:].view(T, HQ, D)}, ValueError, "query: address"),
        (PLAIN, {"query": torch.zeros(T, HQ, D + 1).bfloat16()[..., :D]}, ValueError, "query: strides"),
        (PLAIN, {"out": torch.zeros(T, HQ, D + 4).bfloat16()[..., :D]}, ValueError, "out: strides"),
    ],
)
def test_what_no_kernel_takes(launches, case, change, error, message):
    with pytest.raises(error, match=message):
        trtllm_batch_context_with_kv_cache(**inputs_of(case, **change))
    assert not launches


def test_a_planned_call_sees_what_its_key_does_not_hold(launches):
    good = inputs_of()
    trtllm_batch_context_with_kv_cache(**good)
    out = torch.zeros(T, HQ, 2 * D, dtype=torch.bfloat16)[..., ::2]
    for change, message in (({"bmm1_scale": 0.0}, "bmm1_scale: 0.0"), ({"out": out}, "out: stride")):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            trtllm_batch_context_with_kv_cache(**good | change)
    assert len(launches) == 1


def test_other_architectures_say_so(here):
    here.known = "sm_80", 108
    with pytest.raises(NotImplementedError, match="architecture sm_80"):
        trtllm_batch_context_with_kv_cache(**inputs_of())
    assert "sm_80" in str(explain(**inputs_of()))


def test_an_error_of_the_kernel_itself_comes_through(here):
    def broken(*args):
        raise RuntimeError("launch failed")

    here.of = lambda *args: broken
    with pytest.raises(RuntimeError, match="launch failed"):
        trtllm_batch_context_with_kv_cache(**inputs_of())


def tickets_of(here, streams, capturing=False):
    """Indices that launches on these streams get, one after the other."""
    here.capturing = capturing
    first = len(here.launches)
    for here.stream in streams:
        trtllm_batch_context_with_kv_cache(**inputs_of())
    return [a.ticket for a in here.launches[first:]]


def test_streams_and_captured_launches_never_share_a_counter(here):
    a, b, again, per_thread = tickets_of(here, (0, 77, 0, scratch.PER_THREAD_STREAM))
    captured = tickets_of(here, (0, 0, 77), capturing=True)
    assert a == again and per_thread == -1
    assert len({a, b, *captured}) == 5 and min(a, b, *captured) >= 0
    assert here.waits == [torch.device("cpu")], "another stream must find zeros"


def test_counters_run_out_into_static_rounds(here, monkeypatch):
    monkeypatch.setattr(scratch, "TICKETS", 2)
    assert sorted(tickets_of(here, (5,)) + tickets_of(here, (5, 5), True)) == [-1, 0, 1]
    assert tickets_of(here, (5, 6)) == [0, -1]


def test_a_capture_allocates_no_counters(here):
    assert tickets_of(here, (5, 5), capturing=True) == [-1, -1]
    assert here.tickets == {} and len(here.launches[0].tickets) == 0 and not here.waits
    assert tickets_of(here, (5,)) == [0]


def test_explain(launches):
    said = explain(**inputs_of())
    assert said.runs is not None and said.runs.startswith("attention.sm90 bf16_d64_causal") and said.refused == ()
    refused = explain(**inputs_of(replace(PLAIN, page_size=24)))
    assert refused.runs is None and "page size 24" in str(refused)
    assert not launches
    with pytest.raises(ValueError, match="batch_size"):
        explain(**inputs_of(batch_size=7))


def test_explain_on_the_cpu():
    assert "reference" in str(explain(**inputs_of())) and "cpu" in str(explain(**inputs_of()))


def test_host_time_of_a_planned_call(here):
    """Python's part of a launch. 4 us on an idle 3 GHz core; the bound leaves room for a busy machine, yet is far
    below what planning (60 us) or the reference would take."""
    here.kernel = lambda op, spec, arch: lambda *args: None
    inputs = inputs_of()
    trtllm_batch_context_with_kv_cache(**inputs)
    seconds = min(timeit.repeat(lambda: trtllm_batch_context_with_kv_cache(**inputs), number=2000, repeat=5)) / 2000
    assert seconds < 25e-6


# ---- torch.compile


def op_arguments(inputs):
    k, v = inputs["kv_cache"]
    return (
        inputs["query"], k, v, inputs["block_tables"], inputs["seq_lens"], inputs["cum_seq_lens_q"], inputs["out"],
        None, inputs["lse"], inputs["bmm1_scale"], None, 1.0, torch.ones(1), inputs["sinks"], None, None,
        inputs["max_q_len"], -1, None, 0, inputs["kv_layout"], None, None, True, True, None, *attention.CONTEXT,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "nhd", "kv-len-0"])
def test_opcheck(name):
    op = torch.ops.cute_kernels.paged_attention.default
    torch.library.opcheck(op, op_arguments(inputs_of(cases.EDGE[name])))


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()  # else one test's variants count towards the next one's recompile limit


COMPILED = {
    "plain": (PLAIN, {}),
    "allocates": (PLAIN, {"out": None, "lse": None}),
    "no lse": (PLAIN, {"lse": None, "return_lse": False}),
    "stacked nhd": (cases.EDGE["stacked-nhd"], {"out": None}),
    "shared": (cases.EDGE["shared"], {}),
    "separate tables": (cases.EDGE["separate-tables"], {}),
    "tensor scales": (PLAIN, {"bmm1_scale": torch.tensor(0.2), "bmm2_scale": torch.tensor([3.0])}),
    "window, cap": (PLAIN, {"window_left": 4, "logits_soft_cap": 3.0}),
    "full": (PLAIN, {"causal": False}),
    "fp8": (replace(PLAIN, dtype="fp8"), {"out_dtype": torch.bfloat16}),
    "nvfp4 cache": (replace(PLAIN, kv_dtype="nvfp4"), {}),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager(fresh_compiler, name):
    case, change = COMPILED[name]
    want = trtllm_batch_context_with_kv_cache(**inputs_of(case, **change))
    compiled = torch.compile(trtllm_batch_context_with_kv_cache, fullgraph=True, backend="aot_eager")
    inputs = inputs_of(case, **change)
    got = compiled(**inputs)
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
        assert torch.equal(a, b)
    if inputs.get("out") is not None:
        assert torch.equal(inputs["out"], want[0] if isinstance(want, tuple) else want)


def test_compiled_with_varying_lengths(fresh_compiler):
    compiled = torch.compile(trtllm_batch_context_with_kv_cache, fullgraph=True, backend="aot_eager", dynamic=True)
    for lens in ((5, 37), (1, 2), (64, 33)):
        inputs = inputs_of(replace(PLAIN, q_lens=lens, kv_lens=(70, 40)))
        check(inputs, compiled(**inputs))


def test_compiled_nvfp4_output(fresh_compiler):
    extra = {"out_dtype": "nvfp4", "o_sf_scale": 200.0, "return_lse": False, "lse": None}
    case = replace(PLAIN, dtype="fp8")
    want = trtllm_batch_context_with_kv_cache(**inputs_of(case, **extra))

    def packed(**inputs):
        out = trtllm_batch_context_with_kv_cache(**inputs)
        return out.data, out.scale

    data, scale = torch.compile(packed, fullgraph=True, backend="aot_eager")(**inputs_of(case, **extra))
    assert torch.equal(data, want.data)
    columns = HQ * D // 16
    assert torch.equal(fp4.read_scales(scale, T, columns).float(), fp4.read_scales(want.scale, T, columns).float())


def test_compiled_refuses_what_eager_refuses(fresh_compiler):
    compiled = torch.compile(trtllm_batch_context_with_kv_cache, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="use_fp16_softmax"):
        compiled(**inputs_of(use_fp16_softmax=True))
    with pytest.raises(ValueError, match="logits_soft_cap: -1"):
        compiled(**inputs_of(logits_soft_cap=-1.0))
