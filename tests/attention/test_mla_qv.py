"""FlashAttention's functions with qv, for latent attention (MLA), on the CPU and with a kernel in torch, against
float64; and XQA's name of the same call."""

import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import mla
from bench.cases.mla import MlaCase, call, error, expected, make
from tests.support import good_calls
from tests.support.emulated import emulation
from wrappers import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

CASES = {
    "one row": MlaCase("qv", lens=(70, 1, 0)),
    "rows and sinks": MlaCase("qv", lens=(70, 0, 5, 16), rows=3, heads=4, page_size=16, sink=True, gap=1),
    "no mask": MlaCase("qv", lens=(70, 33), page_size=1, causal=False, heads=3, rows=2, strided=True),
    "window and cap": MlaCase("qv", lens=(90, 33), rows=4, heads=2, window=17, cap=3.0, page_size=8, sink=True),
    "cap, no mask": MlaCase("qv", lens=(40,), rows=2, heads=2, cap=3.0, causal=False, dtype="fp16", data="peaks"),
}


def two(i):
    """The tensors of a call: q, k, v and qv."""
    (qv, q), (v, k) = (t.split([512, 64], -1) for t in (i.q, i.cache.unsqueeze(2)))
    return {"q": q, "k": k, "v": v, "qv": qv}


def cached(i, **changes):
    t = two(i)
    given = {"q": t["q"], "k_cache": t["k"], "v_cache": t["v"], "qv": t["qv"], "cache_seqlens": i.lens,
             "block_table": i.table, "softmax_scale": mla.SCALE, "causal": True}  # fmt: skip
    return given | changes


def ragged(case, i, **changes):
    t = two(i)
    starts = torch.arange(len(case.lens) + 1).int() * case.rows
    given = {"q": t["q"].flatten(0, 1), "k": t["k"], "v": t["v"], "q_v": t["qv"].flatten(0, 1), "seqused_k": i.lens,
             "cu_seqlens_q": starts, "max_seqlen_q": case.rows, "block_table": i.table, "softmax_scale": mla.SCALE,
             "causal": True}  # fmt: skip
    return given | changes


@pytest.mark.parametrize("name", CASES)
def test_results(name):
    case = CASES[name]
    i = make(case)
    want = expected(case, i)
    assert error(case, call(case, i), want) <= 1
    with emulation() as fake:
        for _ in range(2):
            assert error(case, call(case, i), want) <= 1
    assert len(fake.launches) == 2 and all(spec.kv.shares_v for spec in fake.specs)


def test_both_functions_are_one():
    case = CASES["rows and sinks"]
    i = make(case)
    for machine in (None, emulation()):
        with machine or torch.no_grad():
            out, lse = flash_attn_with_kvcache(**cached(i, s_aux=i.sinks, return_softmax_lse=True))
            flat, its = flash_attn_varlen_func(**ragged(case, i, s_aux=i.sinks, return_softmax_lse=True))
        assert torch.equal(out.flatten(0, 1), flat) and torch.equal(lse.transpose(0, 1).flatten(1), its)


def test_the_scale_counts_both_parts_by_default():
    i = make(CASES["one row"])
    given = cached(i)
    del given["softmax_scale"]
    assert torch.equal(flash_attn_with_kvcache(**given), flash_attn_with_kvcache(**given, softmax_scale=576**-0.5))


def test_keys_without_pages_run_on_the_cpu_alone():
    case = MlaCase("qv", lens=(20,), heads=2, page_size=20, rows=3)
    i = make(case)
    t, starts = two(i), torch.tensor([0, 3]).int()
    page = int(i.table[0, 0])
    given = {"q": t["q"][0], "k": t["k"][page], "v": t["v"][page], "qv": t["qv"][0], "cu_seqlens_q": starts,
             "cu_seqlens_k": torch.tensor([0, 20]).int(), "softmax_scale": mla.SCALE, "causal": True}  # fmt: skip
    out, lse = flash_attn_varlen_func(**given, return_softmax_lse=True)
    assert error(case, (out[None], lse[None] / math.log(2.0)), expected(case, i)) <= 1
    with emulation(), pytest.raises(NotImplementedError, match="^v: no attention kernel: .*pages"):
        flash_attn_varlen_func(**given)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_bound_call_takes_pairs(kernels):
    i = make(CASES["one row"])
    with emulation() if kernels else torch.no_grad():
        layer = wrappers.bind(flash_attn_with_kvcache, **cached(i, return_softmax_lse=True))
        for seed in range(2):
            other = two(make(CASES["one row"], seed=seed))
            want = flash_attn_with_kvcache(**cached(i, q=other["q"], qv=other["qv"], return_softmax_lse=True))
            got = layer.run((other["q"], other["qv"]))
            assert all(map(torch.equal, got, want))
        with pytest.raises(TypeError, match=r"^q: Tensor, must be \(q, qv\), since the bound call has qv"):
            layer.run(other["q"])
        for pair in ((other["q"][:1], other["qv"]), (other["q"], other["qv"][:1])):
            with pytest.raises(ValueError, match=r"^q: shape \(1, 1, 16, \d+\), must begin with \(3, 1\)"):
                layer.run(pair)


REFUSALS = [
    ({"qv": torch.zeros(3, 1, 16, 9).bfloat16()}, ValueError, "v_cache: K has head_dim 512, must be the query's, 9"),
    ({"qv": torch.zeros(3, 1, 15, 512).bfloat16()}, ValueError, "qv: shape (3, 1, 15, 512), must be (3, 1, 16, 512)"),
    ({"qv": torch.zeros(3, 1, 16, 512)}, TypeError, "qv: dtype torch.float32, must be one of torch.float16"),
    ({"qv": torch.zeros(3, 1, 16, 512).half()}, TypeError, "v_cache: with query torch.float16, dtype torch.bfloat16"),
    ({"qv": 3}, TypeError, "qv: int, must be a torch.Tensor"),
    ({"q": torch.zeros(3, 1, 16, 32).bfloat16()}, ValueError, "k_cache: shape"),
    ({"q_v": torch.zeros(3, 1, 16, 512).bfloat16()}, ValueError, "q_v: another name of qv, only one of the two"),
    ({"k": torch.zeros(3, 1, 1, 64).bfloat16(), "v": torch.zeros(3, 1, 1, 512).bfloat16()}, NotImplementedError,
     "k: given with qv, not supported, must be None"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["cpu", "kernels"])
def test_refusals(where):
    i = make(CASES["one row"])
    with torch.no_grad() if where == "cpu" else emulation() as fake:
        for changes, kind, message in REFUSALS:
            with pytest.raises(kind) as found:
                flash_attn_with_kvcache(**cached(i, **changes))
            assert str(found.value).startswith(message), f"{found.value}\n{message}"
        with pytest.raises(NotImplementedError, match="^qv: Tensor, not supported, must be None"):
            flash_attn_func(*(torch.zeros(1, 2, 4, 64).half() for _ in range(3)), qv=torch.zeros(1, 2, 4, 64).half())
    assert fake is None or not fake.launches


def test_the_signature_of_xqa():
    inputs = good_calls.mla("trtllm_batch_decode_with_kv_cache_mla")
    want = wrappers.trtllm_batch_decode_with_kv_cache_mla(**inputs)
    assert torch.equal(wrappers.xqa_batch_decode_with_kv_cache_mla(**inputs), want)
    positions = [*inputs.values()][:9]
    assert torch.equal(wrappers.xqa_batch_decode_with_kv_cache_mla(*positions, None, 0.1), want)
    case = replace(CASES["rows and sinks"], function="xqa")
    i = make(case)
    with emulation() as fake:
        assert error(case, call(case, i), expected(case, i)) <= 1
    assert fake.specs[0].kv.shares_v
