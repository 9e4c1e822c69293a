"""Scripted bad calls: a good call of every public function, in which one argument at a time is replaced by every value
of a list that its kind has. Each is refused on the CPU, on a machine with kernels, and on one that has the good call's
plan: TypeError, ValueError or NotImplementedError, which name the argument in the caller's words, its value and what is
allowed, come without a chain, and leave the bytes of all tensors as they were. What is accepted is listed (`ACCEPTED`).
"""

import inspect
import re
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import wrappers
from bench.cases import attention as cases
from bench.cases import topk as topk_cases
from tests.support import bad_values as shared
from tests.support import good_calls, layout_calls, rope_calls
from tests.support.bad_values import E4M3, HOSTS, KINDS, MISMATCH, NONE, OF_TWO, SIZES, VALUES, not_tensors, tensors_in
from wrappers import fp4
from wrappers.flash_attn import api as flash_attn
from wrappers.own import append_latent
from wrappers.own import append_qkv as cache_write
from wrappers.own.registry import FUNCTIONS

# ---- good calls: name -> (function, arguments)

SMALL = replace(cases.EDGE["plain"], q_lens=(2, 3), kv_lens=(19, 33))
DRAFTS = replace(SMALL, dtype="fp16", layout="NHD", sink=0.0, lse=False, function="xqa", drafts=True)


def attention(case: cases.AttentionCase, function: str, **changes: Any) -> dict[str, Any]:
    return cases.FUNCTIONS[function][1](case, cases.make_call(case)) | changes


def top_k_of(function: str, **changes: Any) -> dict[str, Any]:
    return topk_cases.make_inputs(replace(topk_cases.PLAIN[function], lengths="full", **changes))


def page_table() -> dict[str, Any]:
    return top_k_of(topk_cases.PAGE_TABLE, batch_map=True, starts=True, page_size=2)


def nvfp4_output() -> dict[str, Any]:
    out = wrappers.FP4Tensor(torch.zeros(5, 4, 32, dtype=torch.uint8), torch.zeros(128, 16, dtype=E4M3))
    return attention(SMALL, "context", out=out, out_dtype="nvfp4", o_sf_scale=30.0, o_sf_vec_size=16)


X = {"x": torch.ones(4, 64), "global_scale": 2.0}  # torch serves fp32
CODES = good_calls.inputs_of("nvfp4_dequantize")
PACKED = {"data": torch.ones(5, 2, 8, dtype=torch.uint8), "scale": torch.ones(128, 4).to(E4M3)}
TABLES = {
    "kv_indices": torch.arange(5, dtype=torch.int32), "kv_indptr": torch.tensor([0, 2, 2, 5], dtype=torch.int32),
    "kv_last_page_len": torch.tensor([3, 0, 1], dtype=torch.int32),
}  # fmt: skip
APPENDED = {
    "append_key": torch.ones(3, 2, 16).bfloat16(), "append_value": torch.ones(3, 2, 16).bfloat16(),
    "batch_indices": torch.tensor([0, 2, 2], dtype=torch.int32),
    "positions": torch.tensor([6, 7, 8], dtype=torch.int32),
}  # fmt: skip


def latent(case: str) -> dict[str, Any]:
    return layout_calls.CALLS[layout_calls.TRTLLM_MLA, case]()


CONTEXT, DECODE = wrappers.trtllm_batch_context_with_kv_cache, wrappers.trtllm_batch_decode_with_kv_cache
TRTLLM_MLA = wrappers.trtllm_batch_decode_with_kv_cache_mla
ROPE_APPEND = wrappers.rope_quantize_fp8_append_paged_kv_cache
FORMS_OF_CALLS: dict[str, tuple[Any, Any]] = {  # of functions that have several, and of what is in no registry
    "context": (CONTEXT, lambda: attention(SMALL, "context")),
    "context, stacked": (CONTEXT, lambda: attention(replace(SMALL, cache="stacked", layout="NHD"), "context")),
    "context, nvfp4 cache": (CONTEXT, lambda: attention(replace(SMALL, kv_dtype="nvfp4"), "context")),
    "context, nvfp4 output": (CONTEXT, nvfp4_output),
    "decode, ragged": (DECODE, lambda: attention(SMALL, "decode")),
    "decode, equal": (DECODE, lambda: attention(replace(SMALL, q_lens=(2, 2), drafts=True), "decode")),
    "decode, nvfp4": (DECODE, lambda: attention(replace(SMALL, kv_dtype="nvfp4"), "decode")),
    "xqa": (wrappers.xqa, lambda: attention(replace(SMALL, q_lens=(1, 1), dtype="fp16", layout="NHD"), "xqa")),
    "xqa, drafts": (wrappers.xqa, lambda: attention(DRAFTS, "xqa")),
    "xqa, nvfp4": (wrappers.xqa, lambda: attention(replace(DRAFTS, kv_dtype="nvfp4"), "xqa")),
    "trtllm mla": (TRTLLM_MLA, lambda: latent("sinks") | latent("plain") | {"return_lse": True}),
    "trtllm mla, ragged": (TRTLLM_MLA, lambda: latent("ragged")),
    "xqa mla": (wrappers.xqa_batch_decode_with_kv_cache_mla, layout_calls.CALLS[good_calls.XQA_MLA, "plain"]),
    "flash_mla": (wrappers.flash_mla_with_kvcache, lambda: layout_calls.flash_mla(
        attn_sink=layout_calls.SINK, out=torch.zeros(2, 2, 4, 512).bfloat16())),
    "explain": (
        wrappers.explain, lambda: attention(SMALL, "context") | {"function": CONTEXT, "arch": "sm_90a", "sms": 9}),
    "top_k_page_table_transform": (wrappers.top_k_page_table_transform, page_table),
    "top_k_ragged_transform": (
        wrappers.top_k_ragged_transform, lambda: top_k_of(topk_cases.RAGGED, starts=True)),
    "top_k": (wrappers.top_k, lambda: top_k_of(topk_cases.TOP_K)),
    "top_k_per_row_prefill": (wrappers.top_k_per_row_prefill, lambda: top_k_of(topk_cases.PREFILL)),
    "top_k_per_row_decode": (wrappers.top_k_per_row_decode, lambda: top_k_of(topk_cases.DECODE)),
    "nvfp4_quantize": (wrappers.nvfp4_quantize, lambda: dict(X)),
    "FP4Tensor": (wrappers.FP4Tensor, lambda: PACKED | {"scale_start_index": 0, "original_shape": (5, 2, 16)}),
    "fp4.e4m3": (fp4.e4m3, lambda: {"x": torch.ones(4)}),
    "fp4.e2m1": (fp4.e2m1, lambda: {"x": torch.ones(4)}),
    "fp4.pack": (fp4.pack, lambda: {"codes": torch.ones(2, 4, dtype=torch.uint8)}),
    "fp4.unpack": (fp4.unpack, lambda: {"data": torch.ones(2, 4, dtype=torch.uint8)}),
    "fp4.swizzled_offset": (fp4.swizzled_offset, lambda: {"row": 3, "col": torch.arange(4), "columns": 8}),
    "fp4.write_scales": (
        fp4.write_scales, lambda: {"scales": CODES["scales"], "into": torch.zeros(128, 4).to(E4M3), "start": 3}),
    "fp4.read_scales": (
        fp4.read_scales, lambda: {"swizzled": torch.zeros(128, 4).to(E4M3), "rows": 5, "columns": 3, "start": 3}),
    "fp4.empty": (fp4.empty, lambda: {"shape": (5, 2, 16), "device": torch.device("cpu")}),
    "fp4.store": (
        fp4.store, lambda: {"x": torch.ones(5, 2, 16), "out": wrappers.FP4Tensor(**PACKED), "global_scale": 2.0}),
    "fp4.load": (fp4.load, lambda: {"t": wrappers.FP4Tensor(**PACKED), "global_scale": 2.0}),
    "fp4.deinterleave_v_scales": (fp4.deinterleave_v_scales, lambda: {"scales": torch.ones(2, 8, 4)}),
    "append": (wrappers.append_paged_kv_cache, lambda: TABLES | APPENDED | {
        "paged_kv_cache": (torch.ones(6, 4, 2, 16).bfloat16(), torch.ones(6, 4, 2, 16).bfloat16())}),
    "append, quantised": (wrappers.nvfp4_quantize_append_paged_kv_cache, lambda: TABLES | APPENDED | {
        "paged_kv_cache": (torch.ones(6, 4, 2, 8).byte(), torch.ones(6, 4, 2, 8).byte()),
        "kv_cache_sf": (torch.ones(6, 4, 2, 1).to(E4M3), torch.ones(6, 4, 2, 1).to(E4M3)),
        "k_scale": 0.5, "v_scale": 0.5}),
    "append, slots": (wrappers.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, lambda: {
        "append_key": torch.ones(3, 2, 16).bfloat16(), "append_value": torch.ones(3, 2, 16).bfloat16(),
        "slot_mapping": torch.tensor([5, 0, 23], dtype=torch.int32),
        "paged_kv_cache": (torch.ones(6, 4, 2, 8).byte(), torch.ones(6, 4, 2, 8).byte()),
        "kv_cache_sf": (torch.ones(6, 4, 2, 1).to(E4M3), torch.ones(6, 4, 2, 1).to(E4M3)),
        "k_scale": 0.5, "v_scale": 0.5}),
    "rope append": (ROPE_APPEND, partial(rope_calls.good_call, ROPE_APPEND.__name__)),
    "rope append, latent": (ROPE_APPEND, rope_calls.latent_append),
}  # fmt: skip
ELSEWHERE = {
    wrappers.bind, wrappers.single_decode_with_kv_cache,
    *(getattr(wrappers, name) for name in append_latent.__all__),  # test_latent_refusals.py
    wrappers.gather_latent,  # test_latent_gather.py
    wrappers.dsa_indexer_topk_workspace_size,  # test_dsa_indexer.py
    wrappers.xqa_batch_decode_with_kv_cache, wrappers.trtllm_fmha_v2_prefill,  # test_engines.py
    wrappers.persistent_topk, wrappers.cooperative_topk,  # test_engines.py
    *(getattr(wrappers, name) for name in cache_write.__all__),  # test_append_qkv_refusals.py
    *(getattr(wrappers, name) for name in flash_attn.__all__),  # test_refusals.py
    wrappers.single_prefill_with_kv_cache, wrappers.single_prefill_with_kv_cache_return_lse,  # test_refusals.py
}  # fmt: skip
_SHOWN = ELSEWHERE | {function for function, _ in FORMS_OF_CALLS.values()}
GOOD = FORMS_OF_CALLS | {
    row.name: (row.function, partial(good_calls.inputs_of, row.name)) for row in FUNCTIONS if row.function not in _SHOWN
}


# ---- bad values, by the kind of an argument


INT = (
    "max_q_len", "batch_size", "window_left", "num_kv_heads", "page_size", "sliding_win_size", "q_seq_len", "k",
    "tie_break", "q_len_per_req", "num_rows", "stride0", "stride1", "top_k", "next_n", "scale_start_index", "columns",
    "rows", "start", "o_sf_vec_size", "sms", "nnz", "rotary_dim", "head_size",
    "head_dim_v", "kv_lora_rank", "qk_rope_head_dim", "sparse_mla_top_k", "num_q_tokens_per_head_k", "num_heads_k",
    "max_seqlen_k", "max_context_len", "block_kv", "num_sms", "scratch_bytes", "d_v",
)  # fmt: skip
FLAG = (
    "uses_shared_paged_kv_idx", "causal", "return_lse", "v_scales_interleaved", "batch_invariant", "deterministic",
    "dsa_graph_safe", "sorted", "enable_pdl", "use_fp16_softmax", "uses_spcompress", "interleave", "is_neox",
    "is_fp8_kvcache", "enable_batch_invariant", "is_var_seq", "enable_dcp",
    "clean_logits", "is_causal",
)  # fmt: skip
NUMBER = ("softmax_scale", "sm_scale", "o_sf_scale", "skip_softmax_threshold_scale_factor", "logits_soft_cap",
          "o_scale",
          "rcp_out_scale")  # fmt: skip
SCALE = (
    "descale_q",
    "descale_k",
    "bmm1_scale",
    "bmm2_scale",
    "q_scale",
    "kv_scale",
    "bmm1_scale_log2",
    "global_scale",
    "k_scale",
    "v_scale",
)
OTHER = {
    "kv_layout": "layout", "backend": "name", "out_dtype": "dtype", "shape": "shape", "original_shape": "shape",
    "device": "device", "t": "fp4", "function": "function", "arch": "arch", "bitorder": "name",
    "quantize_dtype": "dtype", "logits_dtype": "dtype",
    "sage_attn_sfs": "four", "num_elts_per_sage_attn_blk": "four",
}  # fmt: skip
KIND = dict.fromkeys(INT, "int") | dict.fromkeys(FLAG, "flag") | dict.fromkeys((*NUMBER, *rope_calls.NUMBERS), "number")
KIND |= dict.fromkeys(SCALE, "scale") | OTHER
HINTS = {
    "workspace_buffer", "max_kv_len", "cum_seq_lens_kv", "multi_ctas_kv_counter_buffer", "max_seq_len", "semaphores",
    "request_order", "request_order_plan", "sm_count", "qk_nope_head_dim", "cute_dsl_impl", "kv_scale_format",
    "tile_scheduler_metadata", "num_splits", "schedule_meta", "q_seq_lens_cpu", "kv_seq_lens_cpu",
    "skip_all_rows_active_check",
}  # fmt: skip


def bad_values(argument: str, good: Any) -> dict[str, Any]:
    if argument in KIND and not (argument == "k" and isinstance(good, torch.Tensor)):
        return KINDS[KIND[argument]]
    if isinstance(good, tuple):
        k, v = good
        bad = NONE | {"str": "kv", "int": 3, "numpy": np.zeros((2, 2)), "dict": {0: k, 1: v}}
        bad |= {"one": (k,), "three": (k, k, v)}
        if v is None:  # queries without scale factors
            return bad | {f"K {name}": (t, v) for name, t in shared.tensors_like(k).items()}
        bad |= {"both double": (k.double(), v.double())}
        for name, t in shared.tensors_like(k).items():
            bad |= {f"K {name}": (t, v), f"V {name}": (k, t)}
        return bad
    if isinstance(good, wrappers.FP4Tensor):
        return {"list": [1], "str": "fp4", "bf16": torch.zeros(5, 4, 64).bfloat16()}
    if isinstance(good, torch.Tensor):
        return shared.tensors_like(good)
    return not_tensors((2,))


one_thread = shared.one_thread


@cache
def made(name: str) -> dict[str, Any]:
    return GOOD[name][1]()


def arguments_of(name: str) -> dict[str, Any]:
    """All parameters of a call and their good values; defaults where it gives none."""
    function = GOOD[name][0]
    given = made(name)
    if function is wrappers.explain:
        return given
    shown = inspect.signature(function).parameters
    return {n: given.get(n, p.default) for n, p in shown.items()}


OWN = {  # of a second form of a call: what the first does not show
    "context, stacked": {"kv_cache"},
    "context, nvfp4 cache": {"kv_cache", "kv_block_scales", "kv_cache_sf"},
    "context, nvfp4 output": {"out", "out_dtype", "o_sf_scale", "o_sf_vec_size"},
    "decode, equal": {"query", "seq_lens", "block_tables", "mask", "q_len_per_req", "max_q_len"},
    "decode, nvfp4": {"kv_cache", "kv_cache_sf", "v_scales_interleaved"},
    "trtllm mla, ragged": {"query", "seq_lens", "block_tables", "max_q_len", "cum_seq_lens_q", "out"},
    "explain": {"function", "arch", "sms"},
    "xqa, drafts": {"q", "output", "page_table", "seq_lens", "mask", "q_seq_len", "q_cu_seq_lens"},
    "xqa, nvfp4": {"k_cache", "k_sf_cache", "v_sf_cache", "v_scales_interleaved"},
}
PAIRS = [
    (name, argument)
    for name in GOOD
    for argument in arguments_of(name)
    if argument not in HINTS
    and (name, argument) not in layout_calls.UNREAD_BY
    and argument in OWN.get(name, {argument})
]


# ---- what a call does


OUTPUTS = ("out", "lse", "output", "out_raw_indices", "indices", "into")


def poisoned(name: str) -> dict[str, Any]:
    arguments = deepcopy(made(name))
    for output in OUTPUTS:
        for t in tensors_in(arguments.get(output)):
            t.untyped_storage().fill_(shared.POISON)
    return arguments


def fault(error: BaseException, name: str, argument: str, bad: str, arguments: dict[str, Any]) -> str | None:
    """Return the fault of a refusal, None if there is none."""
    value = arguments[argument]
    said = str(error).strip('"')
    if (name, argument, bad) in SHOWN and SHOWN[name, argument, bad] in said:
        return None
    named = [n for n in arguments if re.search(rf"\b{n}\b", said)]
    mismatch = bad.split(" ", 1)[1] if bad[:2] in ("K ", "V ") else bad
    if argument not in named and not (named and mismatch in (*MISMATCH, *OF_TWO)):
        return "does not name the argument"
    if not re.search(r"must|needs|required|not supported|serves|only", said):
        return "does not say what is allowed"
    if not (re.search(SIZES, said) if mismatch in MISMATCH else shared.shows(said, value)):
        return "does not show the value"
    return None


UNSERVED = (  # no kernel
    "context, nvfp4 cache", "packbits", "segment_packbits", "get_seq_lens", "get_batch_indices_positions",
)  # fmt: skip


# ---- what is accepted all the same, on every machine but where it says

NONE_ONLY = {"None"}
SCALES = {"zero", "negative"}
FORMS = {"rank + 1", "meta", "flat", "no rows", "a row less", "a row more", "no columns", "strided", "expanded columns"}
STRIDED = {"strided", "expanded columns"}
ANY = {"int64", "bool", "complex64", "float16", "float8_e4m3fn", "uint8"}  # dtypes
INDICES = dict.fromkeys(("batch_indices", "positions", "kv_indptr", "kv_last_page_len"), {"int64"}) | {
    "kv_indices": {"int64", "no rows", "a row less", "a row more", "no columns", "columns"}}  # fmt: skip
ONE_SCALE = {"int", "rank + 1", "flat", *STRIDED}  # of one element
LATENT_ROWS = {  # any bytes; rows that the cache lacks are skipped; fewer slots, fewer rows
    "kv_cache": {"float8_e4m3fn", "no rows", "a row less", "a row more"},
    "slot_mapping": {"no rows", "a row less", "no columns", "columns"}}  # fmt: skip
PAGES = {"no rows", "a row less", "a row more"}  # rows that a cache or an output lacks are skipped
TABLE = {"int64", "a row more", "no columns", "columns"}  # pages that a request has no entry for are skipped
GATHERED = {
    "src_cache": PAGES | {"float8_e4m3fn"}, "dst": PAGES | {"float16"}, "block_table": TABLE}  # fmt: skip
PAGED_LOGITS = {
    "weights": STRIDED, "kv_cache": PAGES | {"float8_e4m3fn"}, "block_table": {"no columns", "columns"}}  # fmt: skip
ACCEPTED: dict[str, dict[str, set[str]]] = {  # function, or call -> argument -> bad values
    "context": {
        "max_q_len": {"far"},  # a bound
        "window_left": {"None", "far", "negative"},  # off, all keys, off
        "out": {"None", "float16", "float8_e4m3fn"}, "o_sf_scale": NONE_ONLY, "o_sf_vec_size": NONE_ONLY,
        "enable_pdl": NONE_ONLY, "sinks": NONE_ONLY, "use_fp16_softmax": NONE_ONLY, "uses_spcompress": NONE_ONLY,
        "skip_softmax_threshold_scale_factor": {"None", "zero"}, "logits_soft_cap": {"None", "zero"},
        "lse": {"None", "strided"}, "bmm2_scale": {"zero", "negative"},
        "block_tables": {"columns"},  # one that no request needs
        "kv_cache": {"K a row more", "V a row more"},  # pages of one pool
    },
    "context, stacked": {"kv_cache": {"a row more", "float8_e4m3fn"}},
    "context, nvfp4 output": {"o_sf_vec_size": NONE_ONLY},
    "context, nvfp4 cache": {"kv_block_scales": {"K uint8", "V uint8"}},
    "decode, nvfp4": {"kv_cache_sf": {"K uint8", "V uint8"}},
    "decode, ragged": {
        "max_q_len": {"far"}, "q_len_per_req": {"None", "far", "negative"},  # a bound, and not used
        "window_left": {"None", "far", "negative"}, "o_scale": NONE_ONLY, "o_sf_scale": NONE_ONLY,
        "out": {"None", "float16", "float8_e4m3fn"}, "enable_pdl": NONE_ONLY, "o_sf_vec_size": NONE_ONLY,
        "sinks": NONE_ONLY,
        "skip_softmax_threshold_scale_factor": {"None", "zero"}, "logits_soft_cap": {"None", "zero"},
        "lse": {"None", "strided"}, "bmm1_scale_log2": NONE_ONLY, "bmm2_scale": {"zero", "negative"},
        "block_tables": {"columns"}, "kv_cache": {"K a row more", "V a row more"},
    },
    "decode, equal": {
        "block_tables": {"columns"}, "mask": {"None", "strided", "expanded columns"},  # copied
        "max_q_len": {"None", "far", "negative"},  # not used
    },
    "xqa": {
        "page_table": {"columns"}, "seq_lens": {"flat", "expanded columns"}, "output": {"float8_e4m3fn"},
        "sinks": {"None", "expanded columns"}, "kv_scale": NONE_ONLY, "sliding_win_size": {"far"},
        "enable_pdl": NONE_ONLY, "kv_layout": {"None", "int"},  # sm_count, in older signatures
        "k_cache": {"a row more"}, "v_cache": {"a row more"},
    },
    "trtllm mla": {
        **dict.fromkeys(("out", "sinks", "skip_softmax_threshold_scale_factor", "enable_pdl"), NONE_ONLY),
        "use_fp16_softmax": NONE_ONLY, "lse": {"None", "strided"}, "kv_cache": {"a row more", "float8_e4m3fn"},
        "bmm2_scale": {"zero", "negative"}, "max_q_len": {"None", "far", "negative"},  # not used
    },
    "xqa mla": {
        **dict.fromkeys(("out", "sinks", "enable_pdl"), NONE_ONLY),
        "kv_cache": {"a row more", "float8_e4m3fn"}, "bmm2_scale": {"zero", "negative"}},
    "trtllm mla, ragged": {"out": NONE_ONLY, "max_q_len": {"far"}},
    "flash_mla": {
        **dict.fromkeys(("out", "attn_sink", "softmax_scale", "descale_q", "descale_k"), NONE_ONLY),
        "k_cache": {"a row more"}},
    "get_mla_metadata": {  # of any layout and device
        "cache_seqlens": {"None", "columns", *FORMS} - {"rank + 1", "flat"}, "num_q_tokens_per_head_k": {"far"},
        "num_heads_k": {"far"}, "num_heads_q": {"int"}, "topk": {"int"}},
    "fp8_mqa_logits": {"weights": STRIDED},
    "fp8_fp4_mqa_logits": {"weights": STRIDED, "clean_logits": {"one"}},  # max_seqlen_k, in the signature of vLLM 0.33
    "fp8_paged_mqa_logits": PAGED_LOGITS,
    "fp8_fp4_paged_mqa_logits": PAGED_LOGITS | {"clean_logits": {"None", "tensor"}},  # indices, likewise
    "select_slots": {
        "weights": STRIDED, "kv_cache": PAGES | {"float8_e4m3fn"}, "block_table": {"no columns", "columns"},
        "max_context_len": {"None", "far"}, "scratch_bytes": {"far"}},
    "select_rows": {"weights": STRIDED, "scratch_bytes": {"far"}},
    "flash_mla_sparse_fwd": {
        "kv": PAGES - {"no rows"} | {"rank + 1", "float8_e4m3fn", "uint8"}, "indices": {"no columns", "columns"},
        **dict.fromkeys(("attn_sink", "descale_q", "descale_k"), NONE_ONLY), "share_keys": {"True"}},
    "sparse_paged_attention": {
        "indices": {"no columns", "columns"}, "bmm1_scale": NONE_ONLY, "bmm2_scale": SCALES,
        "logits_soft_cap": {"None", "zero"}, **dict.fromkeys(("sinks", "o_sf_scale", "enable_pdl"), NONE_ONLY)},
    "trtllm_ragged_attention_deepseek": {
        "max_q_len": {"far"}, "window_left": {"None", "far", "negative"}, "out": {"None", "float16", "float8_e4m3fn"},
        "lse": {"None", "strided"}, "bmm2_scale": SCALES, "skip_softmax_threshold_scale_factor": {"None", "zero"},
        "o_sf_scale": {"None", *SCALES},  # not used
        **dict.fromkeys(("enable_pdl", "attention_sinks", "use_fp16_softmax", "uses_spcompress"), NONE_ONLY)},
    "dsa_indexer_topk": {
        "k": {"no rows", "a row less", "a row more"}, "w": STRIDED, "softmax_scale": NONE_ONLY, "max_seqlen_q": {"int"},
        "max_seqlen_k": {"None", "far"}, "ratio": {"int"}},
    "dsa_sparse_attention": {
        "indices": {"no columns", "columns"}, "softmax_scale": NONE_ONLY, "key_passes": {"int"}},
    "dsa_sparse_attention_varlen": {
        "gather_kv_indices": {"no columns", "columns"}, "softmax_scale": NONE_ONLY, "max_seqlen_q": {"int"},
        "max_seqlen_k": {"None", "far"}, "key_passes": {"int"}},
    "get_paged_mqa_logits_metadata": {
        "context_lens": {"columns", *FORMS}, "block_kv": {"far"}},
    "explain": {"sms": {"None", "far"}},
    "xqa, drafts": {
        "page_table": {"columns"}, "seq_lens": {"flat", "expanded columns"}, "output": {"float8_e4m3fn"},
        "mask": {"strided", "expanded columns"},
    },
    "xqa, nvfp4": {"k_sf_cache": {"float8_e4m3fn"}, "v_sf_cache": {"uint8"}},
    "top_k_page_table_transform": {
        "input": {"float16", "no columns", "columns"}, "row_starts": NONE_ONLY, "out": NONE_ONLY,
        "out_raw_indices": NONE_ONLY,
        "src_page_table": {"a row less", "a row more", "no columns", "columns"},  # -1 where it holds nothing
    },
    "top_k_ragged_transform": {"input": {"float16", "no columns", "columns"}, "row_starts": NONE_ONLY},
    "top_k": {"input": {"float16", "no rows", "a row less", "a row more", "columns"}},
    "top_k_per_row_prefill": {"logits": {"float16", "no columns"}},
    "top_k_per_row_decode": {  # seq_lens of one entry
        "logits": {"float16", "no columns"}, "seq_lens": {"strided", "expanded columns"}},
    "nvfp4_quantize": {"x": FORMS | {"float16"}},
    "nvfp4_dequantize": {"data": {"strided", "expanded columns"}, "scales": STRIDED | {"uint8"}},
    "FP4Tensor": {"data": {"strided", "expanded columns"}, "scale": {"uint8"}, "original_shape": NONE_ONLY},
    "fp4.e4m3": {"x": FORMS | {"float16", "columns"}},
    "fp4.e2m1": {"x": FORMS | {"float16", "columns"}},
    "fp4.pack": {"codes": FORMS},
    "fp4.unpack": {"data": FORMS | {"columns"}},
    "fp4.swizzled_offset": {"row": {"int"}, "col": FORMS | {"int", "columns"}, "columns": {"far"}},
    "fp4.write_scales": {
        "scales": {"no rows", "a row less", "a row more", "columns", "uint8"} | STRIDED, "into": {"uint8"}},
    "fp4.read_scales": {"swizzled": {"meta", "uint8"}},
    "fp4.store": {"x": {"float16", "strided", "expanded columns"}},
    "fp4.deinterleave_v_scales": {  # of any dtype
        "scales": FORMS - {"flat"} | ANY | {"columns"}},
    "packbits": {"x": FORMS - {"rank + 1", "flat"} | ANY | {"columns"}},
    "segment_packbits": {"x": ANY | STRIDED | {"a row more"}, "indptr": {"int64", "a row less", "columns"}},
    "merge_state": dict.fromkeys(("v_a", "s_a", "v_b", "s_b"), STRIDED),
    "merge_state_in_place": {
        "v": {"strided"}, "s": {"strided"}, "v_other": STRIDED, "s_other": STRIDED,
        "mask": STRIDED | {"None", "uint8"},
    },
    "merge_states": {"v": STRIDED | {"float16", "no columns", "columns"}, "s": STRIDED},
    "get_seq_lens": {"kv_indptr": {"int64"}, "kv_last_page_len": {"int64"}},
    "get_batch_indices_positions": {
        "append_indptr": {"int64"}, "seq_lens": {"int64"}, "batch_indices": NONE_ONLY, "positions": NONE_ONLY},
    **rope_calls.ACCEPTED,
    "append_paged_mla_kv_cache": INDICES,
    "nvfp4_quantize_append_paged_mla_kv_cache": INDICES | {
        "ckv_sf_cache": {"uint8"}, "ckv_scale": {"int"}, "kpe_scale": {"int"}},
    "concat_and_cache_mla": LATENT_ROWS | {"scale": ONE_SCALE, "k_pe": {"no columns"}},
    "concat_and_cache_mla_rope_fused": LATENT_ROWS | {
        "kv_cache_scale": ONE_SCALE,
        "positions": {"int64"}, "cos_sin_cache": {"a row less", "a row more"}},
    "concat_mla_q": {"q_out": {"float8_e4m3fn"}},
    "indexer_k_quant_and_cache": LATENT_ROWS | {
        "k": {"float16", "a row more"}, "kv_cache_dtype": {"str"}},  # any other format rounds no scale
    "gather_and_maybe_dequant_cache": GATHERED | {
        "num_tokens": {"int"}, "scale": ONE_SCALE, "cu_seq_lens": {"int64"}, "block_table": {*TABLE} - {"a row more"},
        "token_to_seq": {"int64", "no rows", "a row less", "a row more", "no columns", "columns"}},  # not read
    "cp_gather_cache": {
        "src_cache": PAGES, "dst": PAGES, "block_table": TABLE, "cu_seq_lens": {"int64", "a row more"}},
    **dict.fromkeys(("cp_gather_and_upconvert_fp8_kv_cache", "cp_gather_and_upconvert_nvfp4_kv_cache"), GATHERED | {
        "workspace_starts": {"int64", "a row more"}}),
    "cp_gather_indexer_k_quant_cache": {
        "kv_cache": PAGES | {"float8_e4m3fn"}, "dst_k": {"float8_e4m3fn"}, "cu_seq_lens": {"int64"},
        "block_table": {*TABLE} - {"a row more"}},
    "append": INDICES | {"paged_kv_cache": rope_calls.CACHES},  # pages that one of the two lacks are not written
    "append, quantised": INDICES | {
        "kv_cache_sf": {f"{side} {bad}" for side in "KV" for bad in STRIDED | {"uint8"}},  # of one column
    },
    "append, slots": {
        "append_key": {"a row more"}, "append_value": {"a row more"},
        "slot_mapping": {"int64", "no rows", "a row less", "no columns", "columns"},  # fewer rows are written
        "kv_cache_sf": {f"{side} {bad}" for side in "KV" for bad in STRIDED | {"uint8"}},
    },
}  # fmt: skip
ON_CPU: dict[str, dict[str, set[str]]] = {  # by the reference, where no kernel serves it
    "context": {"bmm1_scale": SCALES},
    "decode, ragged": {"bmm1_scale": SCALES},
    "xqa": {"q_scale": SCALES, "kv_scale": SCALES},
    **dict.fromkeys(("trtllm mla", "xqa mla"), {"bmm1_scale": SCALES}),
    "flash_mla": {"softmax_scale": SCALES},
    "flash_mla_sparse_fwd": {"sm_scale": SCALES},
    "trtllm_ragged_attention_deepseek": {"bmm1_scale": SCALES},
    "sparse_paged_attention": {"bmm1_scale": SCALES, "kv_cache": {"V no columns", "V columns"}},
    **dict.fromkeys(good_calls.DSA, {"softmax_scale": SCALES}),
}
FEWER = {"K a row less", "V a row less"}  # pages: a table may name the last
ON_CUDA: dict[str, dict[str, set[str]]] = {  # values that only the device knows, see test_values.py
    "context": {
        "bmm1_scale": VALUES, "bmm2_scale": VALUES, "block_tables": {"no columns"}, "kv_cache": FEWER},
    "context, stacked": {"kv_cache": {"no rows", "a row less"}},
    "decode, ragged": {
        "bmm1_scale": VALUES, "bmm2_scale": VALUES, "bmm1_scale_log2": VALUES, "block_tables": {"no columns"},
        "kv_cache": FEWER},
    "decode, equal": {"block_tables": {"no columns"}},
    "xqa": {
        "q_scale": VALUES, "kv_scale": VALUES, "page_table": {"no columns"}, "k_cache": {"a row less"},
        "v_cache": {"a row less"}},
    "xqa, drafts": {"page_table": {"no columns"}},
    **dict.fromkeys(("trtllm mla", "xqa mla"), {
        "bmm1_scale": VALUES, "bmm2_scale": VALUES, "block_tables": {"no columns", "columns"},
        "kv_cache": {"no rows", "a row less"}}),
    "trtllm mla, ragged": {"block_tables": {"no columns", "columns"}},
    "flash_mla": {"block_table": {"no columns", "columns"}, "k_cache": {"no rows", "a row less"}},
    **dict.fromkeys(("sparse_paged_attention", "trtllm_ragged_attention_deepseek"), {
        "bmm1_scale": VALUES, "bmm2_scale": VALUES}),
    **dict.fromkeys(("append, quantised", "append, slots"), {"k_scale": VALUES, "v_scale": VALUES}),
    **dict.fromkeys(("nvfp4_quantize", "nvfp4_dequantize", "fp4.store", "fp4.load"), {"global_scale": VALUES}),
}  # fmt: skip
NO_MACHINE = ("top_k", "input", "meta")  # where all tensors are, a call gives such: test_traced.py
SHOWN = {  # what a message says instead of the argument's name and value
    **{
        (name, "kv", "V flat"): "kv[1]: dtype torch.float8_e4m3fn"
        for name in ("fp8_mqa_logits", "fp8_fp4_mqa_logits", "select_rows")
    },
    ("context, stacked", "kv_cache", "uint8"): "kv_cache: K has head_dim 128",
    ("context, nvfp4 cache", "kv_block_scales", "None"): "kv_cache_sf: None, required",
    ("decode, ragged", "cum_seq_lens_q", "None"): r"query: 5 tokens, must be 2 x 1 (seq_lens, q_len_per_req)",
    ("trtllm mla, ragged", "cum_seq_lens_q", "None"): "query: shape (4, 4, 576), must have 4 dimensions without",
    ("xqa, drafts", "q_cu_seq_lens", "None"): "q: shape (5, 4, 64)",
    ("xqa, drafts", "q_seq_len", "far"): "73786976294838206464) (the query's rows, two words per 32 of q_seq_len)",
    ("explain", "function", "builtin"): "function: len",
    **{
        (name, f"descale_{x}", f"{bad} tensor"): f"descale_{x}: Tensor, must be None without"
        for name in ("flash_mla", "flash_mla_sparse_fwd")
        for bad in ("nan", "inf")
        for x in "qk"
    },
    ("explain", "function", "helper"): "function: load",
    (
        "top_k_page_table_transform",
        "row_to_batch",
        "None",
    ): "(2, 28), must have at least 3 rows, one per row of input, without",
    **{
        (f"top_k_per_row_{which}", "logits", bad): f"stride0: 50, must be that of logits, {stride}"
        for which in ("prefill", "decode")
        for bad, stride in (("strided", 100), ("columns", 49))
    },
    ("xqa", "q_scale", "negative"): "q_scale * kv_scale: -0.125",
    ("xqa", "kv_scale", "negative"): "q_scale * kv_scale: -0.125",
    **{
        (name, argument, bad): "k_sf_cache, v_sf_cache: one of the two is None, must be both given or both None"
        for argument in ("k_sf_cache", "v_sf_cache")
        for name, values in (("xqa", not_tensors((2,))), ("xqa, nvfp4", NONE))
        for bad in values
    },
    **{
        ("context, nvfp4 cache", "kv_cache_sf", bad): "another name of kv_cache_sf, only one of the two may be given"
        for bad in not_tensors((2,))
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name,argument", PAIRS)
def test_one_bad_argument(name, argument):
    function, values = GOOD[name][0], bad_values(argument, arguments_of(name)[argument])
    values = {bad: value for bad, value in values.items() if (name, argument, bad) != NO_MACHINE}

    def allowed(host):
        tables = ACCEPTED, ON_CPU if host == "cpu" else ON_CUDA
        return set[str]().union(*(table.get(name, {}).get(argument, ()) for table in tables))

    good = poisoned(name)

    def attempt(here, bad, value):
        nonlocal good
        given = good | {argument: value}
        wrong = shared.outcome(
            here, lambda x: function(**x), given, lambda error: fault(error, name, argument, bad, given)
        )
        good = poisoned(name) if wrong else good  # a refusal has written nothing
        return wrong

    hosts = HOSTS[: 1 if name in UNSERVED else 3]
    faults = shared.faults_of(hosts, lambda: function(**poisoned(name)), values, allowed, attempt)
    assert not faults, "\n".join(faults)


def test_every_public_function_is_called():
    called = {function for function, _ in GOOD.values()}
    others = ELSEWHERE | {wrappers.Explanation, wrappers.TopKTieBreak}
    others |= {getattr(wrappers, name) for name in wrappers.flashinfer.wrapper_classes.__all__}  # test_refusals.py
    assert {getattr(wrappers, name) for name in wrappers.__all__} - others <= called
    plain = {f for n, f in vars(fp4).items() if inspect.isfunction(f) and f.__module__ == fp4.__name__ and n[0] != "_"}
    parts = {fp4.nvfp4_quantize, fp4.quantizable, fp4.nvfp4_dequantize, fp4.dequantizable}  # of two in `wrappers`
    assert plain - {fp4.round_up, fp4.as_e4m3} - parts <= called
    for table in (ACCEPTED, ON_CPU, ON_CUDA):
        for name, entries in table.items():
            for argument, bad in entries.items():
                assert (name, argument) in PAIRS and bad <= {*bad_values(argument, arguments_of(name)[argument])}
