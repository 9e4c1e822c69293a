"""Calls without query rows: an empty output, and the keys that are given are appended, on the CPU and by kernels."""

import pytest
import torch

import wrappers
from tests.support import good_calls
from wrappers import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

LENS = (3, 4)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(batch=2, rows=0):
    """Queries (B, rows, 4, 64), and a cache of 9 rows for each request, of zeros."""
    return torch.zeros(batch, rows, 4, 64).half(), torch.zeros(2, batch, 9, 2, 64).half()


def appended(cache, new):
    """Whether a cache of zeros holds the new rows behind LENS, and nothing else."""
    want = torch.zeros_like(cache)
    for request, length in enumerate(LENS):
        want[:, request, length : length + new.shape[1]] = new[request]
    return torch.equal(cache, want)


@pytest.mark.parametrize(
    "form", ["equal", "packed", "packed, most 0", "table", "leftpad", "rotary", "rotary, full", "given out"]
)
def test_keys_are_appended_without_queries(launched, form):
    q, cache = inputs()
    new = torch.randn(2, 2, 2, 64).half()
    given = {"cache_seqlens": ints(*LENS), "return_lse": True, "causal": True}
    if form.startswith("packed"):
        q = q.flatten(0, 1)
        given |= {"cu_seqlens_q": ints(0, 0, 0)} | ({"max_seqlen_q": 0} if "most" in form else {})
    elif form == "table":
        given["block_table"] = ints(0, 1)[:, None]
    elif form == "leftpad":
        given["cache_leftpad"] = ints(0, 1)
    elif form.startswith("rotary"):
        given |= {"rotary_cos": torch.ones(9, 16).half(), "rotary_sin": torch.zeros(9, 16).half()}
        given["causal"] = form == "rotary"  # without queries, none stands at the position of another one
    elif form == "given out":
        given["out"] = torch.empty_like(q)
    out, lse = flash_attn_with_kvcache(q, *cache, new, new, **given)
    assert out.shape == q.shape and out.dtype == q.dtype and (form != "given out" or out is given["out"])
    assert lse.shape == ((4, 0) if form.startswith("packed") else (2, 4, 0)) and lse.dtype == torch.float32
    assert appended(cache, new)
    if launched is not None:
        assert all(hasattr(a, "keys") and "k_cache" in a for a in launched), "attention launches nothing"


@pytest.mark.parametrize(("batch", "rows"), [(2, 0), (0, 0), (0, 3)])
def test_functions_of_flash_attention(launched, batch, rows):
    q, cache = inputs(batch, rows)
    assert flash_attn_func(q, *cache, causal=True).shape == q.shape
    out, lse = flash_attn_func(q, *cache, return_softmax_lse=True, out=torch.empty_like(q))
    assert out.shape == q.shape and lse.shape == (batch, 4, rows)
    assert flash_attn_with_kvcache(q, *cache, cache_seqlens=ints(*LENS[:batch])).shape == q.shape
    flat, starts = q.flatten(0, 1), torch.zeros(batch + 1, dtype=torch.int32)
    for most in (0, 3, None):
        keys = cache.flatten(1, 2)
        assert flash_attn_varlen_func(flat, *keys, starts, starts * 9, most, 9, causal=True).shape == flat.shape
    assert not launched


def test_bad_calls_without_queries_are_refused():
    q, cache = inputs()
    new = torch.zeros(2, 2, 2, 64).half()
    for function, change, text in (
        (flash_attn_func, {"k": cache[0].float()}, "^k, v: K is torch.float32"),
        (flash_attn_func, {"v": cache[1, :1]}, "^v: shape"),
        (flash_attn_with_kvcache, {"cache_seqlens": ints(1, 2, 3)}, "^cache_seqlens: shape"),
        (flash_attn_with_kvcache, {"cache_seqlens": ints(1, 2), "k": new.float(), "v": new}, "^k: dtype torch.float32"),
    ):
        names = ("k", "v") if function is flash_attn_func else ("k_cache", "v_cache")
        with pytest.raises((TypeError, ValueError), match=text):
            function(**{"q": q, **dict(zip(names, cache))} | change)


def test_other_functions(launched):
    cache, table, lens = torch.randn(3, 2, 2, 16, 64).half(), ints(2, 0, 1, -1).view(2, 2), ints(20, 9)
    none, offsets = torch.zeros(0, 8, 64).half(), ints(0, 0, 0)
    context, decode = wrappers.trtllm_batch_context_with_kv_cache, wrappers.trtllm_batch_decode_with_kv_cache
    for most in (0, 5):
        assert context(none, cache, None, table, lens, most, None, 0.1, 1.0, 2, offsets, None).shape == none.shape
        assert decode(none, cache, None, table, lens, None, cum_seq_lens_q=offsets, max_q_len=most).shape == none.shape
    assert decode(none, cache, None, table[:0], lens[:0], None).shape == none.shape
    ragged, given = wrappers.trtllm_ragged_attention_deepseek, good_calls.inputs_of("trtllm_ragged_attention_deepseek")
    given |= {"query": given["query"][:0], "cum_seq_lens_q": ints(0, 0, 0), "out": None, "lse": None}
    assert ragged(**given).shape == (0, 4, 64)
    rows = torch.randn(9, 2, 64).half()
    assert wrappers.single_prefill_with_kv_cache(none, rows, rows, causal=True).shape == none.shape
    paged, other = (
        getattr(wrappers, f"BatchPrefillWith{form}KVCacheWrapper")(torch.empty(0), layout)
        for form, layout in (("Paged", "HND"), ("Ragged", "NHD"))
    )
    paged.plan(offsets, ints(0, 2, 3), ints(2, 0, 1), ints(4, 9), 8, 2, 64, 16, causal=True)
    other.plan(offsets, ints(0, 4, 9), 8, 2, 64, causal=True)
    assert paged.run(none, cache).shape == other.run(none, rows, rows).shape == none.shape
    assert not launched


# ---- keys that rows choose


@pytest.mark.parametrize(("batch", "rows"), [(2, 0), (0, 0), (0, 3)])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_flash_mla_with_chosen_keys(launched, batch, rows, counted, second):
    q, cache = torch.zeros(batch, rows, 8, 576).bfloat16(), torch.ones(4, 16, 1, 576).bfloat16()
    slots, lens = torch.zeros(batch, rows, 7).int(), torch.ones(batch).int() if counted else None
    extra = {"extra_k_cache": cache, "extra_indices_in_kvcache": slots, "extra_topk_length": lens} if second else {}
    out, lse = wrappers.flash_mla_with_kvcache(q, cache, None, None, 512, indices=slots, topk_length=lens, **extra)
    assert out.shape == (batch, rows, 8, 512) and out.dtype == q.dtype
    assert lse.shape == (batch, 8, rows) and lse.dtype == torch.float32
    trtllm = wrappers.trtllm_batch_decode_with_kv_cache_mla
    own = {"seq_lens": lens, "max_seq_len": 64, "sparse_mla_top_k": 7, "return_lse": True}
    found, lse = trtllm(q, cache.transpose(1, 2), None, 128, 512, 64, slots, **own)
    assert found.shape == out.shape and found.dtype == q.dtype and lse.shape == (batch * rows, 8)
    own |= {"cum_seq_lens_q": torch.zeros(batch + 1).int(), "max_q_len": rows or 1}
    flat, lse = trtllm(q.flatten(0, 1), cache.transpose(1, 2), None, 128, 512, 64, slots.flatten(0, 1), **own)
    assert flat.shape == (0, 8, 512) and lse.shape == (0, 8)
    assert not launched


@pytest.mark.parametrize("function", ["flash_mla_sparse_fwd", "dsa_sparse_attention", "dsa_sparse_attention_varlen"])
@pytest.mark.parametrize("counted", [False, True])
def test_prompts_with_chosen_keys(launched, function, counted):
    given = good_calls.inputs_of(function) | {"topk_length": ints() if counted else None}
    for name in ("q", "indices", "q_latent", "q_rope", "gather_kv_indices"):
        given |= {name: given[name][:0]} if name in given else {}
    given |= {"return_lse": True} if function != "flash_mla_sparse_fwd" else {}
    forms = [{}]
    if function.endswith("varlen"):
        ends = "cu_seqlens_q", "cu_seqlens_k"
        forms = [dict(zip(ends, (ints(0, 0, 0), ints(0, 11, 40)))), dict.fromkeys(ends, ints(0))]
    for form in forms:
        out, *rest = getattr(wrappers, function)(**given | form)
        assert out.shape == (0, 8, 512) and out.dtype == torch.bfloat16
        assert all(t.shape == (0, 8) and t.dtype == torch.float32 for t in rest) and rest
    assert not launched


@pytest.mark.parametrize("rows", [0, 3])
def test_selections(launched, rows):
    given = good_calls.inputs_of("select_slots")
    none = {name: given[name][:0] for name in ("weights", "context_lens", "block_table")}
    out = torch.zeros(0, rows, 16).int()
    for change in ({}, {"out": out}):
        found = wrappers.select_slots(**given | none | {"q": given["q"][:0, :rows]} | change)
        assert found.shape == out.shape and found.dtype == torch.int32
    given = good_calls.inputs_of("select_rows")
    names = "q", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end"
    assert wrappers.select_rows(**given | {name: given[name][:0] for name in names}).shape == (0, 16)
    given = good_calls.inputs_of("dsa_indexer_topk")
    given |= {name: given[name][:0] for name in ("q", "w")}
    for ends in ((ints(0, 0, 0), ints(0, 11, 40)), (ints(0), ints(0))):
        slots, scores = wrappers.dsa_indexer_topk(**given | dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends)))
        assert slots.shape == scores.shape == (0, 16) and (slots.dtype, scores.dtype) == (torch.int32, torch.float32)
    assert not launched


@pytest.mark.parametrize("function", good_calls.LOGITS)
def test_logits(launched, function):
    given = good_calls.inputs_of(function)
    names = "weights", "context_lens", "block_table", "cu_seq_len_k_start", "cu_seq_len_k_end"
    none = {name: given[name][:0] for name in names if name in given}
    q = given["q"][:0] if isinstance(given["q"], torch.Tensor) else (given["q"][0][:0], *given["q"][1:])
    found = getattr(wrappers, function)(**given | none | {"q": q})
    assert found.shape == (0, 43 if "paged" in function else 40) and found.dtype == torch.float32
    assert not launched
