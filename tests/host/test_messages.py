"""Messages that say what to do: swapped layouts, shapes as the caller gave them, one allowed value, what is missing."""

import re

import pytest
import torch

import wrappers
from wrappers.host import machine, runtime

HALF = torch.float16


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


Q, HND, NHD = (torch.zeros(shape, dtype=HALF) for shape in ((2, 8, 64), (5, 2, 16, 64), (5, 16, 2, 64)))
TABLE, WRONG_TABLE, LENS, STARTS = (
    ints(2, 0, 1, 3).view(2, 2),
    torch.zeros(3, 2, dtype=torch.int32),
    ints(20, 9),
    ints(0, 1, 2),
)
ROWS = torch.zeros(2, 2, 64, dtype=HALF)
SWAPPED = r"heads and rows look swapped \(16 and 2\): check "
DRAFTS = torch.zeros(2, 3, 2).to(torch.uint16)


def decode(q=Q, cache=(HND, HND), table=TABLE, lens=LENS, **options):
    return wrappers.trtllm_batch_decode_with_kv_cache(q, cache, None, table, lens, None, 0.1, **options)


def context(cache=(HND, HND), table=TABLE, **options):
    given = Q, cache, None, table, LENS, 1, None, 0.1, 1.0, 2, STARTS, None
    return wrappers.trtllm_batch_context_with_kv_cache(*given, **options)


def xqa(cache, table=TABLE):
    q = torch.zeros(2, 1, 8, 64, dtype=HALF)
    return wrappers.xqa(q, cache, cache, table, LENS[:, None], torch.empty_like(q), None, None, 2, 16)


def cached(cache, table=TABLE):
    q = torch.zeros(2, 1, 8, 64, dtype=HALF)
    return wrappers.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=LENS, block_table=table)


def planned(layout, cache):
    wrapper = wrappers.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), layout)
    wrapper.plan(STARTS, ints(0, 2, 3), ints(2, 0, 1), ints(4, 9), 8, 2, 64, 16, causal=True)
    return wrapper.run(Q, (cache, cache))


def append(layout, cache):
    pages = ints(0, 1), ints(0, 1, 2), ints(4, 4)
    return wrappers.append_paged_kv_cache(ROWS, ROWS, ints(0, 1), ints(3, 3), (cache, cache), *pages, layout)


CASES = {  # name -> (call, error, message)
    "decode, HND": (lambda: decode(cache=(NHD, NHD)), ValueError, f"^query: 8 heads, .* 16; {SWAPPED}kv_layout$"),
    "decode, NHD": (lambda: decode(kv_layout="NHD"), ValueError, f"^query: 8 heads, .* 16; {SWAPPED}kv_layout$"),
    "decode, one tensor": (lambda: decode(cache=torch.stack([NHD, NHD], 1)), ValueError, f"{SWAPPED}kv_layout$"),
    "context": (lambda: context(cache=(NHD, NHD)), ValueError, f"^query: 8 heads, .* 16; {SWAPPED}kv_layout$"),
    "xqa": (lambda: xqa(HND), ValueError, r"^k_cache: shape \(5, 2, 16, 64\), must be .* \(kv_layout NHD, page_size"),
    "flash-attention": (
        lambda: cached(HND),
        ValueError,
        rf"^q: 8 heads, .* 16; {SWAPPED}the order \(\.\.\., rows, heads,",
    ),
    "wrapper, NHD": (
        lambda: planned("NHD", HND),
        ValueError,
        f"^paged_kv_cache: 16 .heads., .* 2; {SWAPPED}kv_layout$",
    ),
    "wrapper, HND": (
        lambda: planned("HND", NHD),
        ValueError,
        f"^paged_kv_cache: 16 .heads., .* 2; {SWAPPED}kv_layout$",
    ),
    "append, NHD": (lambda: append("NHD", HND), ValueError, f"^append_key: shape .*; {SWAPPED}kv_layout"),
    "append, HND": (lambda: append("HND", NHD), ValueError, f"^append_key: shape .*; {SWAPPED}kv_layout"),
    "append_qkv": (
        lambda: wrappers.append_qkv(None, ROWS, ROWS, wrappers.KVCacheTarget((HND, HND)), LENS),
        ValueError,
        f"^k: shape .*; {SWAPPED}cache.layout",
    ),
    "heads that are no rows": (lambda: decode(torch.zeros(2, 3, 64).half()), ValueError, "multiple of kv_cache's 2$"),
    "a shared table": (
        lambda: decode(table=WRONG_TABLE),
        ValueError,
        r"^block_tables: shape \(3, 2\), must be \(2, 2\) \(requests, pages\)$",
    ),
    "a shared table of prompts": (
        lambda: context(table=WRONG_TABLE),
        ValueError,
        r"^block_tables: shape \(3, 2\), must be \(2",
    ),
    "a table of xqa": (lambda: xqa(NHD, WRONG_TABLE), ValueError, r"^page_table: shape \(3, 2\), must be \(2, 2\)"),
    "a table of flash-attention": (
        lambda: cached(NHD, WRONG_TABLE),
        ValueError,
        r"^block_table: shape \(3, 2\), must be \(2, 2\)",
    ),
    "a table of K and V": (
        lambda: decode(table=WRONG_TABLE[:, None].repeat(1, 2, 1), uses_shared_paged_kv_idx=False),
        ValueError,
        r"^block_tables: shape \(3, 2, 2\), must be \(2, 2, 2\) \(requests, K and V, pages\)$",
    ),
    "one dtype": (
        lambda: decode(table=TABLE.long()),
        TypeError,
        "^block_tables: dtype torch.int64, must be torch.int32$",
    ),
    "one dtype of top-k": (
        lambda: wrappers.top_k_page_table_transform(torch.zeros(2, 4), TABLE, LENS.long(), 2),
        TypeError,
        "^lengths: dtype torch.int64, must be torch.int32$",
    ),
    "two dtypes": (
        lambda: decode(lens=LENS.long()),
        TypeError,
        "^seq_lens: .*, must be one of torch.int32, torch.uint32$",
    ),
    "tokens": (
        lambda: decode(torch.zeros(6, 8, 64).half()),
        ValueError,
        r"^query: 6 tokens, must be 2 x 1 \(seq_lens, q_len_per_req\); pass q_len_per_req=3$",
    ),
    "tokens of no length": (
        lambda: decode(torch.zeros(5, 8, 64).half()),
        ValueError,
        "must be 2 x 1 .seq_lens, q_len_per_req.$",
    ),
    "drafts": (
        lambda: decode(torch.zeros(6, 8, 64).half(), mask=DRAFTS),
        ValueError,
        r"^mask: shape \(2, 3, 2\), must be \(2, 1, 2\) .*\); pass q_len_per_req=3$",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_messages(name):
    call, error, message = CASES[name]
    with pytest.raises(error) as found:
        call()
    assert re.search(message, str(found.value)), str(found.value)


def test_no_hint_where_nothing_is_swapped():
    """With pages of one row, of as many rows as heads, of K and V without pages, and where the counts do not fit."""
    one, few = torch.zeros(5, 5, 1, 64).half(), torch.zeros(2, 4, 4, 64).half()
    rows, q = torch.zeros(3, 4, 64).half(), torch.zeros(3, 6, 64).half()
    append = torch.zeros(2, 8, 64).half()
    for call in (
        lambda: decode(cache=(one, one)), lambda: wrappers.single_prefill_with_kv_cache(q, rows, rows),
        lambda: wrappers.append_qkv(None, append, append, wrappers.KVCacheTarget((few, few)), LENS),
    ):  # fmt: skip
        with pytest.raises(ValueError) as found:
            call()
        assert "heads" in str(found.value) and "swapped" not in str(found.value)


def test_an_output_that_a_launch_refuses_is_named(here):
    """The quick test of a planned call and the checks are two statements; either has a whole message."""
    out, wide = torch.empty_like(Q), torch.zeros(2, 16, 64, dtype=HALF)
    decode(out=out)
    for bad in (
        torch.zeros(3, 8, 64, dtype=HALF),
        torch.zeros(1, 8, 64, dtype=HALF).expand(2, 8, 64),
        Q,
        wide[:, ::2, :32],
    ):
        with pytest.raises(ValueError, match="^out: .*must"):
            decode(out=bad)
    layer = wrappers.bind(wrappers.trtllm_batch_decode_with_kv_cache, Q, (HND, HND), None, TABLE, LENS, None, 0.1)
    for bad in (torch.zeros(3, 8, 64, dtype=HALF), Q):
        with pytest.raises(ValueError, match="^out: .*must"):
            layer.run(Q, bad)
    assert len(here.launches) == 1


def test_a_refusal_says_all_if_the_checks_find_nothing(here, monkeypatch):
    """If the quick test refuses what the checks accept, the message is still the argument's, not a word of the code."""
    from wrappers.attention import plan

    decode(out=torch.empty_like(Q))
    monkeypatch.setattr(plan.overlap, "overlap", lambda a, b: True)
    monkeypatch.setattr(plan.checks, "validate", lambda call: None)
    both = torch.zeros(4, 8, 64, dtype=HALF)
    inside = both.view(torch.float32).view(-1)[:16].view(2, 8)
    for given, name in (({"out": both[1:3]}, "out"), ({"lse": inside, "return_lse": True}, "lse")):
        with pytest.raises(
            ValueError, match=rf"^{name}: shape \(2, 8.*, strides .*, must be of shape .*, and must not over"
        ):
            decode(both[:2], **given)


def test_a_missing_kernel_names_both_commands(monkeypatch):
    """First the one that builds all; and how to get the compiler, which no index has under this project's name."""
    spec = next(spec for op, spec in runtime.catalog.shipped("sm_90a") if op == "topk.radix")
    said = runtime._missing("topk.radix", spec, "sm_90a").splitlines()
    assert said[-2].endswith("shipped: python -m cute_kernels build --arch sm_90a")
    assert f"to build this one: python -m cute_kernels build --arch sm_90a --only topk.radix/{spec.name}" in said[-1]
    monkeypatch.setattr(runtime.paths, "has_dsl", lambda: False)
    last = runtime._missing("topk.radix", spec, "sm_90a").splitlines()[-1]
    assert "nvidia-cutlass-dsl, the compiler, is not installed: run pip install 'nvidia-cutlass-dsl[cu13]>=4.8" in last
    assert machine.current.counter_pools is not None
