"""The decode functions on the CPU: reference, the path to a launch with a kernel in torch, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from tests.support.emulated import SMS, check
from wrappers import trtllm_batch_decode_with_kv_cache, xqa
from wrappers.attention import checks
from wrappers.host import machine, scratch

CASES = {name: case for name, case in cases.EDGE.items() if case.causal}
SQUARE = {name: case for name, case in CASES.items() if case.head_dim_qk == case.head_dim_vo}
PLAIN = cases.EDGE["plain"]


def decode_of(case, **changes):
    return cases.as_decode(cases.make_inputs(case)) | changes


@pytest.mark.parametrize("name", SQUARE)
def test_launch_of_every_case(launches, name):
    case = SQUARE[name]
    inputs = cases.make_inputs(case)
    for _ in range(2):  # a new plan, then the same one
        inputs["out"].fill_(math.nan)
        check(inputs, trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs)), case.tolerance)
    assert len(launches) == 2 and all(a.counter_base == 0 and 0.9 * SMS < a.grid <= SMS for a in launches)
    assert all(len(a.o_partial) == 2 * SMS for a in launches)


@pytest.mark.parametrize(
    "requests, ctas", [(1, 132), (2, 128), (5, 132), (8, 128), (13, 132), (17, 132), (32, 128), (40, 132)]
)
def test_few_equal_tiles_get_equally_many_ctas(launches, requests, ctas):
    """If nearly all SMs then work; each request here has four tiles, one per KV head."""
    case = replace(PLAIN, q_lens=(1,) * requests, kv_lens=(70,) * requests, heads_q=8, heads_kv=4)
    inputs = decode_of(case)
    trtllm_batch_decode_with_kv_cache(**inputs)
    assert SMS == 132 and [a.grid for a in launches] == [ctas]


@pytest.mark.parametrize("requests, ctas", [(61, 132), (62, 62), (64, 64), (66, 66), (67, 132)])
@pytest.mark.parametrize("kv_dtype, dim", [("", 128), ("", 256), ("fp8", 128), ("fp8", 256), ("", 64), ("nvfp4", 128)])
def test_one_cta_for_each_pair_of_sms(launches, requests, ctas, kv_dtype, dim):
    """Where that many read K and V as fast as the memory allows, tiles that nearly fill the pairs are not split. Each
    request has one tile."""
    lens = {"q_lens": (1,) * requests, "kv_lens": (70,) * requests}
    case = replace(PLAIN, **lens, heads_q=8, heads_kv=1, head_dim_qk=dim, head_dim_vo=dim, kv_dtype=kv_dtype)
    trtllm_batch_decode_with_kv_cache(**decode_of(case))
    shared = dim == 64 or kv_dtype == "nvfp4"
    assert [a.grid for a in launches] == [2 * ctas if shared and ctas < 132 else ctas]


@pytest.mark.parametrize(
    "requests, kv_dtype, shares",
    [
        (64, "fp8", (128, 2)), (320, "nvfp4", (128, 10)), (66, "fp8", (132, 2)), (96, "fp8", (128, 3)),
        (33, "fp8", (0, 0)), (80, "fp8", (0, 0)), (31, "fp8", (0, 0)), (64, "", None),
    ],
)  # fmt: skip
def test_whole_tiles_of_equal_requests(launches, requests, kv_dtype, shares):
    """Each request has four tiles. Nearly all of 132 CTAs must get equally many of them; 16-bit caches never ask."""
    lens = {"q_lens": (1,) * requests, "kv_lens": (70,) * requests}
    case = replace(PLAIN, **lens, heads_q=8, heads_kv=4, head_dim_qk=128, head_dim_vo=128, kv_dtype=kv_dtype)
    trtllm_batch_decode_with_kv_cache(**decode_of(case))
    (a,) = launches
    found = None if kv_dtype == "" else (a.whole_ctas, a.whole_tiles)
    assert found == shares and (found is None) == (not hasattr(a, "whole_ctas"))


@pytest.mark.parametrize("requests, ctas", [(1, 4), (40, 160), (70, 264)])
def test_narrow_windows_get_two_ctas_of_an_sm(here, launches, requests, ctas):
    """No tile is split where there are CTAs for all. Scratch is not shared with launches of fewer CTAs."""
    case = replace(PLAIN, q_lens=(1,) * requests, kv_lens=(70,) * requests, heads_q=8, heads_kv=4)
    trtllm_batch_decode_with_kv_cache(**decode_of(case))
    trtllm_batch_decode_with_kv_cache(**decode_of(replace(case, window_left=40)))
    plain, windowed = launches
    assert windowed.grid == ctas and len(windowed.o_partial) == 4 * SMS == 2 * len(plain.o_partial)
    assert len(windowed.counters) == 2 * SMS * 4  # each of four warps counts for itself
    assert len(here.split_scratch) == 2


@pytest.mark.by_shape
@pytest.mark.parametrize("kv_dtype", ["", "fp8", "nvfp4"])
@pytest.mark.parametrize("requests, ctas", [(32, 128), (34, 264), (64, 256), (70, 264)])
def test_as_many_tiles_as_sms_get_two_ctas_of_an_sm(launches, requests, ctas, kv_dtype):
    """Each request has four tiles. From 33 requests on, there are two CTAs on an SM. They share tiles, unless nearly
    all CTAs can take one tile each."""
    lens = {"q_lens": (1,) * requests, "kv_lens": (70,) * requests}
    case = replace(PLAIN, **lens, heads_q=8, heads_kv=4, head_dim_qk=64, head_dim_vo=64, kv_dtype=kv_dtype)
    trtllm_batch_decode_with_kv_cache(**decode_of(case))
    assert [a.grid for a in launches] == [ctas]


@pytest.mark.parametrize("q_len", [1, 3])
def test_requests_of_equal_length(launched, q_len):
    case = replace(PLAIN, q_lens=(q_len,) * 3, kv_lens=(9, 40, 17))
    inputs = decode_of(case)
    ragged = [t.clone() for t in trtllm_batch_decode_with_kv_cache(**inputs)]
    inputs["out"].fill_(math.nan)
    plain = inputs | {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": q_len}
    assert all(map(torch.equal, trtllm_batch_decode_with_kv_cache(**plain), ragged))


def test_scales(launched):
    case = replace(PLAIN, q_lens=(1, 2))
    inputs = decode_of(case, bmm1_scale=0.2, bmm2_scale=0.5, o_scale=3.0)
    want = [t.clone() for t in trtllm_batch_decode_with_kv_cache(**inputs | {"bmm2_scale": 1.5, "o_scale": 1.0})]
    changes = {
        "o_scale": {},
        "tensors": {"bmm1_scale": torch.tensor([0.2]), "bmm2_scale": torch.tensor([0.5])},
        "log2": {"bmm1_scale": 7.0, "bmm1_scale_log2": torch.tensor([0.2 * math.log2(math.e)])},
        "sinks": {"sinks": [inputs["sinks"]]},
    }
    for what, change in changes.items():
        got = trtllm_batch_decode_with_kv_cache(**inputs | change)
        for g, w in zip(got, want):
            torch.testing.assert_close(g.float(), w.float(), rtol=1e-2, atol=1e-2, msg=what)


def test_max_q_len_is_a_hint(launches):
    inputs = cases.make_inputs(PLAIN)
    check(inputs, trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs) | {"max_q_len": 1}), PLAIN.tolerance)


def test_scratch_is_kept_for_a_stream_and_counters_for_a_stream_of_a_capture(here, launches, monkeypatch):
    inputs = decode_of(PLAIN)
    streams = ((0, 0), (0, 0), (7, 0), (0, 1), (0, 1), (7, 1), (0, 2), (2, 0), (2, 0))
    for here.stream, here.capture in streams:
        here.capturing = here.capture > 0
        trtllm_batch_decode_with_kv_cache(**inputs)
    where = [a.o_partial.data_ptr() for a in launches]
    counters = [a.counters.data_ptr() + 4 * a.counter_base for a in launches]
    assert where[0] == where[1] and len({*where[1:]}) == 8
    assert counters[0] == counters[1] and counters[3] == counters[4], "launches that cannot overlap"
    assert len({*counters}) == 7, "streams, captures, and streams of one handle"
    assert counters[5] - counters[3] == counters[6] - counters[5] == 4 * SMS  # captured ones share an allocation
    pool = here.counter_pools[launches[0].q.device]
    assert pool.used[0] == 3 * SMS, "by graphs and their streams, not by launches"
    full = pool._replace(used=[len(pool.counters) - 1])
    monkeypatch.setitem(here.counter_pools, launches[0].q.device, full)  # then a capture has zeroed ones of its own
    here.capturing, here.capture = True, 3
    trtllm_batch_decode_with_kv_cache(**inputs)
    assert launches[-1].counter_base == 0 and len(launches[-1].counters) == SMS
    here.capturing = False
    monkeypatch.setattr(scratch, "MAX_STREAMS", 2)
    here.stream = 9
    trtllm_batch_decode_with_kv_cache(**inputs)
    assert len(here.split_scratch) == 1


def test_a_planned_call_sees_what_its_key_does_not_hold(launches):
    equal = decode_of(replace(PLAIN, q_lens=(2, 2)), cum_seq_lens_q=None, max_q_len=None, q_len_per_req=2)
    trtllm_batch_decode_with_kv_cache(**equal)
    with pytest.raises(ValueError, match=r"query: 4 tokens, must be 2 x 1 \(seq_lens, q_len_per_req\)"):
        trtllm_batch_decode_with_kv_cache(**equal | {"q_len_per_req": 1})
    assert len(launches) == 1


BAD = {  # what other arguments make wrong; test_bad_calls.py has the bad values of each alone
    "mask, no query": ({"mask": torch.zeros(1), "query": None}, TypeError, "query"),
    "mask, max_q_len": ({"mask": torch.zeros(1), "max_q_len": "9"}, TypeError, "max_q_len: '9'"),
    "mask": ({"mask": torch.zeros(42, 2).to(torch.uint16)}, ValueError, r"mask: shape \(42, 2\), must be \(42, 4"),
    "interleaved": ({"v_scales_interleaved": True}, ValueError, "v_scales_interleaved: True"),
    "sinks": ({"sinks": [torch.zeros(4)] * 2}, ValueError, "sinks: a list of 2"),
    "max_q_len": ({"max_q_len": None}, ValueError, "max_q_len: None"),
    "q_len": ({"cum_seq_lens_q": None, "q_len_per_req": 0}, ValueError, "q_len_per_req: 0"),
    "tokens": ({"cum_seq_lens_q": None, "q_len_per_req": 4}, ValueError, "query: 42 tokens, must be 2 x 4"),
    "query, equal lengths": ({"query": None, "cum_seq_lens_q": None}, TypeError, "query"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_before_anything_is_written(name):
    change, error, message = BAD[name]
    inputs = decode_of(PLAIN) | change
    with pytest.raises(error, match=f'^{message}|^"{message}'):
        trtllm_batch_decode_with_kv_cache(**inputs)
    assert inputs["out"].isnan().all()


# ---- xqa


def xqa_inputs(lens=(5, 0, 40), heads=(6, 2), dim=64, page=16, layout="NHD", flat=False, dtype=torch.float16):
    """(arguments, K and V (tokens, Hkv, D) of each request), unused memory NaN."""
    gen = torch.Generator().manual_seed(3)
    batch, (hq, hkv) = len(lens), heads
    used = [-(-n // page) for n in lens]
    ids = torch.randperm(sum(used) + 2, generator=gen).int()
    table = torch.full((batch, max(used) + 1), -1, dtype=torch.int32)
    pools = torch.full((2, len(ids), page, hkv, dim), math.nan, dtype=dtype)
    rows, at = [], 0
    for b, n in enumerate(lens):
        mine = ids[at : at + used[b]]
        at += used[b]
        table[b, : used[b]] = mine
        kv = torch.randn(2, n, hkv, dim, generator=gen).to(dtype)
        rows.append(kv)
        for t in range(n):
            pools[:, mine[t // page], t % page] = kv[:, t]
    k, v = pools
    if flat:
        k, v = k.reshape(-1, dim), v.reshape(-1, dim)
    elif layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    q = torch.randn(batch, 1, hq, dim, generator=gen).to(dtype)
    return {
        "q": q, "k_cache": k, "v_cache": v, "page_table": table,
        "seq_lens": torch.tensor(lens).to(torch.uint32)[:, None], "output": torch.full_like(q, math.nan),
        "workspace_buffer": torch.full((64,), 255, dtype=torch.uint8),
        "semaphores": torch.full((9,), 77).to(torch.uint32),
        "num_kv_heads": hkv, "page_size": page, "kv_layout": layout,
    }, rows  # fmt: skip


def brute(inputs, rows):
    """spec.md 5.2, request by request in fp64."""
    q = inputs["q"][:, 0].double()
    scale = float(inputs.get("q_scale", 1.0)) * float(inputs.get("kv_scale") or 1.0) / math.sqrt(q.shape[-1])
    width = inputs.get("sliding_win_size", 0)
    out = torch.zeros_like(q)
    for b, (k, v) in enumerate(rows):
        k, v = (t.double()[-width if width else 0 :].repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        logits = torch.einsum("hd,nhd->hn", q[b], k) * scale
        sinks = inputs.get("sinks")
        extra = [] if sinks is None else [sinks.reshape(-1, 1).double()]
        if k.shape[0]:
            p = torch.cat([logits, *extra], 1).softmax(1)[:, : k.shape[0]]
            out[b] = torch.einsum("hn,nhd->hd", p, v) * float(inputs.get("kv_scale") or 1.0)
    return out[:, None]


VARIANTS = {
    "plain": {}, "window": {"sliding_win_size": 7}, "window 1": {"sliding_win_size": 1},
    "sinks": {"sinks": torch.linspace(-1, 3, 6).view(2, 3)}, "scales": {"q_scale": 0.7, "kv_scale": 1.3},
    "scale tensors": {"q_scale": torch.tensor(0.7), "kv_scale": torch.tensor([1.3])},
    "kv_scale tensor": {"kv_scale": torch.tensor([1.3])},
    "signed lengths": {"seq_lens": torch.tensor([[5], [0], [40]]).int()},
    "sm_count": {"kv_layout": 64}, "all": {"sliding_win_size": 20, "sinks": torch.ones(2, 3), "q_scale": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_xqa(launched, name):
    inputs, rows = xqa_inputs()
    inputs |= VARIANTS[name]
    assert xqa(**inputs) is None
    torch.testing.assert_close(inputs["output"].double(), brute(inputs, rows), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("form", [{"layout": "HND"}, {"flat": True}, {"heads": (5, 1), "dim": 128, "page": 32}])
def test_xqa_caches(form):
    inputs, rows = xqa_inputs(**form)
    wrappers.xqa(**inputs)
    torch.testing.assert_close(inputs["output"].double(), brute(inputs, rows), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND", "flat"])
@pytest.mark.parametrize("kind", ["e4m3", "nvfp4"])
def test_xqa_of_quantised_caches(kind, layout):
    """On the CPU: attention on the dequantised values."""
    inputs, rows = xqa_inputs(layout="NHD" if layout == "flat" else layout, flat=layout == "flat")
    for name, sf in (("k_cache", "k_sf_cache"), ("v_cache", "v_sf_cache")):
        if kind == "e4m3":
            inputs[name] = inputs[name].to(torch.float8_e4m3fn)
        else:
            inputs[name], factors = wrappers.nvfp4_quantize(inputs[name])
            inputs[sf] = factors.view(torch.uint8)
    for pair in rows:
        for t in pair:
            codes = (
                t.to(torch.float8_e4m3fn) if kind == "e4m3" else wrappers.nvfp4_dequantize(*wrappers.nvfp4_quantize(t))
            )
            t.copy_(codes)
    xqa(**inputs | {"kv_scale": torch.tensor([0.5])})
    want = brute(inputs | {"kv_scale": 0.5}, rows)
    torch.testing.assert_close(inputs["output"].double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("cache", ["tuple", "stacked"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_quantised_caches(kind, layout, cache, launched):
    case = replace(PLAIN, kv_dtype=kind, layout=layout, cache=cache)
    inputs = cases.make_inputs(case)
    for _ in range(2):
        inputs["out"].fill_(math.nan)
        check(inputs, trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs)), case.tolerance)


def test_interleaved_scales_of_v(launched):
    inputs = cases.make_inputs(replace(PLAIN, kv_dtype="nvfp4"))
    want = [t.clone() for t in trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs))]
    k, v = inputs["kv_block_scales"]
    stored = v.unflatten(2, (-1, 4)).transpose(-1, -2).reshape(v.shape)
    assert torch.equal(wrappers.fp4.deinterleave_v_scales(stored).view(torch.uint8), v.view(torch.uint8))
    inputs["kv_block_scales"] = (k, stored)
    inputs["out"].fill_(math.nan)
    got = trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs), v_scales_interleaved=True)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("given", [False, True])
def test_e4m3_output(launched, given):
    """Rounded and saturated; bmm2_scale includes 1 / o_scale."""
    inputs = decode_of(PLAIN, bmm2_scale=400.0)
    o, _ = cases.reference_of(cases.make_inputs(PLAIN) | {"bmm2_scale": 400.0})
    out = torch.zeros(o.shape, dtype=torch.float8_e4m3fn) if given else None
    inputs |= {"out": out, "out_dtype": torch.float8_e4m3fn, "o_scale": 0.5}
    got, _ = trtllm_batch_decode_with_kv_cache(**inputs)
    assert got.dtype == torch.float8_e4m3fn and (not given or got is out) and (o.abs() > 448).any()
    torch.testing.assert_close(got.float(), o.clamp(-448, 448), rtol=0.07, atol=1e-2)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_launches_of_nvfp4_output(launches, phase, dtype):
    """Given or new, at a row of the factors or from the first one on; in a known call as in a new one."""
    if (phase, dtype) == ("prefill", "fp8"):
        pytest.skip("no kernel")
    case = replace(PLAIN, dtype=dtype, kv_dtype="fp8" if dtype == "fp8" else "", out_dtype="nvfp4", strided_q=True)
    inputs, public = cases.make_inputs(case), wrappers.trtllm_batch_context_with_kv_cache
    want = wrappers.fp4.nvfp4_quantize(cases.reference_of(inputs)[0].flatten(1), cases.SF_SCALE)
    if phase == "decode":
        inputs, public = cases.as_decode(inputs), trtllm_batch_decode_with_kv_cache
    given, tokens = inputs["out"], len(want[0])
    for out in (given, None, given):
        got, _ = public(**inputs | {"out": out, "out_dtype": "nvfp4", "o_sf_vec_size": 16})
        factors = wrappers.fp4.read_scales(got.scale, tokens, want[1].shape[1], got.scale_start_index)
        assert torch.equal(got.data.flatten(1), want[0]) and torch.equal(factors.float(), want[1].float())
        assert out is None or got.data is out.data and got.scale is out.scale
        assert got.original_shape == (tokens, case.heads_q, case.head_dim_vo)
    assert [a.o_sf_start for a in launches] == [cases.SF_START, 0, cases.SF_START]
    assert all(len(a.o) == len(a.o_fp8) == 0 and a.o_sf_scale == cases.SF_SCALE for a in launches)


def test_memory_of_a_known_nvfp4_output(launches):
    """Apart from the query; addressed as compiled code checks at every call, and a new call's plan before."""
    inputs = decode_of(replace(PLAIN, out_dtype="nvfp4"))
    good, size = inputs["out"], inputs["out"].data.numel()
    trtllm_batch_decode_with_kv_cache(**inputs)
    query, shape = inputs["query"].view(torch.uint8).flatten(), good.data.shape
    scale = torch.zeros(good.scale.numel() + 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    loose = torch.zeros(size + 16, dtype=torch.uint8)
    bad = {
        "^out.data: .* overlaps the memory of query": (query[:size].view(shape), good.scale),
        "^out.data: address": (loose[1 : size + 1].view(shape), good.scale),
        "^out.scale: address": (good.data, scale[1:-3].view(good.scale.shape)),
        "^out.data: shape": (torch.zeros(*shape[:2], shape[2] * 2, dtype=torch.uint8)[:, :2], good.scale),
    }
    for message, (data, factors) in bad.items():
        if "address" in message:
            machine.current.plans.clear()
        with pytest.raises(ValueError, match=message):
            trtllm_batch_decode_with_kv_cache(**inputs | {"out": wrappers.FP4Tensor(data, factors)})
    assert len(launches) == 1


@pytest.mark.parametrize("change", [{"batch_invariant": True}, {"skip_softmax_threshold_scale_factor": 1e-30}], ids=str)
def test_options_that_keep_the_result(launched, change):
    case = replace(PLAIN, q_lens=(1, 2, 17), kv_lens=(9000, 70, 5000))
    inputs = cases.make_inputs(case)
    check(inputs, trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs), **change), case.tolerance)
    for a in launched or ():
        assert (a.blocks_per_split > 0) == ("batch_invariant" in change)
        assert a.skip_threshold == (-math.inf if a.blocks_per_split else math.log2(1e-30))


@pytest.mark.parametrize("invariant", [False, True])
def test_kernels_for_many_rows(here, launches, invariant):
    """More than 8 query rows of a KV head have kernels of their own, more than 16 those of prefill, unless a request's
    bits may not depend on it."""
    for q_len in (1, 2, 3, 8, 9, 20, 1):  # of 3 heads a KV head
        case = replace(PLAIN, q_lens=(q_len, 1), kv_lens=(40, 30), heads_q=6, heads_kv=2)
        inputs = cases.make_inputs(case)
        check(
            inputs,
            trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs), batch_invariant=invariant),
            case.tolerance,
        )
    made = [getattr(spec.tile, "rows_per_warp", 64) for spec in here.specs]
    assert made == ([8] * 6 if invariant else [8, 8, 16, 64, 64, 64]) and len(launches) == 7


def test_a_plan_without_tokens_is_not_that_of_batch_invariance(here):
    """A group of 16 heads has 16 rows a token: wide kernels, whatever was called before."""
    for q_len, invariant in ((0, False), (1, True), (1, False)):
        case = replace(PLAIN, q_lens=(q_len,) * 2, kv_lens=(40, 30), heads_q=16, heads_kv=1)
        trtllm_batch_decode_with_kv_cache(**decode_of(case), batch_invariant=invariant)
    assert [spec.tile.rows_per_warp for spec in here.specs] == [16, 8]


@pytest.mark.parametrize("kv", ["", "fp8", "nvfp4"])
def test_scratch_holds_the_parts_of_many_rows(launches, kv):
    """Checked where the launch would be, against the tiles that the kernel cuts."""
    case = replace(PLAIN, q_lens=(1, 60), kv_lens=(40, 70), head_dim_qk=128, head_dim_vo=128, kv_dtype=kv)
    inputs = cases.make_inputs(case)
    for _ in range(2):
        got = trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs), batch_invariant=True)
        check(inputs, got, case.tolerance)
    assert len(launches) == 2 and all(a.blocks_per_split for a in launches)


def test_a_negative_page_is_a_page_of_zeros():
    inputs, rows = xqa_inputs(lens=(40,))
    want = inputs | {"output": inputs["output"].clone()}
    inputs["page_table"][0, 1] = -1
    for t in rows[0]:
        t[16:32] = 0
    xqa(**inputs)
    torch.testing.assert_close(inputs["output"].double(), brute(want, rows), rtol=2e-3, atol=2e-3)


SF = torch.zeros(6, 16, 2, 4, dtype=torch.uint8)
ROWS = {"q": torch.zeros(3, 6, 64).half(), "output": torch.zeros(3, 6, 64).half()}
XQA_BAD = {  # what other arguments make wrong; test_bad_calls.py has the bad values of each alone
    "beam": ({"q": torch.zeros(3, 2, 6, 64).half()}, ValueError, r"q: shape \(3, 2"),
    "page_size differs": ({"page_size": 32}, ValueError, "k_cache: shape"),
    "drafts": ({"q_seq_len": 2}, ValueError, r"q: shape \(3, 1, 6, 64\), must be .*, q_seq_len 2"),
    "no mask": (
        {"q": torch.zeros(3, 1, 2, 6, 64).half(), "output": torch.zeros(3, 1, 2, 6, 64).half(), "q_seq_len": 2},
        ValueError,
        "mask: None, required",
    ),
    "interleaved": ({"v_scales_interleaved": True}, ValueError, "v_scales_interleaved: True"),
    "e5m2": (dict.fromkeys(("k_cache", "v_cache"), SF.to(torch.float8_e5m2)), TypeError, "k_cache: dtype .*e5m2"),
    "output strides": (
        {
            "q": torch.zeros(3, 1, 2, 6, 64).half(),
            "output": torch.zeros(3, 1, 6, 2, 64).half().transpose(2, 3),
            "q_seq_len": 2,
        },
        ValueError,
        "output: strides",
    ),
    "offsets": (ROWS | {"q_cu_seq_lens": torch.zeros(4)}, TypeError, "q_cu_seq_lens: dtype"),
    "offsets shape": (ROWS | {"q_cu_seq_lens": torch.zeros(3).int()}, ValueError, "q_cu_seq_lens: shape"),
    "offsets rank": ({"q_cu_seq_lens": torch.zeros(4).int()}, ValueError, "q: shape .*q_cu_seq_lens"),
    "one sf": ({"k_sf_cache": torch.zeros(1)}, ValueError, "k_sf_cache, v_sf_cache: one"),
    "sf of 16 bits": ({"k_sf_cache": SF, "v_sf_cache": SF}, ValueError, "k_sf_cache, v_sf_cache: K is Tensor, must be"),
}


@pytest.mark.parametrize("name", XQA_BAD)
def test_xqa_refuses_before_anything_is_written(name):
    change, error, message = XQA_BAD[name]
    inputs = xqa_inputs()[0] | change
    with pytest.raises(error, match=f'^{message}|^"{message}'):
        xqa(**inputs)
    if "output" not in change:
        assert inputs["output"].isnan().all()


@pytest.mark.parametrize("order", [("", "fp8", "nvfp4"), ("fp8", "", "nvfp4"), ("nvfp4", "fp8", "")])
def test_kernels_whose_tiles_differ_share_no_scratch(launches, order):
    """All on one stream; the fake kernel checks the rows of its scratch."""
    for kv in order:
        case = replace(PLAIN, head_dim_qk=256, head_dim_vo=256, kv_dtype=kv)
        trtllm_batch_decode_with_kv_cache(**cases.as_decode(cases.make_inputs(case)))
    assert len({a.o_partial.shape[1] for a in launches}) > 1


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_many_rows_take_the_code_of_prefill(here, arch):
    """More than 16 rows a request; on Blackwell with a window or a cap, too."""
    here.known, op = (arch, SMS), "sm90" if arch == "sm_90a" else "sm100"
    many = replace(PLAIN, heads_q=8, heads_kv=1, q_lens=(1, 5, 3), kv_lens=(40, 90, 3), window_left=-1, soft_cap=0.0)
    served = {}
    for name, case in {
        "many": many, "few": replace(many, q_lens=(1, 2, 1)), "window": replace(many, window_left=37),
        "cap": replace(many, soft_cap=9.0), "gathered": replace(many, page_size=24),
    }.items():  # fmt: skip
        inputs = cases.make_inputs(case)
        call = cases.as_decode(inputs)
        check(inputs, trtllm_batch_decode_with_kv_cache(**call), case.tolerance)
        served[name] = wrappers.explain(**call, function=trtllm_batch_decode_with_kv_cache).runs.split()[0]
    few, modified = "attention.decode", "attention.sm100" if op == "sm100" else "attention.decode"
    want = {"many": f"attention.{op}", "few": few, "window": modified, "cap": modified, "gathered": few}
    assert served == want and len(here.launches) == len(want)


def test_more_keys_than_a_kernel_counts(here, launches, monkeypatch):
    inputs = decode_of(PLAIN)
    table, size = inputs["block_tables"], inputs["kv_cache"][0].shape[2]
    monkeypatch.setattr(checks, "MOST_KEYS", table.shape[1] * size)
    with pytest.raises(NotImplementedError, match=f"block_tables: {table.shape[1]} pages of {size} tokens per request"):
        trtllm_batch_decode_with_kv_cache(**inputs)
    monkeypatch.setattr(checks, "MOST_KEYS", table.shape[1] * size + 1)
    trtllm_batch_decode_with_kv_cache(**inputs)
