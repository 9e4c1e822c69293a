"""The prefill family in the simulator: its classes plan and run, the function of one request, against the same calls on
the CPU; kernels that no bundle holds, which are compiled here. On a GPU: test_gpu_family.py."""

import math
from dataclasses import replace

import pytest
import torch

from bench.cases import choice, family
from bench.cases.attention import LSE_TOLERANCE, TOLERANCE, AttentionCase, expected, make_call
from bench.cases.family import FamilyCase
from tests.attention import test_decode_family
from tests.conftest import ARCH, ROOT, run_python
from tests.sim.workloads import FEATURES, distance, simulated
from tests.sim.workloads.attention import call
from tests.support import flash_attn_batches
from tests.support.prefill_batches import check, meant
from wrappers import flash_attn_with_kvcache
from wrappers.attention.op import serve

pytestmark = pytest.mark.kernels
MEMORY = ROOT / "build" / "simulated"
SMS = 2

PACKED = FamilyCase(q_lens=(3, 0, 5, 1), kv_lens=(150, 7, 20, 0), heads_q=6)
PLAIN = replace(PACKED, heads_q=2)
ALONE = replace(PLAIN, heads_q=1, heads_kv=1)
AGAIN = {"q_lens": (1, 7, 0, 2), "kv_lens": (9, 131, 260, 40)}  # another plan of the same object
MASKED = {"custom": True, "window_left": 37}
PLANS = {  # what an object plans and runs, one after another
    "page 16": (replace(PACKED, page_size=16), replace(PACKED, page_size=16, layout="NHD", strided=True, **AGAIN)),
    "page 1": (replace(PACKED, page_size=1, stacked=True, window_left=100),
               replace(PACKED, page_size=5, strided=True, soft_cap=4.0, **AGAIN)),
    "ragged": (replace(PACKED, form="ragged", layout="HND"),
               replace(PLAIN, form="ragged", layout="HND", strided=True, **AGAIN)),
    "sinks": (replace(PACKED, form="sinks", page_size=16), replace(PLAIN, form="sinks", window_left=100, **AGAIN)),
    "masks": (replace(PLAIN, page_size=16, **MASKED), replace(PLAIN, page_size=16, custom=True, packed=True, **AGAIN)),
    "blocks of a mask": (
        replace(PLAIN, heads_q=4, q_lens=(300, 5), kv_lens=(900, 500), page_size=16, custom=True, blocks=True),
        replace(PLAIN, q_lens=(2, 130), kv_lens=(700, 257), page_size=16, window_left=300, custom=True, blocks=True),
    ),
    "ranges": (
        replace(PLAIN, heads_q=4, q_lens=(300, 5), kv_lens=(420, 5), page_size=16, ranges=True, window_left=100),
        replace(PLAIN, q_lens=(2, 130), kv_lens=(700, 257), page_size=16, ranges=True, range_window=40),
    ),
    "ranges, cap": (
        replace(PLAIN, q_lens=(2, 130), kv_lens=(700, 257), page_size=16, ranges=True, range_window=40, soft_cap=4.0),
    ),
    "prefix": (
        replace(PLAIN, heads_q=4, q_lens=(300, 5, 40), kv_lens=(421, 5, 90), page_size=16, prefix=True),
        replace(PLAIN, q_lens=(2, 130), kv_lens=(700, 257), page_size=16, prefix=True),
    ),
    "prefix, window": (
        replace(PLAIN, q_lens=(2, 130), kv_lens=(700, 257), page_size=16, prefix=True, window_left=100, soft_cap=4.0),
    ),
    "RoPE": (replace(PACKED, mode="ROPE_LLAMA", window_left=100), replace(PACKED, page_size=16, soft_cap=4.0)),
    "ragged, RoPE": (replace(PACKED, form="ragged", mode="ROPE_LLAMA"),
                     replace(PACKED, form="ragged", soft_cap=4.0, causal=False, **AGAIN)),
    "ALiBi": (replace(PACKED, form="ragged", mode="ALIBI", window_left=100),
              replace(PACKED, form="ragged", mode="ALIBI", soft_cap=4.0, **AGAIN),
              replace(PACKED, form="ragged", mode="ALIBI", soft_cap=4.0, q_lens=(70, 3), kv_lens=(400, 60))),
    "page 1, head_dim 192": (replace(ALONE, page_size=1, head_dim_qk=192, head_dim_vo=128),),
    "page 5, head_dim 256": (replace(ALONE, head_dim_qk=256, head_dim_vo=256),),
}  # fmt: skip
ONE = replace(PLAIN, form="single", q_lens=(40,), kv_lens=(150,))
SINGLE = {
    "causal": ONE,
    "mask, window": replace(ONE, layout="HND", **MASKED),
    "bits": replace(ONE, custom=True, packed=True, strided=True, soft_cap=4.0),
    "RoPE": replace(ONE, mode="ROPE_LLAMA"),
}

EXCHANGED = (  # features of the decode function on whole tiles, of the context function on split keys
    "decode: page 16, window, separate tables", "decode: cap, device scales", "decode: scale 1, 12 rows",
    "decode: no keys", "prefill: page 32, head_dim 128", "prefill: page 128, cap, window", "prefill: window 0, 5 heads",
)  # fmt: skip
# Those served by kernels that no other test compiles: of fp16 over e4m3, and of head_dim 64 with keys shared by CTAs.
EXCHANGED_LATER = (
    "decode: e4m3, scale 1", "prefill: page 16, strided, stacked", "prefill: no keys, sink",
    "prefill: page 256, shared, device scales",
)  # fmt: skip


def close(case, got, want):
    for x, y, tolerance in zip(got, want, (case.tolerance, LSE_TOLERANCE), strict=True):
        assert distance(x, y, tolerance) <= 1


# Kernels that no other test compiles: the gathering kernels of other head dims, those of ranges with a cap and of a
# prefix in a window, and of ALiBi, which adds numbers to scores where test_chunked.py masks them.
LATER = {"page 1, head_dim 192", "page 5, head_dim 256", "ranges, cap", "prefix, window", "ALiBi"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in LATER else ()) for n in PLANS])
def test_plan_and_run(name):
    wrapper = family.wrapper_of(PLANS[name][0], "cpu")
    for seed, case in enumerate(PLANS[name]):
        t = family.make(case, seed)
        arguments, options = family.placed(case, t, "cpu"), family.run_options(case, t, "cpu")
        with simulated(ARCH, [], SMS, memory=MEMORY):
            family.plan(case, wrapper, t)
            got = wrapper.run(*arguments, **options, **family.outputs(case, "cpu"), return_lse=True)
        close(case, got, family.answer(case, t, "cpu"))


@pytest.mark.parametrize("name", SINGLE)
def test_one_request(name):
    case = SINGLE[name]
    t = family.make(case)
    with simulated(ARCH, [], SMS, memory=MEMORY):
        got = family.answer(case, t, "cpu")
    close(case, got, family.answer(case, t, "cpu"))


@pytest.mark.parametrize("page, q_len, options", [(16, 1, {}), (5, 2, {"window_left": 37, "logits_soft_cap": 3.0})])
def test_decode_class(page, q_len, options):
    """Page lists in the decode kernel; a request without pages."""
    case = test_decode_family.case_of(q_len, page=page, kv_lens=(9, 150, 0), dtype=torch.bfloat16)
    wrapper = test_decode_family.planned(case, q_data_type=torch.bfloat16, **options)
    with simulated(ARCH, [], SMS, memory=MEMORY):
        got = wrapper.run(case.q, case.cache, return_lse=True)
    check(got, case.want(causal=True, **meant(options)), TOLERANCE["bf16"])


@pytest.mark.full  # it compiles a kernel that no bundle holds
def test_decode_with_alibi(monkeypatch):
    """No kernel that splits keys has it, so whole tiles serve it."""
    monkeypatch.setattr(choice, "SPLIT", ())
    case, options = test_decode_family.case_of(2, page=16, kv_lens=(9, 150, 0)), {"pos_encoding_mode": "ALIBI"}
    wrapper = test_decode_family.planned(case, **options)
    with simulated(ARCH, [], SMS, memory=MEMORY):
        got = wrapper.run(case.q, case.cache, return_lse=True)
    check(got, case.want(causal=True, **meant(options)))


@pytest.mark.full  # no other test without this mark has its kernel, and test_ptxsim_fp8.py has scales per head
def test_decode_with_scales_per_head(monkeypatch):
    """No kernel that splits keys has them, so whole tiles serve them."""
    monkeypatch.setattr(choice, "SPLIT", ())
    case, e4m3 = test_decode_family.case_of(2, page=16, kv_lens=(9, 150, 0)), torch.float8_e4m3fn
    wrapper = test_decode_family.planned(case, q_data_type=e4m3, o_data_type=torch.bfloat16)
    q, cache, scales = case.q.to(e4m3), tuple(t.to(e4m3) for t in case.cache), torch.tensor([0.25, 4.0])
    with simulated(ARCH, [], SMS, memory=MEMORY) as machine:
        got = wrapper.run(q, cache, k_scale=scales)
    assert [plan.stream_k for plan in machine.plans.values()] == [False]
    assert distance(got, wrapper.run(q, cache, k_scale=scales), TOLERANCE["fp8"]) <= 1


@pytest.mark.parametrize("form", ["equal", "packed", "entries"])
def test_flash_attention_over_new_keys(form):
    given = flash_attn_batches.appended(form, 8, torch.bfloat16)[0]
    caches = "k_cache", "v_cache"
    there = given | {name: given[name].clone() for name in caches}
    with simulated(ARCH, [], SMS, memory=MEMORY):
        got = flash_attn_with_kvcache(**there)
    close(PLAIN, got, flash_attn_with_kvcache(**given))
    assert all(torch.equal(there[name], given[name]) for name in caches)


def test_flash_attention_whose_bits_depend_on_the_request_only():
    """Beside a long request, another kernel serves two short ones."""
    few = flash_attn_batches.Batch(q_lens=(1, 1), kv_lens=(300, 90), page=16)
    more = flash_attn_batches.Batch(q_lens=(1, 1, 70), kv_lens=(300, 90, 75), page=16)
    more.q[:2] = few.q
    for rows, pool in zip((few.k, few.v), more.paged):
        for request, part in enumerate(rows.split(few.kv_lens)):
            at = torch.arange(len(part))
            pool[more.table[request, at // 16], at % 16] = part
    with simulated(ARCH, [], SMS, memory=MEMORY):
        alone, both = (x.tabled(causal=True, num_splits=1, return_lse=True) for x in (few, more))
    assert torch.equal(alone[0], both[0][:2]) and torch.equal(alone[1], both[1][:, :2])
    flash_attn_batches.check(alone, few.want(causal=True))


@pytest.mark.parametrize("form", ["ragged", "tabled", "entries"])
def test_flash_attention_of_a_left_window(form):
    batch = flash_attn_batches.Batch(page=8, dtype=torch.bfloat16)
    with simulated(ARCH, [], SMS, memory=MEMORY):
        got = getattr(batch, form)(window_size=(5, -1), return_lse=True)
    flash_attn_batches.check(got, batch.want(window=(5, -1)), TOLERANCE["bf16"])


def test_small_pages_of_nvfp4():
    case = AttentionCase(
        "", q_lens=(1, 1), kv_lens=(150, 7), heads_q=4, heads_kv=2, head_dim_qk=128, head_dim_vo=128, page_size=5,
        kv_dtype="nvfp4", function="decode", sink=True,
    )  # fmt: skip
    with simulated(ARCH, [], SMS, memory=MEMORY):
        _, error = call(case)
    assert error <= 1


@pytest.mark.parametrize(("function", "dim", "page"), [
    pytest.param("context", 80, 12, marks=pytest.mark.full), pytest.param("context", 256, 16, marks=pytest.mark.full),
    ("decode", 128, 12),
])  # fmt: skip
def test_interleaved_factors_of_v(function, dim, page):
    """Requests that end within four rows."""
    case = AttentionCase(
        "", q_lens=(3, 1), kv_lens=(150, 89), heads_q=2, heads_kv=1, head_dim_qk=dim, head_dim_vo=dim, page_size=page,
        kv_dtype="nvfp4", function=function, sink=True, interleaved=True,
    )  # fmt: skip
    if function == "decode":
        case = replace(case, q_lens=(1, 1))
    p = make_call(case, "cpu")
    out, lse = torch.full_like(p.q, math.nan), torch.full(p.q.shape[:2], math.nan)
    with simulated(ARCH, [], SMS, memory=MEMORY):
        serve(p._replace(out=out, lse=lse))
    want = expected(case, p)
    assert distance(out, want[0], 0.0, case.limit(want[0])) <= 1 and distance(lse, want[1], LSE_TOLERANCE) <= 1


@pytest.mark.parametrize("name", [*EXCHANGED, *(pytest.param(x, marks=pytest.mark.full) for x in EXCHANGED_LATER)])
def test_the_other_kernel(monkeypatch, name):
    """Shapes choose the kernel, so each function may be served by either of them."""
    monkeypatch.setattr(choice, "SPLIT", choice.WHOLE)
    monkeypatch.setattr(choice, "WHOLE", ("trtllm_batch_decode_with_kv_cache",))
    (scenario,) = (scenario for scenario in FEATURES["attention"]() if scenario.name == name)
    with simulated(ARCH, [], scenario.sms, memory=MEMORY) as machine:
        errors = [call(case)[1] for case in scenario.calls]
    assert max(errors) <= 1
    assert {plan.stream_k for plan in machine.plans.values()} == {name.startswith("prefill")}


def test_a_nan_key_shows_on_blackwell():
    done = run_python("-m", "tests.support.nan_keys", CUTE_DSL_ARCH="sm_100a")
    assert done.stdout.split("\n")[:4] == ["bf16 1 True", "bf16 13 True", "fp8 1 True", "fp8 13 True"], done.stderr


def test_equal_tiles_are_not_split():
    """17 of 18 CTAs take two tiles each if all lengths are equal. Otherwise all CTAs have equal shares, and tiles are
    split: scratch, which is NaN before a launch, is written."""
    lens = (300,) * 17
    case = AttentionCase(
        "", q_lens=(1,) * 17, kv_lens=lens, heads_q=2, heads_kv=2, dtype="fp16", kv_dtype="fp8", function="decode"
    )  # fmt: skip
    for kv_lens in (lens, (*lens[1:], 40)):
        p = make_call(replace(case, kv_lens=kv_lens))
        with simulated(ARCH, [], 18, memory=MEMORY) as here:
            assert distance(serve(p), expected(case, p)[0], case.tolerance) <= 1
            ((o_partial, _),) = here.split_scratch.values()
        assert bool(o_partial.isnan().all()) == (kv_lens == lens)
