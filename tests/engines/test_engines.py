"""The signatures that engines call on Hopper give what the functions give that they end in."""

from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from tests.support.fake_machine import FakeMachine
from tests.support.flash_attn_batches import SINKS, Batch, oracle
from wrappers import cooperative_topk, persistent_topk
from wrappers import trtllm_fmha_v2_prefill as fmha
from wrappers import xqa_batch_decode_with_kv_cache as xqa_batch
from wrappers.flashinfer import utils
from wrappers.host import machine

PLAIN = replace(cases.EDGE["plain"], q_lens=(1, 3), kv_lens=(9, 40), lse=False)
CASES = {
    "plain": PLAIN,
    "sinks, window": replace(PLAIN, sink=1.0, window_left=5, layout="NHD", uint32_lens=True),
    "e4m3": replace(PLAIN, kv_dtype="fp8"),
    "scales of tensors": replace(PLAIN, device=("scale", "out")),
    "stacked": replace(PLAIN, cache="stacked", layout="NHD"),
}


def as_xqa_batch(inputs):
    """The same call of `xqa_batch_decode_with_kv_cache`."""
    names = """query kv_cache workspace_buffer block_tables seq_lens bmm1_scale bmm2_scale window_left out sinks
        kv_layout"""
    found = {name: inputs[name] for name in names.split()} | {"max_seq_len": 40, "q_len_per_req": inputs["max_q_len"]}
    return found | {"q_cu_seq_lens": inputs["cum_seq_lens_q"], "kv_cache_sf": inputs.get("kv_block_scales")}


def as_fmha(inputs):
    """The same call of `trtllm_fmha_v2_prefill`, of a cache of one tensor."""
    names = """workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale batch_size cum_seq_lens_q
        cum_seq_lens_kv block_tables out sinks window_left"""
    found = {name: inputs[name] for name in names.split()}
    mask = "causal" if inputs["causal"] else "padding"
    found |= {"input_layout": f"Q_PAGED_KV_{inputs['kv_layout']}", "mask_mode": mask}
    return found | {
        "qkv": (inputs["query"], inputs["kv_cache"]), "logits_soft_cap_scale": inputs["logits_soft_cap"],
        "skip_softmax_threshold_scale_factor": 0.0,
    }  # fmt: skip


def as_persistent(inputs):
    """A call of `persistent_topk`, of one of `top_k_ragged_transform`."""
    scores, k = inputs["input"], inputs["k"]
    output = torch.full((len(scores), k), -77, dtype=torch.int32)
    workspace, most = torch.zeros(8, dtype=torch.uint8), scores.shape[1]
    given = {"logits": scores, "lengths": inputs["lengths"], "output": output, "workspace": workspace}
    return given | {"k": k, "max_seq_len": most}


def context(inputs):
    return wrappers.trtllm_batch_context_with_kv_cache(**inputs | {"out": None, "out_dtype": torch.bfloat16})


@pytest.mark.parametrize("name", CASES)
def test_decode_as_vllm_calls_it(name):
    inputs = cases.make_inputs(CASES[name])
    want = context(inputs)
    found = xqa_batch(**as_xqa_batch(inputs))
    assert found is inputs["out"]
    torch.testing.assert_close(found, want)
    equal = cases.make_inputs(replace(CASES[name], q_lens=(2, 2)))
    want = context(equal)
    given = as_xqa_batch(equal) | {"q_cu_seq_lens": None, "out": None}
    torch.testing.assert_close(xqa_batch(**given), want)
    mask = torch.tensor([[[1, 0], [3, 0]]] * 2).to(torch.uint16)
    torch.testing.assert_close(xqa_batch(**given, mask=mask), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode_of_vllm_in_float64(layout):
    """K and V in one tensor's last dimension, tables padded with 0, padded requests of length 0; then drafts, ragged
    with an empty request, that see each other or not."""
    batch = Batch(q_lens=(1, 1, 1), kv_lens=(9, 0, 40), page=16)
    pool = torch.cat([t.transpose(1, 2) for t in batch.paged], -1)  # (blocks, Hkv, N, 2 D)
    caches = (pool if layout == "HND" else pool.transpose(1, 2)).split(64, dim=-1)
    given = {"kv_cache": caches, "kv_cache_sf": None, "workspace_buffer": None, "kv_layout": layout, "sinks": SINKS}
    given |= {"block_tables": batch.table.clamp(min=0), "seq_lens": batch.lens, "max_seq_len": 40, "bmm1_scale": 0.2}
    given |= {"bmm2_scale": 2.0, "window_left": 5, "out": torch.empty_like(batch.q)}
    got = xqa_batch(query=batch.q, q_len_per_req=1, mask=None, q_cu_seq_lens=None, **given)
    want = batch.want(causal=True, scale=0.2, window=(5, 0), sinks=SINKS)[0]
    torch.testing.assert_close(got.double(), 2 * want, rtol=2e-3, atol=2e-3)
    drafts = Batch(q_lens=(3, 0, 2), kv_lens=(9, 0, 40), page=16)
    given |= {"out": None, "window_left": -1, "q_len_per_req": 3, "q_cu_seq_lens": drafts.q_starts}
    for bits, causal in (([1, 3, 7, 1, 3], True), ([7, 7, 7, 3, 3], False)):
        mask = torch.tensor([[word, 0] for word in bits]).to(torch.uint16)
        got = xqa_batch(query=drafts.q, mask=mask, **given)
        for q, k, v, o in zip(*(t.split(n) for t, n in ((drafts.q, drafts.q_lens), (batch.k, batch.kv_lens),
                                                        (batch.v, batch.kv_lens), (got, drafts.q_lens)))):  # fmt: skip
            want = oracle(q, k, v, causal=causal, scale=0.2, sinks=SINKS)[0]
            torch.testing.assert_close(o.double(), 2 * want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mask, window", [("causal", -1), ("causal", 4), ("padding", -1)])
def test_prefill_of_sglang_in_float64(layout, mask, window):
    batch = Batch(q_lens=(5, 0, 3), kv_lens=(9, 4, 40), page=16)
    halves = torch.stack(batch.paged if layout == "NHD" else [t.transpose(1, 2) for t in batch.paged]).contiguous()
    table = torch.stack([batch.table, batch.table + len(batch.paged[0])], 1)
    got = fmha(
        (batch.q, tuple(halves)), input_layout=f"Q_PAGED_KV_{layout}", workspace_buffer=None, seq_lens=batch.lens,
        max_q_len=5, max_kv_len=64, bmm1_scale=0.2, bmm2_scale=0.5, batch_size=3, cum_seq_lens_q=batch.q_starts,
        cum_seq_lens_kv=batch.k_starts, block_tables=table, out=None, out_dtype=torch.float16, mask_mode=mask,
        window_left=window, sinks=SINKS, skip_softmax_threshold_scale_factor=0.0,
    )  # fmt: skip
    want = batch.want(causal=mask == "causal", scale=0.2, window=(window, -1), sinks=SINKS)[0]
    torch.testing.assert_close(got.double(), want / 2, rtol=2e-3, atol=2e-3)


def test_o_scale_and_layout_of_decode():
    inputs = cases.make_inputs(replace(PLAIN, layout="NHD"))
    given = as_xqa_batch(inputs) | {"bmm2_scale": 0.5, "o_scale": 3.0}
    del given["kv_layout"]
    torch.testing.assert_close(xqa_batch(**given), context(inputs | {"bmm2_scale": 1.5}))


@pytest.mark.parametrize("function,change,error,message", [
    (xqa_batch, {"q_len_per_req": 0}, ValueError, "q_len_per_req: 0, must be at least 1"),
    (xqa_batch, {"q_len_per_req": None}, TypeError, "q_len_per_req: None, must be an int"),
    (xqa_batch, {"q_cu_seq_lens": torch.zeros(4, dtype=torch.int32)}, ValueError, "q_cu_seq_lens: shape .4,., must be"),
    (xqa_batch, {"q_cu_seq_lens": torch.zeros(3, dtype=torch.int64)}, TypeError, "q_cu_seq_lens: dtype torch.int64"),
    (xqa_batch, {"query": None}, TypeError, "query: NoneType, must be"),
    (fmha, {"input_layout": "PACKED_QKV"}, NotImplementedError, "input_layout: 'PACKED_QKV', not supported"),
    (fmha, {"input_layout": "NHD"}, KeyError, "input_layout: 'NHD', must be one of Q_PAGED_KV_NHD, Q_PAGED_KV_HND"),
    (fmha, {"mask_mode": "full"}, ValueError, "mask_mode: 'full', must be one of causal"),
    (fmha, {"mask_mode": "chunked"}, NotImplementedError, "mask_mode: 'chunked', not supported"),
    (fmha, {"mask_mode": "PADDING", "window_left": 3}, ValueError, "window_left: 3, must be negative if mask_mode"),
    (fmha, {"chunked_attention_size": 64}, NotImplementedError, "chunked_attention_size: 64, not supported"),
    (fmha, {"pos_encoding_mode": "alibi"}, NotImplementedError, "pos_encoding_mode: 'alibi', not supported"),
    (fmha, {"pos_encoding_mode": "rope"}, KeyError, "pos_encoding_mode: 'rope'"),
    (fmha, {"save_softmax_stats": True}, NotImplementedError, "save_softmax_stats: True, not supported"),
    (fmha, {"qkv": None}, TypeError, "qkv: NoneType, must be .query, kv_cache."),
    (fmha, {"qkv": (1, 2, 3)}, TypeError, "qkv: a tuple of 3, must be .query, kv_cache."),
    (fmha, {"block_tables": None}, TypeError, "block_tables: NoneType, must be a torch.Tensor"),
    (fmha, {"block_tables": torch.zeros(2, 2, 3, dtype=torch.int32)}, ValueError, "block_tables: .* 2 dimensions"),
    (fmha, {"sinks": []}, ValueError, "sinks: a list of 0, must hold one tensor"),
    (fmha, {"logits_soft_cap_scale": "3"}, TypeError, "logits_soft_cap_scale: '3', must be a float"),
    (fmha, {"logits_soft_cap_scale": -1.0}, ValueError, "logits_soft_cap_scale: -1.0, must be None, 0 \\(off\\) or"),
])  # fmt: skip
def test_bad_calls(function, change, error, message):
    inputs = cases.make_inputs(replace(PLAIN, cache="stacked"))
    given = (as_xqa_batch if function is xqa_batch else as_fmha)(inputs)
    function(**given)
    with pytest.raises(error, match=message):
        function(**given | change)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mask,window,change", [
    ("causal", -1, {}), ("causal", 4, {}), ("SLIDING_WINDOW", 4, {}), ("padding", -1, {"causal": False}),
])  # fmt: skip
def test_prefill_of_one_tensor(layout, mask, window, change):
    case = replace(PLAIN, cache="stacked", layout=layout, sink=1.0, soft_cap=5.0, window_left=window)
    inputs = cases.make_inputs(case)
    want = context(inputs | change)
    given = as_fmha(inputs) | {"mask_mode": mask, "window_left": window, "sinks": [inputs["sinks"]]}
    torch.testing.assert_close(fmha(**given), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_prefill_as_sglang_calls_it(launched, layout):
    """K and V are halves of one allocation; the entries of V count from K's base."""
    inputs = cases.make_inputs(replace(PLAIN, layout=layout))
    k, v = inputs["kv_cache"]
    pages, gap = k.shape[0], 2
    whole = torch.full((2 * pages + gap, *k.shape[1:]), float("nan"), dtype=k.dtype)
    whole[:pages], whole[pages + gap :] = k, v
    halves, table = (whole[:pages], whole[pages + gap :]), inputs["block_tables"]
    given = as_fmha(inputs) | {
        "qkv": (inputs["query"], halves), "block_tables": torch.stack([table, table + pages + gap], 1),
    }  # fmt: skip
    torch.testing.assert_close(fmha(**given), context(inputs))
    assert launched is None or len(launched) == 2
    memory = whole.view(torch.int16).numpy()  # each half in a storage of its own, as pools that happen to lie so
    apart = tuple(torch.from_numpy(memory[x]).view(k.dtype) for x in (slice(0, pages), slice(pages + gap, None)))
    assert apart[0].untyped_storage()._cdata != apart[1].untyped_storage()._cdata
    torch.testing.assert_close(fmha(**given | {"qkv": (inputs["query"], apart)}), context(inputs))
    for bad, message in (
        ((halves[1], halves[0]), "elements behind K, must be whole pages of [0-9]+ elements behind K"),
        ((k, v.transpose(1, 2)), "must be contiguous"),
        ((k, v[1:]), "must be .*that of K"),
        ((k,), "a kv_cache of 1 tensors, must be .k, v."),
    ):
        with pytest.raises(ValueError, match=message):
            fmha(**given | {"qkv": (inputs["query"], bad)})


def test_names_beside_them():
    assert utils.FP4Tensor is wrappers.FP4Tensor
    assert utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(3, 32, 132) == 544  # 132 SMs, in eights: 136
    assert utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(64, 32, 132) == 8192
    with machine.override(FakeMachine(lambda op, spec: None, "sm_90a", 132)):
        assert utils.get_device_sm_count(torch.device("cpu")) == 132
    with pytest.raises(ValueError, match="device: cpu, must be a CUDA device"):
        utils.get_device_sm_count(torch.device("cpu"))
    with pytest.raises(TypeError, match="device: 'cuda', must be a torch.device"):
        utils.get_device_sm_count("cuda")


# ---- vLLM's indexer


@pytest.mark.parametrize("function", [persistent_topk, cooperative_topk])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_as_vllm_calls_it(function, shape, dtype):
    """Ends of rows in one dimension or two; rows of a wider buffer; what lies behind an end counts for nothing."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 90, generator=draw).to(dtype)[:, :75]
    lens = torch.tensor([0, 3, 5, 75, 41, 1000], dtype=torch.int32)
    for row, n in zip(logits, lens.tolist()):
        row[n:] = float("inf")
    wide = torch.full((6, 9), -77, dtype=torch.int32)
    assert function(logits, lens.view(shape), wide[:, 2:7], torch.zeros(4, dtype=torch.uint8), 5, 75) is None
    for row, found, n in zip(logits.tolist(), wide.tolist(), lens.clamp(max=75).tolist()):
        order = sorted(range(n), key=lambda i, row=row: (-row[i], i))[:5]
        assert found == [-77] * 2 + (sorted(order) + [-1] * 5)[:5] + [-77] * 2
    spread = torch.stack([lens, lens * 0], 1)[:, :1]  # with gaps
    other = torch.zeros(6, 5, dtype=torch.int32)
    function(logits=logits, lengths=spread, output=other, workspace=None, k=5, max_seq_len=0)
    assert torch.equal(other, wide[:, 2:7])


@pytest.mark.parametrize("function", [persistent_topk, cooperative_topk])
@pytest.mark.parametrize("change,error,message", [
    ({"logits": torch.zeros(3)}, ValueError, "logits: shape .3,., must have 2 dimensions"),
    ({"logits": torch.zeros(3, 9).double()}, TypeError, "logits: dtype torch.float64"),
    ({"lengths": torch.ones(2, dtype=torch.int32)}, ValueError, "lengths: shape .2,., must be .3,. .one per row."),
    ({"lengths": torch.ones(2, 3, dtype=torch.int32)}, ValueError, "lengths: shape .6,., must be .3,."),
    ({"lengths": torch.ones(3)}, TypeError, "lengths: dtype torch.float32"),
    ({"lengths": None}, TypeError, "lengths: NoneType, must be a torch.Tensor"),
    ({"output": None}, TypeError, "output: NoneType, must be a torch.Tensor"),
    ({"output": torch.zeros(3, 4, dtype=torch.int32)}, ValueError, "output: shape .3, 4., must be .3, 5."),
    ({"output": torch.zeros(3, 5, dtype=torch.int64)}, TypeError, "output: dtype torch.int64"),
    ({"k": 0}, ValueError, "k: 0, must be at least 1"), ({"k": 5.0}, TypeError, "k: 5.0, must be an int"),
    ({"max_seq_len": -1}, ValueError, "max_seq_len: -1"), ({"max_seq_len": None}, TypeError, "max_seq_len: None"),
    ({"workspace": 8}, TypeError, "workspace: int, must be a torch.Tensor"),
])  # fmt: skip
def test_bad_calls_of_topk(function, change, error, message):
    output = torch.full((3, 5), -77, dtype=torch.int32)
    given = {"logits": torch.zeros(3, 9), "lengths": torch.ones(3, dtype=torch.int32), "output": output, "k": 5}
    given |= {"workspace": None, "max_seq_len": 9}
    with pytest.raises(error, match=f"^{message}"):
        function(**given | change)
    assert (output == -77).all()
    function(**given)
