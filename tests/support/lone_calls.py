"""Calls of all public functions with dimensions of size 1, of which the strides address nothing."""

from typing import Any

import torch

import wrappers

BF16, E4M3, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def table(**changes: Any) -> dict[str, Any]:
    """A request with one token and one KV head, in one page of a pool with one page."""
    return dict(
        query=rows(1, 2, 64), kv_cache=(rows(1, 1, 16, 64), rows(1, 1, 16, 64)), workspace_buffer=None,
        block_tables=ints(0)[None], seq_lens=ints(9), bmm1_scale=torch.tensor([0.2]), bmm2_scale=torch.tensor([0.5]),
        sinks=torch.ones(2), out=rows(1, 2, 64), lse=torch.zeros(1, 2), return_lse=True,
    ) | changes  # fmt: skip


def packed(**changes: Any) -> dict[str, Any]:
    codes, factors = wrappers.nvfp4_quantize(rows(1, 1, 16, 64))
    return table(kv_cache=(codes, codes), kv_cache_sf=(factors, factors)) | changes


DECODE, CONTEXT = {"max_seq_len": None}, {
    "max_q_len": 1, "max_kv_len": None, "batch_size": 1, "cum_seq_lens_q": ints(0, 1), "cum_seq_lens_kv": None,
}  # fmt: skip
POOL = rows(1, 16, 1, 64)
CALLS: dict[str, tuple[Any, Any]] = {
    "decode": (wrappers.trtllm_batch_decode_with_kv_cache, lambda: table(**DECODE)),
    "decode, nvfp4": (wrappers.trtllm_batch_decode_with_kv_cache, lambda: packed(**DECODE)),
    "context": (wrappers.trtllm_batch_context_with_kv_cache, lambda: table(**CONTEXT)),
    "context, one head": (wrappers.trtllm_batch_context_with_kv_cache, lambda: table(**CONTEXT) | dict(
        query=rows(1, 1, 64), sinks=torch.ones(1), out=None, lse=None, alibi_slopes=torch.ones(1))),
    "xqa": (wrappers.xqa, lambda: dict(
        q=rows(1, 1, 2, 64), k_cache=POOL, v_cache=POOL, page_table=ints(0)[None], seq_lens=ints(9)[None],
        output=rows(1, 1, 2, 64), workspace_buffer=None, semaphores=None, num_kv_heads=1, page_size=16)),
    "func": (wrappers.flash_attn_func, lambda: dict(q=rows(1, 1, 2, 64), k=POOL, v=POOL, causal=True)),
    "varlen": (wrappers.flash_attn_varlen_func, lambda: dict(
        q=rows(1, 2, 64), k=rows(1, 1, 64), v=rows(1, 1, 64), cu_seqlens_q=ints(0, 1), cu_seqlens_k=ints(0, 1))),
    "with_kvcache": (wrappers.flash_attn_with_kvcache, lambda: dict(
        q=rows(1, 1, 2, 64), k_cache=POOL.clone(), v_cache=POOL.clone(), k=rows(1, 1, 1, 64), v=rows(1, 1, 1, 64),
        cache_seqlens=ints(9), block_table=ints(0)[None], causal=True)),
    "single prefill": (wrappers.single_prefill_with_kv_cache, lambda: dict(
        q=rows(1, 2, 64), k=rows(1, 1, 64), v=rows(1, 1, 64), causal=True, pos_encoding_mode="ROPE_LLAMA")),
    "single decode": (wrappers.single_decode_with_kv_cache, lambda: dict(
        q=rows(2, 64), k=rows(16, 1, 64), v=rows(16, 1, 64))),
    "append": (wrappers.append_paged_kv_cache, lambda: dict(
        append_key=rows(1, 1, 64), append_value=rows(1, 1, 64), batch_indices=ints(0), positions=ints(3),
        paged_kv_cache=(POOL.clone(), POOL.clone()), kv_indices=ints(0), kv_indptr=ints(0, 1),
        kv_last_page_len=ints(4))),
    "append_qkv": (wrappers.append_qkv, lambda: dict(
        q=rows(1, 1, 64), k=rows(1, 1, 64), v=rows(1, 1, 64),
        cache=wrappers.KVCacheTarget((POOL.to(E4M3), POOL.to(E4M3)), k_scale=torch.tensor([0.5])), places=ints(5),
        rope=wrappers.RotaryEmbedding(ints(0), torch.ones(1, 64)))),
    "append_qkv, int64": (wrappers.append_qkv, lambda: dict(
        q=rows(1, 1, 64), k=rows(1, 1, 64), v=rows(1, 1, 64), cache=wrappers.KVCacheTarget((POOL, POOL.clone())),
        places=torch.tensor([5]), rope=wrappers.RotaryEmbedding(torch.tensor([3]), torch.ones(9, 64)))),
    "append_qkv, lists": (wrappers.append_qkv, lambda: dict(
        q=None, k=rows(1, 1, 64), v=rows(1, 1, 64), cache=wrappers.KVCacheTarget((POOL, POOL.clone())),
        places=wrappers.PageLists(*(t.long() for t in (ints(0), ints(3), ints(0), ints(0, 1)))))),
    "append of nvfp4": (wrappers.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, lambda: dict(
        append_key=rows(1, 1, 64), append_value=rows(1, 1, 64), slot_mapping=torch.tensor([5]),
        paged_kv_cache=tuple(torch.zeros(1, 16, 1, 32, dtype=U8) for _ in "kv"),
        kv_cache_sf=tuple(torch.zeros(1, 16, 1, 4).to(E4M3) for _ in "kv"), k_scale=torch.tensor([0.5]), v_scale=1.0)),
    "rope": (wrappers.apply_rope_pos_ids, lambda: dict(
        q=rows(1, 1, 64), k=rows(1, 1, 64), pos_ids=torch.tensor([3]))),
    "rope of requests": (wrappers.apply_rope, lambda: dict(
        q=rows(1, 1, 64), k=rows(1, 1, 64), indptr=ints(0, 1), offsets=ints(3))),
    "rope by a cache": (wrappers.apply_rope_with_cos_sin_cache, lambda: dict(
        positions=torch.tensor([0]), query=rows(1, 64), key=rows(1, 64), head_size=64,
        cos_sin_cache=torch.ones(1, 64))),
    "drafts": (wrappers.trtllm_batch_decode_with_kv_cache, lambda: table(**DECODE) | dict(
        mask=torch.ones(1, 1, 2, dtype=torch.int16).view(torch.uint16))),
    "quantize": (wrappers.nvfp4_quantize, lambda: dict(x=rows(1, 1, 64), global_scale=torch.tensor([2.0]))),
    "dequantize": (wrappers.nvfp4_dequantize, lambda: dict(zip(
        ("data", "scales"), wrappers.nvfp4_quantize(rows(1, 1, 64))))),
    "merge_state": (wrappers.merge_state, lambda: dict(
        v_a=rows(1, 1, 64), s_a=torch.ones(1, 1), v_b=rows(1, 1, 64), s_b=torch.zeros(1, 1))),
    "merge_states": (wrappers.merge_states, lambda: dict(v=rows(1, 1, 1, 64), s=torch.ones(1, 1, 1))),
    "merge_state_in_place": (wrappers.merge_state_in_place, lambda: dict(
        v=rows(1, 1, 64), s=torch.ones(1, 1), v_other=rows(1, 1, 64), s_other=torch.zeros(1, 1),
        mask=torch.ones(1).byte())),
    "top_k": (wrappers.top_k, lambda: dict(input=torch.randn(1, 64), k=4)),
    "top_k of one": (wrappers.top_k, lambda: dict(input=torch.randn(1, 1), k=1)),
    "page table": (wrappers.top_k_page_table_transform, lambda: dict(
        input=torch.randn(1, 64), src_page_table=torch.arange(64).int()[None], lengths=ints(50), k=4)),
    "ragged": (wrappers.top_k_ragged_transform, lambda: dict(
        input=torch.randn(1, 64), offsets=ints(5), lengths=ints(50), k=1)),
    "per row": (wrappers.top_k_per_row_decode, lambda: dict(
        logits=torch.randn(1, 64), next_n=1, seq_lens=ints(50), indices=torch.zeros(1, 1).int(), num_rows=1, stride0=64,
        stride1=1, top_k=1)),
}  # fmt: skip
