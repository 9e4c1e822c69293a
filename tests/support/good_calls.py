"""A good call of every public function in `wrappers.own.registry`, through which many tests find it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.cases import attention as cases
from bench.cases import indexer as indexer_cases
from bench.cases import mla as mla_cases
from bench.cases import topk as topk_cases
from bench.cases.indexer import PAGED, PAGED_FP4, RAGGED, RAGGED_FP4, LogitsCase
from tests.attention.test_decode_wrapper import xqa_inputs
from tests.engines.test_engines import as_fmha, as_persistent, as_xqa_batch
from tests.support import rope_calls
from tests.support.flash_attn_batches import good_call
from wrappers import KVCacheTarget, LatentCache
from wrappers.own.registry import FUNCTIONS

NAMES = [row.name for row in FUNCTIONS if row.make is not None]  # functions with a kernel
BOUND = [row.name for row in FUNCTIONS if row.make is not None and row.binds]
PLAIN = replace(cases.EDGE["plain"], q_lens=(1, 2), kv_lens=(9, 40))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def appended(function: str) -> dict[str, Any]:
    """Arguments of a function that appends three rows to a cache of six pages of four rows."""
    rows = torch.ones(3, 2, 16).bfloat16()
    if function == "append_qkv":
        q, cache = torch.ones(3, 4, 16).bfloat16(), KVCacheTarget(torch.zeros(6, 2, 4, 2, 16).bfloat16())
        return {"q": q, "k": rows, "v": rows.clone(), "cache": cache, "places": ints(5, -1, 9)}
    given = {"append_key": rows, "append_value": rows.clone()}
    if function.endswith("slot_mapping"):
        given["slot_mapping"] = ints(5, -1, 9)
    else:
        given |= {"batch_indices": ints(0, 2, 2), "positions": ints(6, 7, 8), "kv_indices": ints(0, 1, 2, 3, 4),
                  "kv_indptr": ints(0, 2, 2, 5), "kv_last_page_len": ints(3, 0, 1)}  # fmt: skip
    if function == "append_paged_kv_cache":
        return given | {"paged_kv_cache": torch.zeros(6, 2, 4, 2, 16).bfloat16()}
    codes, factors = (torch.zeros(6, 2, 4, 2, n, dtype=torch.uint8) for n in (8, 1))
    return given | {"paged_kv_cache": codes, "kv_cache_sf": factors, "k_scale": 0.5, "v_scale": 2.0}


def single(tokens: slice | int) -> dict[str, Any]:
    """Queries, keys and values of one request."""
    q, k, v = torch.randn(3, 40, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    return {"q": q[tokens], "k": k[:, :2], "v": v[:, :2]}


def mla(function: str) -> dict[str, Any]:
    """Two requests of two rows over a latent cache, for a function that attends to it."""
    case = mla_cases.MlaCase(lens=(9, 40), rows=2, heads=4, page_size=16)
    made = mla_cases.make(case)
    cache, table = made.cache.nan_to_num(1.0), made.table.clamp(0, len(made.cache) - 1)
    if function == "flash_mla_with_kvcache":
        return {"q": made.q, "k_cache": cache.unsqueeze(2), "block_table": table, "cache_seqlens": made.lens,
                "head_dim_v": 512, "softmax_scale": 0.1, "causal": True}  # fmt: skip
    return {"query": made.q, "kv_cache": cache, "workspace_buffer": None, "qk_nope_head_dim": 128,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "block_tables": table, "seq_lens": made.lens,
            "max_seq_len": 48, "bmm1_scale": 0.1, "bmm2_scale": 1.0}  # fmt: skip


def sparse_fwd() -> dict[str, Any]:
    """Five tokens that have chosen rows of latent attention."""
    gen = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(*shape, generator=gen).bfloat16() for shape in ((5, 8, 576), (40, 1, 576)))
    rows = torch.randint(-3, 44, (5, 1, 16), generator=gen).int()
    return {"q": q, "kv": kv, "indices": rows, "sm_scale": 0.1, "attn_sink": torch.zeros(8)}


def dsa(function: str) -> dict[str, Any]:
    """The same in FlashInfer's form; of a varlen function, two documents."""
    given, varlen = sparse_fwd(), function.endswith("varlen")
    q, kv = given["q"], given["kv"][:, 0].contiguous()
    return {
        "q_latent": q[..., :512].contiguous(), "q_rope": q[..., 512:], "kv_latent": kv[:, :512], "k_rope": kv[:, 512:],
        "gather_kv_indices" if varlen else "indices": given["indices"][:, 0],
        **({"cu_seqlens_q": ints(0, 3, 5), "cu_seqlens_k": ints(0, 11, 40)} if varlen else {}),
    }  # fmt: skip


def sparse_paged() -> dict[str, Any]:
    """Three tokens of two KV heads that have chosen keys from six pages of eight rows."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, 64, generator=gen).bfloat16() for shape in ((3, 4), (6, 8, 2), (6, 8, 2)))
    slots = torch.randint(-3, 52, (3, 16), generator=gen).int()
    return {"q": q, "kv_cache": (k, v), "indices": slots, "sinks": torch.zeros(4)}


def ragged_mla() -> dict[str, Any]:
    """Two requests of rows without pages."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, 64, generator=gen).bfloat16() for shape in ((5, 4), (29, 2), (29, 2)))
    return {
        "query": q, "key": k, "value": v, "workspace_buffer": None, "seq_lens": None, "max_q_len": 3,
        "max_kv_len": None, "bmm1_scale": 0.1, "bmm2_scale": 1.0, "o_sf_scale": 1.0, "batch_size": 2,
        "window_left": -1, "cum_seq_lens_q": ints(0, 2, 5), "cum_seq_lens_kv": ints(0, 9, 29), "enable_pdl": None,
        "is_causal": True, "return_lse": False, "out": torch.zeros(5, 4, 64).bfloat16(), "lse": torch.zeros(5, 4),
        "attention_sinks": torch.zeros(4),
    }  # fmt: skip


def states(v: str, s: str) -> dict[str, torch.Tensor]:
    """A state of attention, under these names."""
    return {v: torch.ones(3, 2, 8), s: torch.ones(3, 2)}


def latent(function: str) -> dict[str, Any]:
    """Arguments of a function that writes three rows to a latent cache of six pages of four rows."""
    rows, rotated, slots = torch.ones(3, 512).bfloat16(), torch.ones(3, 64).bfloat16(), torch.tensor([5, -1, 9])
    if function == "append_latent":
        cache = LatentCache(torch.zeros(6, 4, 656, dtype=torch.uint8), "656")
        return {"latent": rows, "rotated": rotated, "cache": cache, "places": slots}
    if function in ("append_paged_mla_kv_cache", "nvfp4_quantize_append_paged_mla_kv_cache"):
        names = "batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"
        lists = appended("append_paged_kv_cache")
        common = {"append_ckv": rows, "append_kpe": rotated} | {name: lists[name] for name in names}
        if function[0] == "a":
            return common | {
                f"{part}_cache": torch.zeros(6, 4, n).bfloat16() for part, n in (("ckv", 512), ("kpe", 64))
            }
        codes, factors = (torch.zeros(6, 4, n, dtype=torch.uint8) for n in (256, 32))
        caches = {"ckv_cache": codes, "ckv_sf_cache": factors.view(torch.float8_e4m3fn)}
        kpe = torch.zeros(6, 4, 64).to(torch.float8_e4m3fn)
        return common | caches | {"kpe_cache": kpe, "ckv_scale": 0.5, "kpe_scale": 0.25}
    if function == "concat_mla_q":
        parts = {"ql_nope": torch.ones(3, 2, 512).bfloat16(), "q_pe": torch.ones(3, 2, 64).bfloat16()}
        return parts | {"q_out": torch.zeros(3, 2, 576).bfloat16()}
    if function == "concat_mla_k":
        parts = {"k_nope": torch.ones(3, 2, 128).bfloat16(), "k_rope": torch.ones(3, 1, 64).bfloat16()}
        return {"k": torch.zeros(3, 2, 192).bfloat16()} | parts
    if function == "indexer_k_quant_and_cache":
        cache = torch.zeros(6, 4, 132, dtype=torch.uint8)
        return {"k": torch.ones(3, 128).bfloat16(), "kv_cache": cache, "slot_mapping": slots, "quant_block_size": 128,
                "kv_cache_dtype": "ue8m0"}  # fmt: skip
    cache = torch.zeros(6, 4, 656, dtype=torch.uint8)
    given = {"kv_c": rows, "k_pe": rotated, "kv_cache": cache, "slot_mapping": slots, "kv_cache_dtype": "fp8_ds_mla"}
    if function == "concat_and_cache_mla":
        return given | {"scale": torch.ones(1)}
    return given | {
        "kv_cache_scale": torch.ones(1), "positions": ints(3, 0, 7), "q_pe": torch.ones(3, 2, 64).bfloat16(),
        "cos_sin_cache": torch.ones(9, 64), "is_neox": False,
    }  # fmt: skip


def gathered(function: str) -> dict[str, Any]:
    """Arguments of a function that reads the rows of two requests from a latent cache of six pages of four rows."""
    record = {"cp_gather_indexer_k_quant_cache": 132, "cp_gather_and_upconvert_nvfp4_kv_cache": 352}.get(function, 656)
    cache, table = torch.zeros(6, 4, record, dtype=torch.uint8), ints(3, 0, 5, 1).view(2, 2)
    dst, starts = torch.zeros(7, 576).bfloat16(), ints(0, 5, 7)
    if function == "gather_latent":
        return {"cache": LatentCache(cache, "656"), "block_table": table, "cu_seqlens": starts, "out": dst}
    if record == 132:
        return {"kv_cache": cache, "dst_k": torch.zeros(7, 128).byte(), "dst_scale": torch.zeros(7, 4).byte(),
                "block_table": table, "cu_seq_lens": starts}  # fmt: skip
    given = {"src_cache": cache, "dst": dst, "block_table": table}
    if "upconvert" in function:
        return given | {"workspace_starts": starts[:2].clone(), "batch_size": 2}
    if function == "cp_gather_cache":
        return given | {"dst": torch.zeros(7, 656).byte(), "cu_seq_lens": starts, "batch_size": 2}
    return given | {"cu_seq_lens": starts, "token_to_seq": ints(0, 0, 0, 0, 0, 1, 1), "num_tokens": 7,
                    "kv_cache_dtype": "fp8_ds_mla", "scale": torch.ones(1)}  # fmt: skip


LOGITS = (RAGGED, RAGGED_FP4, PAGED, PAGED_FP4)  # kernels for Hopper alone
SELECT = "select_rows", "select_slots"  # likewise


def logits(function: str) -> dict[str, Any]:
    """Arguments of a function that computes logits: of five tokens, or of two requests of three tokens."""
    paged = "paged" in function
    case = LogitsCase(
        function, (9, 40) if paged else (5, 40), 8, page_size=4 if paged else 64, next_n=3 if paged else 1
    )
    return indexer_cases.make_inputs(case)


def selected(function: str) -> dict[str, Any]:
    """Arguments of a function that chooses 16 keys by their logits."""
    given = logits(RAGGED if function == "select_rows" else PAGED)
    hints = "schedule_meta", "max_context_len", "clean_logits", "max_seqlen_k"
    return {name: value for name, value in given.items() if name not in hints} | {"top_k": 16}


def two_tables() -> dict[str, Any]:
    """Arguments of a function that chooses keys, and names their slots by other pages than theirs."""
    given = selected("select_slots")
    return given | {"slot_table": given["block_table"].flip(1).contiguous()}


SEGMENTS = "dsa_indexer_topk"  # likewise


def segments() -> dict[str, Any]:
    """Five tokens and forty keys in two segments."""
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(*shape, 128, generator=gen).bfloat16() for shape in ((5, 8), (40,)))
    ends = {"cu_seqlens_q": ints(0, 3, 5), "cu_seqlens_k": ints(0, 11, 40)}
    return {"q": q, "k": k, "w": torch.randn(5, 8, generator=gen), **ends, "top_k": 16, "softmax_scale": 0.1}


MLA = "flash_mla_with_kvcache", "trtllm_batch_decode_with_kv_cache_mla"  # kernels for Hopper alone
SPARSE_FWD = "flash_mla_sparse_fwd"  # likewise
DSA = "dsa_sparse_attention", "dsa_sparse_attention_varlen"  # likewise
XQA_MLA = "xqa_batch_decode_with_kv_cache_mla"  # likewise
GATHERS = ("gather_latent", "gather_and_maybe_dequant_cache", "cp_gather_cache",
           "cp_gather_and_upconvert_fp8_kv_cache", "cp_gather_and_upconvert_nvfp4_kv_cache",
           "cp_gather_indexer_k_quant_cache")  # fmt: skip
LATENT = ("append_latent", "append_paged_mla_kv_cache", "concat_and_cache_mla", "concat_and_cache_mla_rope_fused",
          "concat_mla_k", "concat_mla_q", "indexer_k_quant_and_cache",
          "nvfp4_quantize_append_paged_mla_kv_cache")  # fmt: skip
GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "get_seq_lens": lambda: {"kv_indptr": ints(0, 2, 2, 5), "kv_last_page_len": ints(3, 0, 1), "page_size": 4},
    "get_batch_indices_positions": lambda: {
        "append_indptr": ints(0, 2, 2, 5), "seq_lens": ints(3, 0, 1), "nnz": 5,
        "batch_indices": torch.zeros(5, dtype=torch.int32), "positions": torch.zeros(5, dtype=torch.int32)},
    SPARSE_FWD: sparse_fwd,
    "sparse_paged_attention": sparse_paged,
    "trtllm_ragged_attention_deepseek": ragged_mla,
    **{name: partial(dsa, name) for name in DSA},
    "get_paged_mqa_logits_metadata": lambda: {"context_lens": ints(9, 40), "block_kv": 64, "num_sms": 132},
    **{name: partial(logits, name) for name in LOGITS},
    **{name: partial(selected, name) for name in SELECT},
    SEGMENTS: segments,
    "dsa_indexer_topk_workspace_size": lambda: {"num_queries": 5, "num_keys": 40, "num_segments": 2},
    "get_mla_metadata": lambda: {"cache_seqlens": ints(9, 40), "num_q_tokens_per_head_k": 8, "num_heads_k": 1},
    "merge_state": lambda: states("v_a", "s_a") | states("v_b", "s_b"),
    "merge_state_in_place": lambda: states("v", "s") | states("v_other", "s_other") | {"mask": torch.ones(3) > 0},
    "merge_states": lambda: {"v": torch.ones(3, 4, 2, 8), "s": torch.ones(3, 4, 2)},
    "nvfp4_quantize": lambda: {"x": torch.ones(4, 64).bfloat16(), "global_scale": 2.0},
    "nvfp4_dequantize": lambda: {
        "data": torch.ones(4, 32, dtype=torch.uint8), "scales": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "global_scale": 2.0},
    "packbits": lambda: {"x": torch.ones(9), "bitorder": "little"},
    "segment_packbits": lambda: {"x": torch.ones(9), "indptr": ints(0, 4, 9), "bitorder": "little"},
    "single_decode_with_kv_cache": lambda: single(5),
    "single_prefill_with_kv_cache": lambda: single(slice(5)) | {"causal": True},
    "single_prefill_with_kv_cache_return_lse": lambda: single(slice(5)) | {"causal": True},
    "xqa": lambda: xqa_inputs()[0],
}  # fmt: skip


def inputs_of(function: str) -> dict[str, Any]:
    """Keyword arguments of a good call, made anew."""
    if function in GOOD:
        return GOOD[function]()
    if function in rope_calls.NAMES:
        return rope_calls.good_call(function)
    if function in GATHERS:
        return gathered(function)
    if function in LATENT:
        return latent(function)
    if function in (*MLA, XQA_MLA):
        return mla(function)
    if "append" in function:
        return appended(function)
    if function in topk_cases.FUNCTIONS:
        return topk_cases.make_inputs(topk_cases.PLAIN[function])
    if function.startswith("flash_attn"):
        return good_call(function)
    if function in ("persistent_topk", "cooperative_topk"):
        return as_persistent(topk_cases.make_inputs(topk_cases.PLAIN["top_k_ragged_transform"]))
    if function == "trtllm_fmha_v2_prefill":
        return as_fmha(cases.make_inputs(replace(PLAIN, cache="stacked", lse=False)))
    inputs = cases.make_inputs(PLAIN)
    if function == "xqa_batch_decode_with_kv_cache":
        return as_xqa_batch(inputs)
    return inputs if function == "trtllm_batch_context_with_kv_cache" else cases.as_decode(inputs)
