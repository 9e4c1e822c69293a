"""Calls without query rows: an empty output, and the keys that are given are appended, on the CPU and by kernels."""

import pytest
import torch

import wrappers
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
    rows = torch.randn(9, 2, 64).half()
    assert wrappers.single_prefill_with_kv_cache(none, rows, rows, causal=True).shape == none.shape
    paged, ragged = (
        getattr(wrappers, f"BatchPrefillWith{form}KVCacheWrapper")(torch.empty(0), layout)
        for form, layout in (("Paged", "HND"), ("Ragged", "NHD"))
    )
    paged.plan(offsets, ints(0, 2, 3), ints(2, 0, 1), ints(4, 9), 8, 2, 64, 16, causal=True)
    ragged.plan(offsets, ints(0, 4, 9), 8, 2, 64, causal=True)
    assert paged.run(none, cache).shape == ragged.run(none, rows, rows).shape == none.shape
    assert not launched
