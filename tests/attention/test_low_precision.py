"""Quantised queries, caches and outputs, and scales a head: what the host takes, what the reference computes of it, and
how CUDA refuses what no kernel does."""

import itertools
from dataclasses import replace

import pytest
import torch

from bench.cases import attention as cases
from tests.support.fake_machine import FakeMachine
from tests.support.prefill_batches import HKV, HQ, Case, D, check, oracle
from wrappers import (
    explain,
    fp4,
    nvfp4_quantize,
    single_prefill_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from wrappers.attention import checks, plan
from wrappers.flashinfer import values
from wrappers.fp4 import nvfp4_dequantize
from wrappers.host import machine
from wrappers.own.registry import call_of

HALF, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
NVFP4 = torch.uint8
PAIRS = [(q, kv) for q, allowed in checks.CACHES.items() for kv in allowed if kv.itemsize == 1]
PLAIN = cases.EDGE["plain"]
WORKSPACE = torch.empty(0)
LAYOUTS = ["NHD", "HND"]


def name_of(dtype):
    return str(dtype).removeprefix("torch.float8_").removeprefix("torch.")


def stored(x, dtype):
    """(values as a cache of `dtype` holds them, their scale factors or None)."""
    return nvfp4_quantize(x.float()) if dtype == NVFP4 else (x.to(dtype), None)


def exact(x, factors):
    """fp32 of stored values."""
    return x.float() if factors is None else nvfp4_dequantize(x, factors)


class Low:
    """`Case` with queries and a cache of these types. rows: K and V of all requests, (values, factors) each, as are
    `cache`'s pages."""

    def __init__(self, q, kv, page=4, layout="NHD"):
        self.case = case = Case(page, layout)
        case.q = case.q.to(q)
        self.rows = [stored(t, kv) for t in (case.k, case.v)]
        self.cache = [stored(t.nan_to_num(0.0), kv) for t in case.cache]
        case.k, case.v = (exact(*pair) for pair in self.rows)
        self.types = dict(q_data_type=q, kv_data_type=kv, o_data_type=BF16 if q == BF16 else HALF)

    def of(self, pairs, lead):
        """(k, v) and the keywords that go with them, of `rows` in the layout, or of `cache`."""
        turn = (lambda t: t.transpose(0, 1)) if lead and self.case.layout == "HND" else (lambda t: t)
        (k, ks), (v, vs) = pairs
        return (turn(k), turn(v)), {} if ks is None else {"kv_cache_sf": (turn(ks), turn(vs))}

    def paged(self, **options):
        return self.case.paged(**self.types | options)

    def ragged(self, **options):
        return self.case.ragged(**self.types | options)

    def want(self, q=1.0, k=1.0, v=1.0, **options):
        """Scales: numbers, or (heads,)."""
        scales = [torch.as_tensor(scale).reshape(-1, 1) for scale in (q, k, v)]
        found = [
            oracle(*(t.double() * scale for t, scale in zip(one[:3], scales)), **options)
            for one in self.case.requests()
        ]
        return torch.cat([o for o, _ in found]), torch.cat([lse for _, lse in found])


# ---- what is computed


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("q,kv", PAIRS, ids=name_of)
def test_classes_and_single(q, kv, layout):
    low = Low(q, kv, layout=layout)
    want, tolerance = low.want(causal=True, scale=0.25), 1e-2 if q == BF16 else 2e-3
    cache, paged_sf = low.of(low.cache, False)
    check(low.paged(causal=True, sm_scale=0.25).run_return_lse(low.case.q, cache, **paged_sf), want, tolerance)
    rows, ragged_sf = low.of(low.rows, True)
    check(low.ragged(causal=True, sm_scale=0.25).run_return_lse(low.case.q, *rows, **ragged_sf), want, tolerance)
    m, n = low.case.q_lens[0], low.case.kv_lens[0]
    along = 1 if layout == "HND" else 0
    one = [t.narrow(along, 0, n) for t in rows]
    sf = {name: tuple(t.narrow(along, 0, n) for t in pair) for name, pair in ragged_sf.items()}
    got = single_prefill_with_kv_cache(
        low.case.q[:m], *one, causal=True, kv_layout=layout, sm_scale=0.25, return_lse=True,
        o_dtype=low.types["o_data_type"], **sf,
    )  # fmt: skip
    check(got, (want[0][:m], want[1][:m]), tolerance)


@pytest.mark.parametrize("q,kv", PAIRS, ids=name_of)
def test_context_and_decode(q, kv):
    """One page table for both, requests of one token in decode."""
    inputs = cases.make_inputs(replace(PLAIN, dtype="fp16", lse=False))
    (k, ks), (v, vs) = (stored(t.nan_to_num(0.0), kv) for t in inputs["kv_cache"])
    inputs |= {"query": inputs["query"].to(q), "out": None, "out_dtype": BF16 if q == BF16 else HALF}
    quantised = inputs | {"kv_cache": (k, v), "kv_cache_sf": None if ks is None else (ks, vs)}
    wide = inputs | {"query": inputs["query"].to(HALF), "out_dtype": HALF}
    wide["kv_cache"] = tuple(exact(*pair).to(HALF) for pair in ((k, ks), (v, vs)))  # exact: fp16 holds them all
    assert all(torch.equal(t.float(), exact(*pair)) for t, pair in zip(wide["kv_cache"], ((k, ks), (v, vs))))
    tolerance = 1e-2 if q == BF16 else 2e-3
    for function, form in ((trtllm_batch_context_with_kv_cache, dict), (trtllm_batch_decode_with_kv_cache, as_decode)):
        got, want = function(**form(quantised)), function(**form(wide))
        torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


def as_decode(inputs):
    return cases.as_decode(inputs) | {name: inputs[name] for name in ("out_dtype", "kv_cache_sf") if name in inputs}


@pytest.mark.parametrize("function", ["context", "paged", "decode"])
def test_interleaved_scales_of_v_and_one_tensor_of_both(function):
    low = Low(E4M3, NVFP4, page=8, layout="HND")
    (k, ks), (v, vs) = low.cache
    woven = vs.view(torch.uint8).unflatten(2, (-1, 4)).transpose(-1, -2).reshape(vs.shape).view(E4M3)
    assert torch.equal(fp4.deinterleave_v_scales(woven).view(torch.uint8), vs.view(torch.uint8))
    cache, bits = torch.stack([k, v], 1), torch.stack([ks.view(torch.uint8), vs.view(torch.uint8)], 1)
    both = bits.view(E4M3)
    case = low.case
    if function == "paged":
        run, names = low.paged(causal=True).run, ("kv_cache_sf", "kv_block_scales")
        calls = [lambda **sf: run(case.q, cache, **sf), lambda **sf: run(case.q, (k, v), **sf)]
    else:
        lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        counts = case.page_indptr.diff().tolist()
        table = torch.nn.utils.rnn.pad_sequence(case.indices.split(counts), batch_first=True)
        if function == "context":
            names = "kv_cache_sf", "kv_block_scales"
            of = lambda pool, **sf: trtllm_batch_context_with_kv_cache(  # noqa: E731
                case.q, pool, None, table, lens, 7, None, D**-0.5, 1.0, len(lens), case.qo_indptr, None,
                out_dtype=HALF, **sf,
            )  # fmt: skip
        else:
            names = ("kv_cache_sf",)
            of = lambda pool, **sf: trtllm_batch_decode_with_kv_cache(  # noqa: E731
                case.q, pool, None, table, lens, None, D**-0.5, 1.0, out_dtype=HALF, max_q_len=7,
                cum_seq_lens_q=case.qo_indptr, **sf,
            )  # fmt: skip
        calls = [lambda **sf: of(cache, **sf), lambda **sf: of((k, v), **sf)]
    want = low.want(causal=True)[0]
    for call, name, factors in itertools.product(calls, names, (both, (ks, vs))):
        torch.testing.assert_close(call(**{name: factors}).double(), want, rtol=2e-3, atol=2e-3)
    got = calls[0](kv_cache_sf=(ks, woven), v_scales_interleaved=True)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)
    assert not torch.equal(got, calls[0](kv_cache_sf=(ks, woven)))


def test_outputs_of_quantised_queries():
    low = Low(E4M3, E4M3)
    cache, _ = low.of(low.cache, False)
    want = low.want()[0]
    for out in (E4M3, None):
        wrapper = low.paged(o_data_type=out)
        got = wrapper.run(low.case.q, cache)
        assert got.dtype == E4M3
        torch.testing.assert_close(got.double(), want, rtol=5e-2, atol=7e-2)
        got = wrapper.run(low.case.q, cache, v_scale=300.0)
        assert got.float().abs().max() == 448 and (300 * want).abs().max() > 480
        torch.testing.assert_close(got.double(), (300 * want).clamp(-448, 448), rtol=2**-4, atol=2**-9)
    inputs = cases.make_inputs(replace(PLAIN, lse=False)) | e5m2_inputs()
    with pytest.raises(ValueError, match="^out_dtype: torch.float8_e5m2 .the query's, by default., must be one of"):
        trtllm_batch_context_with_kv_cache(**inputs)
    with pytest.raises(ValueError, match="^out: dtype torch.float8_e5m2, must be one of torch.float16"):
        trtllm_batch_context_with_kv_cache(**inputs | {"out": torch.empty_like(inputs["query"])})


def e5m2_inputs():
    """Of the context function, that are not `PLAIN`'s."""
    inputs = cases.make_inputs(replace(PLAIN, lse=False))
    caches = tuple(t.nan_to_num(0.0).to(E5M2) for t in inputs["kv_cache"])
    return {"query": inputs["query"].to(E5M2), "kv_cache": caches, "out": None, "out_dtype": None}


@pytest.mark.parametrize("function", ["context", "decode"])
@pytest.mark.parametrize("q", ["bf16", "fp8"])
def test_nvfp4_output(function, q):
    """Codes and factors of the fp32 result, 0 where a row sees no key; factors in two tiles."""
    case = replace(PLAIN, dtype=q, q_lens=(3, 0, 2), kv_lens=(1, 5, 9), heads_q=6, heads_kv=2, lse=False)
    inputs = cases.make_inputs(case)
    want, _ = cases.reference_of(inputs)
    scale = torch.full((256, 24), 7.0).to(E4M3)
    out = fp4.FP4Tensor(torch.full((5, 6, 32), 255, dtype=torch.uint8), scale, 125)
    inputs |= {"out": out, "out_dtype": "nvfp4", "o_sf_scale": 2.0**-4}
    if function == "context":
        got = trtllm_batch_context_with_kv_cache(**inputs, o_sf_vec_size=16)
    else:
        given = {name: inputs[name] for name in ("out_dtype", "o_sf_scale")}
        got = trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs) | given, o_sf_vec_size=16)
    assert got is not out and got.data is out.data and got.scale is scale and got.original_shape == (5, 6, 64)
    data, factors = nvfp4_quantize(want.flatten(1), 2.0**-4)
    assert torch.equal(got.data.flatten(1), data) and not got.data[:2].any()
    found = fp4.read_scales(scale, 5, 24, 125).view(torch.uint8)
    assert torch.equal(found, factors.view(torch.uint8)) and not found[:2].any() and found[2:].any()
    assert (scale.float() == 7.0).sum() >= (256 - 5) * 24
    if function == "context":  # an output of the call's own
        new = trtllm_batch_context_with_kv_cache(**inputs | {"out": None})
        assert torch.equal(new.data, got.data) and new.original_shape == (5, 6, 64)
        assert torch.equal(fp4.read_scales(new.scale, 5, 24).view(torch.uint8), found)


# ---- scales a head

OF_HEADS = dict(q=torch.linspace(0.5, 3, HQ), k=torch.tensor([0.25, 2.0]), v=torch.tensor([-3.0, 0.5]))


@pytest.mark.parametrize("which", ["q", "k", "v", "qk", "qkv"])
def test_scales_of_heads(which):
    low = Low(E4M3, E4M3)
    given = {name: OF_HEADS[name] if name in which else torch.tensor(2.0) for name in "qkv"}
    want = low.want(**given, causal=True, cap=3.0)
    named = {f"{name}_scale": t for name, t in given.items()}
    by_position = tuple(given.values())
    options = dict(causal=True, logits_soft_cap=3.0)
    (k, v), cache = low.of(low.rows, True)[0], low.of(low.cache, False)[0]
    paged, ragged = low.paged(**options), low.ragged(**options)
    check(paged.run_return_lse(low.case.q, cache, **named), want, 4e-3)
    check(paged.run_return_lse(low.case.q, cache, *by_position), want, 4e-3)
    check(ragged.run_return_lse(low.case.q, k, v, **named), want, 4e-3)
    check(ragged.run_return_lse(low.case.q, k, v, *by_position), want, 4e-3)
    o = paged.run(low.case.q, cache, *by_position)
    assert torch.equal(o, paged.run(low.case.q, cache, **named)) and o.shape == want[0].shape
    assert torch.equal(ragged.run(low.case.q, k, v, *by_position), o)
    m, n = low.case.q_lens[0], low.case.kv_lens[0]
    q, k, v = low.case.q[:m], k[:n], v[:n]
    for names in (named, {f"scale_{name}": t for name, t in given.items()}):
        got = single_prefill_with_kv_cache(q, k, v, **options, return_lse=True, o_dtype=HALF, **names)
        check(got, (want[0][:m], want[1][:m]), 4e-3)


def test_positions_of_scales_are_fa3s_where_there_are_three():
    """(q, kv, k_scale, v_scale[, return_lse]) is documented; (q, kv, scale_q, scale_k, scale_v) is fa3's."""
    low = Low(HALF, E4M3)
    cache, (k, v), q = low.of(low.cache, False)[0], low.of(low.rows, True)[0], low.case.q
    paged, ragged = low.paged(), low.ragged()
    want = low.want(k=0.5, v=2.0)
    check(paged.run(q, cache, 0.5, 2.0, True), want)
    check(paged.run_return_lse(q, cache, 0.5, 2.0), want)
    check(paged.run_return_lse(q, cache, 1.0, 0.5, 2.0), want)
    check(ragged.run_return_lse(q, k, v, 1.0, 0.5, 2.0), want)
    assert torch.equal(paged.run(q, cache, 1.0, 0.5, 2.0), ragged.run(q, k, v, 1.0, 0.5, 2.0))
    assert torch.equal(ragged.run(q, k, v, 1.0, scale_k=0.5, v_scale=2.0), ragged.run(q, k, v, 1.0, 0.5, 2.0))
    with pytest.raises(TypeError, match="q_scale"):
        paged.run_return_lse(q, cache, 1.0, 0.5, 2.0, q_scale=1.0)


def test_scales_of_heads_are_read_by_the_device_only():
    """Tensors of a device, which "meta" stands for, are multiplied there; of groups of one head, no tensor is made."""
    meta = {name: t.to("meta") for name, t in OF_HEADS.items()}
    scale, tensor, out_scale, out = values.combine_scales(
        0.5, meta["q"], meta["k"], meta["v"], meta["q"].device, (HQ, HKV)
    )
    assert (scale, out_scale) == (0.5, 1.0) and tensor.is_meta and tensor.shape == out.shape == (HQ,)
    _, tensor, _, out = values.combine_scales(1.0, None, OF_HEADS["k"], OF_HEADS["k"], WORKSPACE.device, (HKV, HKV))
    assert tensor is out is OF_HEADS["k"]
    strided = torch.stack([OF_HEADS["q"]] * 2, 1)[:, 0]
    assert values.combine_scales(1.0, strided, None, None, WORKSPACE.device, (HQ, HKV))[1].is_contiguous()


def test_one_number_for_all_heads_is_no_scale_of_heads():
    low = Low(HALF, E4M3)
    cache = low.of(low.cache, False)[0]
    one = low.paged().run(low.case.q, cache, k_scale=torch.tensor([0.5]), v_scale=torch.tensor(3.0))
    many = low.paged().run(low.case.q, cache, k_scale=torch.full((HKV,), 0.5), v_scale=torch.full((HKV,), 3.0))
    torch.testing.assert_close(one, many, rtol=1e-3, atol=1e-3)


# ---- what is refused


WRONG = [(q, kv) for q in checks.QUERIES for kv in checks.QUERIES if kv not in checks.CACHES[q]]


@pytest.mark.parametrize("q,kv", [*WRONG, (E5M2, NVFP4)], ids=name_of)
def test_types_that_nothing_takes_together(q, kv):
    case = Case()
    with pytest.raises(TypeError, match=f"kv_data_type: {kv}, must be"):
        case.paged(q_data_type=q, kv_data_type=kv, o_data_type=HALF)
    rows = torch.zeros(4, HKV, D).to(kv)
    with pytest.raises(TypeError, match=f"k, v: with query {q}, dtype {kv}, must be"):
        single_prefill_with_kv_cache(torch.zeros(4, HQ, D).to(q), rows, rows, o_dtype=HALF)


class LookedFor(Exception):
    """A kernel, which serves the call."""


@pytest.fixture
def cuda():
    """A GPU under CPU tensors, whose kernels may not be launched."""

    def no_kernel(op, spec):
        raise LookedFor(f"{op} {spec.name}")

    with machine.override(FakeMachine(no_kernel)) as fake:
        yield fake


def family(kind, q=HALF, kv=HALF, scales=(), out=HALF):
    low = Low(q, kv, page=8)
    low.types |= {"o_data_type": out}
    pairs, lead = (low.cache, False) if kind == "paged" else (low.rows, True)
    tensors, sf = low.of(pairs, lead)
    options = {f"{name}_scale": OF_HEADS[name] for name in scales} | sf
    if kind == "paged":
        return lambda: low.paged(causal=True).run(low.case.q, tensors, **options)
    if kind == "ragged":
        return lambda: low.ragged(causal=True).run(low.case.q, *tensors, **options)
    return lambda: single_prefill_with_kv_cache(low.case.q, *tensors, o_dtype=out, **options)


def trtllm(function, q="fp16", kv="", **options):
    inputs = cases.make_inputs(replace(PLAIN, dtype=q, kv_dtype=kv, lse=False)) | {"out": None} | options
    if function == "decode":
        return lambda: trtllm_batch_decode_with_kv_cache(**cases.as_decode(inputs) | options)
    return lambda: trtllm_batch_context_with_kv_cache(**inputs)


REFUSED = {  # what no kernel is meant to do: call -> (it, what the message says)
    "e5m2 query": (lambda: family("ragged", E5M2, E5M2), "q: .*sm90: q e5m2: the kernel has bf16, fp16, e4m3"),
    "e5m2 query, decode": (
        lambda: trtllm("decode", **e5m2_inputs() | {"out_dtype": HALF}), "query: .*decode: q e5m2: the kernel has bf16",
    ),
    "scales of heads": (
        lambda: family("paged", scales="k"), "sm_scale x q_scale x k_scale: .*sm90: head_scales True: .* one scale",
    ),
    "scales of heads of V": (lambda: family("single", scales="v"), "v_scale: .*sm90: head_scales True: .* one scale"),
    "ragged NVFP4": (lambda: family("ragged", HALF, NVFP4), "k: .*sm90: source ragged: .* scale factors have pages"),
    "single NVFP4": (lambda: family("single", E4M3, NVFP4), "k: .*sm90: source ragged: .* scale factors have pages"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(cuda, name):
    make, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        make()()
    assert not cuda.plans


SERVED = {  # call -> (it, the kernel that it launches)
    "e4m3, paged": (lambda: family("paged", E4M3, E4M3, out=BF16), "e4m3_d64_"),
    "e4m3, ragged": (lambda: family("ragged", E4M3, E4M3, out=BF16), "e4m3_d64_"),
    "e4m3, single": (lambda: family("single", E4M3, E4M3, out=BF16), "e4m3_d64_"),
    "e4m3, context": (lambda: trtllm("context", "fp8", out_dtype=BF16), "e4m3_d64_"),
    "e4m3 out": (lambda: family("paged", E4M3, E4M3, out=E4M3), "e4m3_d64_"),
    "scales of heads": (lambda: family("ragged", E4M3, E4M3, "qkv"), "e4m3_ofp16_d64_"),
    "scales of heads of V": (lambda: family("single", E4M3, E4M3, "v"), "e4m3_ofp16_d64_"),
    "e4m3 query, e5m2 cache": (lambda: family("paged", E4M3, E5M2), "e4m3_kve5m2_ofp16_d64_"),
    "e4m3 query, NVFP4 cache": (lambda: family("paged", E4M3, NVFP4), "e4m3_kvnvfp4_ofp16_d64_"),
    "e4m3 cache": (lambda: family("single", HALF, E4M3), "fp16_kve4m3_d64_"),
    "e5m2 cache": (lambda: family("ragged", BF16, E5M2, out=BF16), "bf16_kve5m2_d64_"),
    "NVFP4 cache": (lambda: family("paged", HALF, NVFP4), "fp16_kvnvfp4_d64_"),
    "context, NVFP4": (lambda: trtllm("context", kv="nvfp4"), "fp16_kvnvfp4_d64_"),
    "context, e4m3 out": (lambda: trtllm("context", out_dtype=E4M3), "fp16_oany_d64_any"),
    "context, NVFP4 out": (lambda: trtllm("context", out_dtype="nvfp4", o_sf_scale=1.0), "fp16_oany_d64_any"),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_served_by_a_kernel_of_its_types(cuda, name):
    make, kernel = SERVED[name]
    with pytest.raises(LookedFor, match=f"^attention.sm90 {kernel}"):
        make()()


def test_facts():
    for make, want in (
        (lambda: dict(q_scale=OF_HEADS["q"]), True), (lambda: dict(v_scale=OF_HEADS["v"]), True),
        (lambda: dict(k_scale=torch.ones(1), v_scale=torch.tensor(1.0)), False), (dict, False),
    ):  # fmt: skip
        q, k = torch.zeros(4, HQ, D).to(E5M2), torch.zeros(4, HKV, D).to(E5M2)
        p = call_of(single_prefill_with_kv_cache, q, k, k, o_dtype=BF16, **make())
        facts = plan.request_of(p)
        assert (facts.q, facts.kv, facts.out, facts.head_scales) == ("e5m2", "e5m2", "bf16", want)
    assert explain(q, k, k, function=single_prefill_with_kv_cache, o_dtype=BF16, arch="sm_90a").runs is None


def test_a_plan_is_of_one_number_of_scales(cuda):
    """A call with scales of heads does not take the plan of one without."""
    made = []
    cuda.of = lambda op, spec: made.append(spec) or (lambda *flat: None)
    family("paged")()
    with pytest.raises(NotImplementedError, match="head_scales True"):
        family("paged", scales="q")()
    assert len(made) == 1
