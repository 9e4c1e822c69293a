"""trtllm_batch_context_with_kv_cache around the kernel: validation, the path to a launch, torch.compile."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.cases import attention as cases
from cute_kernels.attention import args, sm100
from tests.support.emulated import E4M3, PLAIN, check, inputs_of
from wrappers import explain, fp4, trtllm_batch_context_with_kv_cache
from wrappers.host import machine, scratch

# ---- the reference as the CPU's backend, and kernels


@pytest.mark.parametrize("name", cases.EDGE)
def test_every_case_writes_out_and_lse_in_place(launched, name):
    case = cases.EDGE[name]
    inputs = inputs_of(case)
    for _ in range(2):  # a new plan, then the same one
        inputs["out"].fill_(math.nan)
        o, lse = trtllm_batch_context_with_kv_cache(**inputs)
        assert o is inputs["out"] and lse is inputs["lse"]
        check(inputs, (o, lse), case.tolerance)
    assert launched is None or len(launched) == 2 and len(machine.current.plans) == 1


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


def test_no_tokens_of_nvfp4():
    given = {"out": None, "lse": None, "out_dtype": "nvfp4", "o_sf_scale": 1.0}
    o, lse = trtllm_batch_context_with_kv_cache(**inputs_of(replace(PLAIN, q_lens=(0, 0)), **given))
    assert o.shape[0] == 0 and lse.shape == (0, 4)


def test_scale_factors_have_two_names():
    inputs = inputs_of(replace(PLAIN, kv_dtype="nvfp4"))
    want = trtllm_batch_context_with_kv_cache(**inputs)[0].clone()
    inputs["kv_cache_sf"] = inputs.pop("kv_block_scales")
    assert torch.equal(trtllm_batch_context_with_kv_cache(**inputs)[0], want)


# ---- validation

BAD = cases.refusals()
POOL = inputs_of()["kv_cache"]
T, HQ, D = 42, 4, 64  # tokens, heads and head_dim of the plain case


@pytest.mark.parametrize("name", BAD)
def test_refused_before_anything_is_written(launched, name):
    """With a plan of the good call and without."""
    change, error, message = BAD[name]
    for count in range(2):
        inputs = inputs_of(**change)
        with pytest.raises(error, match=message):
            trtllm_batch_context_with_kv_cache(**inputs)
        assert "out" in change or inputs["out"].isnan().all()
        assert launched is None or len(launched) == count
        trtllm_batch_context_with_kv_cache(**inputs_of())


# ---- the path to a launch


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


def test_token_counts_share_a_plan(here):
    """The values of options are part of a plan: layers have few of them."""
    short, long = replace(PLAIN, page_size=64), replace(PLAIN, q_lens=(9, 41), page_size=64, kv_lens=(20, 60))
    for case in (short, long):
        for window in (1, 7):
            inputs = inputs_of(case, window_left=window, bmm1_scale=0.1 * window, logits_soft_cap=3.0 + window)
            check(inputs, trtllm_batch_context_with_kv_cache(**inputs))
            assert here.launches[-1].window_left == window
    assert len(here.plans) == 2


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
    """The view of the last table is kept: another table is seen."""
    here.of = lambda op, spec: lambda *flat: launches.append(SimpleNamespace(**dict(zip(args.fields(spec), flat))))
    first, second = inputs_of(), inputs_of(PLAIN)
    second["block_tables"] = second["block_tables"].flip(0)
    for inputs in (first, second, first):
        trtllm_batch_context_with_kv_cache(**inputs)
        assert torch.equal(launches[-1].page_table[:, 1], inputs["block_tables"])


def test_nothing_is_launched_without_tokens(launches):
    o, lse = trtllm_batch_context_with_kv_cache(**inputs_of(replace(PLAIN, q_lens=(0, 0)), out=None, lse=None))
    assert o.shape == (0, 4, 64) and lse.shape == (0, 4)
    none = replace(PLAIN, q_lens=(), kv_lens=())
    assert trtllm_batch_context_with_kv_cache(**inputs_of(none, out=None))[0].shape == (0, 4, 64)
    rows_of_nobody = inputs_of(none, query=torch.zeros(3, 4, 64).bfloat16(), out=None, lse=None)
    assert trtllm_batch_context_with_kv_cache(**rows_of_nobody)[0].shape == (3, 4, 64)
    assert not launches


@pytest.mark.parametrize(
    "case,change,error,message",
    [
        (PLAIN, {"bmm1_scale": -1.0}, NotImplementedError, "bmm1_scale: -1.0"),
        (replace(PLAIN, head_dim_qk=72, head_dim_vo=72), {}, NotImplementedError, r"head_dim \(72, 72\)"),
        (PLAIN, {"query": torch.zeros(T * HQ * D + 1).bfloat16()[1:].view(T, HQ, D)}, ValueError, "query: address"),
        (PLAIN, {"query": torch.zeros(T, HQ, D + 1).bfloat16()[..., :D]}, ValueError, "query: strides"),
        (PLAIN, {"out": torch.zeros(T, HQ, D + 4).bfloat16()[..., :D]}, ValueError, "out: strides"),
    ],
)
def test_what_no_kernel_takes(launches, case, change, error, message):
    with pytest.raises(error, match=message):
        trtllm_batch_context_with_kv_cache(**inputs_of(case, **change))
    assert not launches


def test_the_threshold_reaches_kernels_that_have_one(launches):
    """log2 of the factor, whatever the call before had; a call without one is served by a kernel that has none."""
    name = "skip_softmax_threshold_scale_factor"
    for factor in (1e-30, 8.0, None, 0.0, 3, 8.0):
        trtllm_batch_context_with_kv_cache(**inputs_of(**{name: factor}))
        threshold = getattr(launches.pop(), "skip_threshold", None)
        assert threshold == (math.log2(factor) if factor else None)
    for factor in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=name):
            trtllm_batch_context_with_kv_cache(**inputs_of(**{name: factor}))
    assert not launches


def test_other_architectures_say_so(here):
    here.known = "sm_80", 108
    with pytest.raises(NotImplementedError, match="arch sm_80"):
        trtllm_batch_context_with_kv_cache(**inputs_of())
    assert "sm_80" in str(explain(**inputs_of()))


@pytest.mark.parametrize("known", [("sm_100a", 148), ("sm_103a", 160)])
def test_blackwell_has_kernels_of_its_own(here, known):
    here.known = known
    for case in (PLAIN, replace(PLAIN, window_left=37, soft_cap=4.0)):
        inputs = inputs_of(case)
        check(inputs, trtllm_batch_context_with_kv_cache(**inputs), case.tolerance)
    assert [spec.name.split("_tma_")[0] for spec in here.specs] == ["bf16_d64_causal", "bf16_d64_anyw_cap"]
    assert all(sm100.supports(spec) is None for spec in here.specs)


def test_an_error_of_the_kernel_itself_comes_through(here):
    def broken(*args):
        raise RuntimeError("launch failed")

    here.of = lambda *args: broken
    with pytest.raises(RuntimeError, match="launch failed"):
        trtllm_batch_context_with_kv_cache(**inputs_of())


def counters_of(here, streams, capture=0):
    """Indices that launches on these streams get, one after the other. capture: the id of a capture, 0 for none."""
    here.capturing, here.capture = capture > 0, capture
    first = len(here.launches)
    for here.stream in streams:
        trtllm_batch_context_with_kv_cache(**inputs_of())
    return [a.counter_base for a in here.launches[first:]]


def test_streams_and_captured_launches_never_share_a_counter(here):
    a, b, again, per_thread = counters_of(here, (0, 77, 0, scratch.PER_THREAD_STREAM))
    first, second, other = counters_of(here, (0, 0, 77), capture=1)
    (of_next,) = counters_of(here, (0,), capture=2)
    assert a == again and per_thread == -1 and first == second
    assert len({a, b, first, other, of_next}) == 5 and min(a, b, first, other, of_next) >= 0
    assert here.waits == [torch.device("cpu")], "another stream must find zeros"


def test_captures_of_many_launches_take_few_counters(here):
    """A model of 80 layers, captured for 51 batch sizes, would take 4,080 by launches."""
    counters_of(here, (0,))
    for capture in range(1, 52):
        counters_of(here, (0,) * 3, capture)
    assert here.counter_pools[torch.device("cpu")].used == [1 + 51]


def test_counters_run_out_into_static_rounds(here):
    here.max_counters = 2
    assert counters_of(here, (5,)) + counters_of(here, (5,), 1) + counters_of(here, (5,), 2) == [0, 1, -1]
    assert counters_of(here, (5, 6)) == [0, -1]


def test_a_capture_allocates_no_counters(here):
    assert counters_of(here, (5, 5), capture=1) == [-1, -1]
    assert here.counter_pools == {} and len(here.launches[0].counters) == 0 and not here.waits
    assert counters_of(here, (5,)) == [0]
