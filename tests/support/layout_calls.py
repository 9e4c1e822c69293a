"""Calls for `layouts`: together they give every tensor that a public function takes, with values that differ."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import wrappers
from bench.cases import attention as cases
from bench.cases import mla as mla_cases
from bench.cases import topk as topk_cases
from tests.engines.test_engines import as_fmha, as_persistent, as_xqa_batch
from tests.support import good_calls, rope_calls
from tests.support.flash_attn_batches import Batch
from wrappers import (
    BlockTable,
    IndexerRows,
    KVCacheTarget,
    LatentCache,
    LatentNorm,
    LatentQuery,
    PageLists,
    QueryOutput,
    RMSNorm,
    RotaryEmbedding,
    fp4,
)
from wrappers.own.registry import FUNCTIONS

Arguments = dict[str, Any]
BF16, E4M3, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
ints = good_calls.ints


def rows(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Return random values; those of another seed differ."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- attention of tables

SMALL = replace(cases.EDGE["plain"], q_lens=(1, 2), kv_lens=(9, 20))
EQUAL = replace(SMALL, q_lens=(2, 2), drafts=True, lse=False)
SCALED = replace(SMALL, device=("scale", "out"), lse=False)
NVFP4, BY_TOKEN = replace(SMALL, kv_dtype="nvfp4"), replace(SMALL, kv_dtype=cases.TOKEN_SCALES)
SLOPES = {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}


def table(function: str, case: cases.AttentionCase, **changes: Any) -> Callable[[], Arguments]:
    return lambda: cases.FUNCTIONS[function][1](case, cases.make_call(case)) | changes


def by_another_name() -> Arguments:
    given = table("context", BY_TOKEN)()
    return given | {"kv_cache_sf": given.pop("kv_block_scales")}


def xqa(case: cases.AttentionCase, **changes: Any) -> Callable[[], Arguments]:
    return table("xqa", replace(case, dtype="fp16", layout="NHD", lse=False, function="xqa"), **changes)


def xqa_batch(**changes: Any) -> Callable[[], Arguments]:
    return lambda: as_xqa_batch(cases.make_inputs(replace(SMALL, **changes)))


def xqa_batch_of_drafts() -> Arguments:
    given = as_xqa_batch(cases.make_inputs(replace(EQUAL, drafts=False))) | {"q_cu_seq_lens": None}
    return given | {"mask": torch.tensor([[[1, 0], [3, 0]]] * 2).to(torch.uint16)}


def fmha() -> Arguments:
    return as_fmha(cases.make_inputs(replace(SCALED, cache="stacked")))


# ---- attention without a table

SCALES = {"q_scale": torch.tensor([1.0, 2.0, 0.5, 4.0]), "k_scale": torch.tensor([0.5, 2.0])}


def single(tokens: Any = slice(3), dtype: torch.dtype = BF16, **changes: Any) -> Arguments:
    q, k, v = (rows(20, heads, 64, seed=heads).to(dtype) for heads in (4, 2, 3))
    return {"q": q[tokens], "k": k, "v": v[:, :2]} | changes


def e4m3_single(*names: str) -> Arguments:
    """A call of 8 bits with a scale for each head, by these names of the three scales."""
    scales = dict(zip(names, (*SCALES.values(), torch.tensor([2.0, 0.5]))))
    return single(dtype=E4M3, o_dtype=BF16) | scales


def packed_single() -> Arguments:
    given = single()
    (k, k_factors), (v, v_factors) = (fp4.nvfp4_quantize(given[name]) for name in "kv")
    return given | {"k": k, "v": v, "kv_cache_sf": (k_factors, v_factors)}


BATCH = Batch(q_lens=(3, 1), kv_lens=(9, 17), page=16)
SINK = torch.tensor([0.5, -1.0, 2.0, 0.25])
STARTS = {"cu_seqlens_q": BATCH.q_starts, "max_seqlen_q": torch.tensor(3)}
DESCALES = {f"{side}_descale": torch.tensor([[a, 1.0]]).expand(2, 2) for side, a in zip("qkv", (0.5, 2.0, 4.0))}


def ragged(**changes: Any) -> Arguments:
    given = {"q": BATCH.q, "k": BATCH.k, "v": BATCH.v, "cu_seqlens_k": BATCH.k_starts, "causal": True} | STARTS
    return given | changes


def ragged_e4m3() -> Arguments:
    return ragged(**{name: t.to(E4M3) for name, t in ragged().items() if name in "qkv"}, **DESCALES)


def paged(**changes: Any) -> Arguments:
    k, v = BATCH.paged
    return {"q": BATCH.q, "k": k, "v": v, "seqused_k": BATCH.lens, "causal": True} | STARTS | changes


def dense(**changes: Any) -> Arguments:
    q, k, v = (rows(2, n, heads, 64, seed=heads).half() for n, heads in ((2, 4), (16, 2), (16, 3)))
    return {"q": q, "k": k, "v": v[:, :, :2], "causal": True} | changes


def dense_e4m3() -> Arguments:
    return dense(**{name: t.to(E4M3) for name, t in dense().items() if name in "qkv"}, **DESCALES)


def cached(**changes: Any) -> Arguments:
    """Two requests in entries of a cache that holds three."""
    q, k, v = (rows(3, n, heads, 64, seed=heads).half() for n, heads in ((2, 4), (16, 2), (16, 3)))
    given = {"q": q[:2], "k_cache": k, "v_cache": v[:, :, :2].clone(), "cache_seqlens": ints(9, 5), "causal": True}
    return given | {"cache_batch_idx": ints(2, 0)} | changes


def new_rows(count: int = 2, **changes: Any) -> Arguments:
    k, v = (rows(2, count, 2, 64, seed=seed).half() for seed in (5, 6))
    return {"k": k, "v": v} | changes


def rotary() -> Arguments:
    return new_rows(rotary_cos=rows(48, 16, seed=7).half(), rotary_sin=rows(48, 16, seed=8).half())


def appended_to_pages() -> Arguments:
    """Ragged queries, as many as new keys, in pages of a table."""
    k, v = (t.nan_to_num() for t in BATCH.paged)
    new = {"k": rows(4, 2, 64, seed=5).half(), "v": rows(4, 2, 64, seed=6).half(), "cu_seqlens_k_new": BATCH.q_starts}
    given = {"k_cache": k, "v_cache": v, "page_table": BATCH.table.clamp(min=0), "cache_seqlens": ints(5, 13)}
    return {"q": BATCH.q, "causal": True} | STARTS | given | new


def cached_e4m3() -> Arguments:
    given = cached(causal=True)
    return given | {name: given[name].to(E4M3) for name in ("q", "k_cache", "v_cache")} | DESCALES


# ---- attention to latent caches


def flash_mla(**changes: Any) -> Arguments:
    return good_calls.mla(FLASH_MLA) | changes


def trtllm_mla(**changes: Any) -> Arguments:
    return good_calls.mla(TRTLLM_MLA) | changes


def chosen_mla(**changes: Any) -> Arguments:
    """Rows that choose their keys, some of which are no rows of the cache."""
    slots = torch.randint(-3, 99, (2, 2, 70), generator=torch.Generator().manual_seed(0)).int()
    return flash_mla(causal=False, indices=slots, topk_length=ints(70, 33)) | changes


def two_caches() -> Arguments:
    given = chosen_mla()
    other = given["k_cache"].flatten(0, 1)[:30].view(6, 5, 1, 576).clone()
    return given | {"extra_k_cache": other, "extra_indices_in_kvcache": given["indices"][..., :40].contiguous(),
                    "extra_topk_length": ints(20, 40)}  # fmt: skip


def packed_cache(record: str, dim: int, pages: int, page_size: int) -> torch.Tensor:
    """A cache of packed records in which every row is written."""
    case, gen = mla_cases.MlaCase(record=record, dim=dim, page_size=page_size), torch.Generator().manual_seed(1)
    cache, row = mla_cases.empty_cache(case, pages, "cpu"), torch.arange(pages * page_size)
    keys = torch.randn(len(row), dim, generator=gen)
    mla_cases.put(record, cache, row // page_size, row % page_size, keys, gen, False)
    return cache.unsqueeze(2)


def packed_mla(record: str, dim: int = 576) -> Arguments:
    """Rows that choose keys of a cache of packed records."""
    given = chosen_mla()
    return given | {"q": given["q"][..., :dim].clone(), "k_cache": packed_cache(record, dim, 6, 16),
                    "is_fp8_kvcache": True}  # fmt: skip


def packed_caches() -> Arguments:
    given = packed_mla("584", 512)
    other = packed_cache("584", 512, 4, 16)
    return given | {"extra_k_cache": other, "extra_indices_in_kvcache": given["indices"][..., :40].contiguous(),
                    "extra_topk_length": ints(20, 40)}  # fmt: skip


def e4m3_mla() -> Arguments:
    given = flash_mla()
    return given | {"k_cache": given["k_cache"].to(torch.float8_e4m3fn), "is_fp8_kvcache": True, "descale_k": ONE}


def e4m3_queries_mla() -> Arguments:
    given = e4m3_mla()
    return given | {"q": given["q"].to(torch.float8_e4m3fn), "descale_q": ONE}


def sparse_mla() -> Arguments:
    given = chosen_mla()
    return trtllm_mla(block_tables=given["indices"], sparse_mla_top_k=70, seq_lens=ints(70, 70),
                      sparse_mla_top_k_lens=ints(70, 33))  # fmt: skip


def latent_qv(function: str) -> Arguments:
    """FlashAttention's call with qv over the cache of the functions above."""
    given = flash_mla()
    (qv, q), (v, k) = ([part.clone() for part in t.split([512, 64], -1)] for t in (given["q"], given["k_cache"]))
    rest = {"block_table": given["block_table"], "softmax_scale": 0.1, "causal": True, "s_aux": SINK}
    if function == "flash_attn_with_kvcache":
        return rest | {"q": q, "k_cache": k, "v_cache": v, "qv": qv, "cache_seqlens": given["cache_seqlens"]}
    return rest | {"q": q.flatten(0, 1), "k": k, "v": v, "q_v": qv.flatten(0, 1), "cu_seqlens_q": ints(0, 2, 4),
                   "seqused_k": given["cache_seqlens"], "max_seqlen_q": 2}  # fmt: skip


def ragged_mla() -> Arguments:
    """Two requests of one row and of three, and scales that are tensors."""
    given = trtllm_mla(cum_seq_lens_q=ints(0, 1, 4), max_q_len=3, bmm1_scale=ONE, bmm2_scale=torch.tensor([2.0]))
    return given | {"query": given["query"].flatten(0, 1), "out": torch.zeros(4, 4, 512).bfloat16()}


# ---- caches

TOKENS = {"k": rows(3, 2, 16, seed=1), "v": rows(3, 2, 16, seed=2)}
PAGE_LISTS = PageLists(ints(0, 2, 2), ints(6, 7, 8), ints(3, 1, 2, 0, 4), ints(0, 2, 2, 5))
ROPE = RotaryEmbedding(ints(3, 0, 7), rows(9, 16, dtype=torch.float32, seed=3))
ONE, TWO = torch.tensor([0.5]), torch.tensor([2.0, 0.25])


def target(dtype: torch.dtype, dim: int = 16, **fields: Any) -> KVCacheTarget:
    return KVCacheTarget(tuple(torch.zeros(6, 4, 2, dim, dtype=dtype) for _ in "kv"), **fields)


def packed(**fields: Any) -> KVCacheTarget:
    return target(U8, 8, sf=tuple(torch.zeros(6, 4, 2, 1, dtype=U8).view(E4M3) for _ in "kv"), **fields)


def append(cache: Callable[[], KVCacheTarget], places: Any, **changes: Any) -> Callable[[], Arguments]:
    return lambda: {"q": rows(3, 4, 16), **TOKENS, "cache": cache(), "places": places} | changes


def append_rotated() -> Arguments:
    """All that one launch does to rows that stay in 16 bits."""
    norm = RMSNorm(rows(4, 16, seed=4), rows(16, seed=5))
    return append(
        lambda: target(BF16), ints(5, -1, 9), norm=norm, rope=ROPE, out=QueryOutput(torch.zeros(3, 4, 16).bfloat16())
    )()


def append_e4m3() -> Arguments:
    out = QueryOutput(torch.zeros(3, 4, 16).to(E4M3), scale=torch.tensor([1.0, 2.0, 0.5, 4.0]))
    return append(lambda: target(E4M3, k_scale=TWO, v_scale=ONE), torch.tensor([5, -1, 9]), rope=ROPE, out=out)()


def nvfp4_append(function: str) -> Callable[[], Arguments]:
    changes = {"append_key": TOKENS["k"], "append_value": TOKENS["v"], "k_scale": ONE, "v_scale": torch.tensor([2.0])}
    return lambda: good_calls.appended(function) | changes


def append_paged() -> Arguments:
    given = good_calls.appended("append_paged_kv_cache")
    caches = tuple(t.contiguous() for t in given["paged_kv_cache"].unbind(1))
    return given | {"append_key": TOKENS["k"], "append_value": TOKENS["v"], "paged_kv_cache": caches}


# ---- latent caches

TURN = RotaryEmbedding(ints(3, 0, 7), rows(9, 64, dtype=torch.float32, seed=3))
SLOTS = torch.tensor([5, -1, 9])


def latent(function: str, **changes: Any) -> Callable[[], Arguments]:
    """A call with random rows."""

    def make() -> Arguments:
        given = good_calls.latent(function)
        for seed, (name, t) in enumerate(given.items()):
            if isinstance(t, torch.Tensor) and t.dtype == BF16 and t.any():
                given[name] = rows(*t.shape, seed=seed)
        return given | {name: value() if callable(value) else value for name, value in changes.items()}

    return make


def latent_cache(record: str, width: int, dtype: torch.dtype = U8, **fields: Any) -> Callable[[], LatentCache]:
    return lambda: LatentCache(torch.zeros(6, 4, width, dtype=dtype), record, **fields)


def indexer() -> IndexerRows:
    cache, weights = torch.zeros(6, 4, 132, dtype=U8), rows(3, 4, dtype=torch.float32, seed=9)
    return IndexerRows(
        rows(3, 128, seed=5), cache, torch.tensor([2, 7, -1]), rows(128, seed=6), rows(128, seed=7), rope=TURN,
        q=rows(3, 4, 128, seed=8), weights=weights, q_out=torch.zeros(3, 4, 128).to(E4M3),
        weights_out=torch.zeros(3, 4),
    )  # fmt: skip


def rotated_latent() -> Arguments:
    query = LatentQuery(rows(3, 4, 512, seed=2), rows(3, 4, 64, seed=3), torch.zeros(3, 4, 576).bfloat16())
    made = latent("append_latent", norm=LatentNorm(rows(512, seed=4)), rope=TURN, query=query, index=indexer)
    return made() | {"rotated_out": torch.zeros(3, 64).bfloat16()}


def latent_in_two() -> Arguments:
    cache = LatentCache(torch.zeros(6, 4, 512).to(E4M3), "e4m3", torch.zeros(6, 4, 64).to(E4M3), ONE)
    query = LatentQuery(rows(3, 4, 512, seed=2), rows(3, 4, 64, seed=3), dtype=E4M3, scale=torch.tensor([2.0]))
    return latent("append_latent", cache=cache, places=PAGE_LISTS, query=query)()


def gathered(function: str, **changes: Any) -> Callable[[], Arguments]:
    """A call that reads a cache of random bytes."""

    def make() -> Arguments:
        given = good_calls.gathered(function)
        given |= {name: value() if callable(value) else value for name, value in changes.items()}
        for name in ("cache", "src_cache", "kv_cache"):
            cache = given.get(name)
            held = cache.cache if isinstance(cache, LatentCache) else cache
            if isinstance(held, torch.Tensor) and held.dtype == U8:
                held.copy_(torch.randint(0x7E, held.shape, generator=torch.Generator().manual_seed(4)))
        return given

    return make


def joined_e5m2() -> Arguments:
    return {name: t.to(torch.float8_e5m2) for name, t in latent("concat_mla_k")().items()}


# ---- others


def states(v: str, s: str, *shape: int, seed: int = 0) -> Arguments:
    """V and S of integers: their weighted sums are exact, so that a kernel may add states in another order."""
    found = {v: rows(*shape, dtype=torch.float32, seed=seed), s: rows(*shape[:-1], dtype=torch.float32, seed=seed + 1)}
    return {name: (4 * t).round() for name, t in found.items()}


def page_table() -> Arguments:
    case = replace(topk_cases.PLAIN[topk_cases.PAGE_TABLE], batch_map=True, starts=True, page_size=2)
    return topk_cases.make_inputs(case)


def top_k_of(function: str, **changes: Any) -> Callable[[], Arguments]:
    return lambda: topk_cases.make_inputs(replace(topk_cases.PLAIN[function], **changes))


def persistent() -> Arguments:
    return as_persistent(topk_cases.make_inputs(topk_cases.PLAIN[topk_cases.RAGGED]))


def dequantised() -> Arguments:
    data, scales = fp4.nvfp4_quantize(rows(4, 64))
    return {"data": data, "scales": scales, "global_scale": torch.tensor([2.0])}


NVFP4_LATENT = "nvfp4_quantize_append_paged_mla_kv_cache"
ROPE_APPEND = "rope_quantize_fp8_append_paged_kv_cache"
FLASH_MLA, TRTLLM_MLA = good_calls.MLA
RAGGED_MLA = "trtllm_ragged_attention_deepseek"
DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
RICH: dict[str, dict[str, Callable[[], Arguments]]] = {  # function -> name of a call -> its arguments, made anew
    CONTEXT: {
        "plain": table("context", SMALL, **SLOPES), "scales": table("context", SCALED),
        "factors": table("context", BY_TOKEN), "factors by another name": by_another_name,
        "separate tables": table("context", replace(SMALL, separate_tables=True, lse=False)),
    },
    DECODE: {
        "plain": table("decode", SMALL), "drafts": table("decode", replace(EQUAL, device=("scale", "out"))),
        "log2": table("decode", replace(SCALED, device=("log2", "out"))), "nvfp4": table("decode", NVFP4),
        "nvfp4 out": table("decode", replace(SMALL, out_dtype="nvfp4", lse=False)),
    },
    "xqa": {
        "plain": xqa(replace(SMALL, q_lens=(1, 1), sink=1.0, device=("scale", "out"))),
        "drafts, nvfp4": xqa(replace(SMALL, drafts=True, kv_dtype="nvfp4")),
    },
    "xqa_batch_decode_with_kv_cache": {
        "plain": xqa_batch(device=("scale", "out")), "nvfp4": xqa_batch(kv_dtype="nvfp4"),
        "drafts": xqa_batch_of_drafts,
    },
    "trtllm_fmha_v2_prefill": {"plain": fmha},
    "single_prefill_with_kv_cache": {
        "plain": lambda: single(causal=True),
        "e4m3": lambda: e4m3_single("q_scale", "k_scale", "v_scale"),
        "e4m3 by other names": lambda: e4m3_single("scale_q", "scale_k", "scale_v"),
        "mask": lambda: single(custom_mask=rows(3, 20).float() > -0.5),
        "packed mask": lambda: single(packed_custom_mask=torch.tensor([255, 7, 191, 254, 63, 15, 1, 255]).byte()),
        "nvfp4": packed_single,
    },
    "single_prefill_with_kv_cache_return_lse": {"plain": lambda: single(causal=True, pos_encoding_mode="ROPE_LLAMA")},
    "single_decode_with_kv_cache": {
        "plain": lambda: single(2) | {name: t[:1] for name, t in SCALES.items()} | {"v_scale": torch.tensor([2.0])},
    },
    "flash_attn_varlen_func": {
        "ragged": lambda: ragged(s_aux=SINK, out=torch.zeros_like(BATCH.q)), "e4m3": ragged_e4m3,
        "block table": lambda: paged(block_table=BATCH.table.clamp(min=0), sinks=SINK.half()),
        "page table": lambda: paged(page_table=BATCH.table.clamp(min=0), learnable_sink=SINK),
        "latent": lambda: latent_qv("flash_attn_varlen_func"),
    },
    "flash_attn_with_kvcache": {
        "entries": lambda: cached(s_aux=SINK, out=torch.zeros(2, 2, 4, 64).half()), "e4m3": cached_e4m3,
        "new rows": lambda: cached(**new_rows(1), sinks=SINK),
        "rotated": lambda: appended_to_pages() | {name: t for name, t in rotary().items() if name[0] == "r"},
        "padding": lambda: cached(cache_leftpad=ints(1, 2), learnable_sink=SINK),
        "block table": lambda: cached(block_table=ints(2, 0)[:, None], cache_batch_idx=None, **rotary()),
        "latent": lambda: latent_qv("flash_attn_with_kvcache"),
    },
    "flash_attn_func": {
        "plain": lambda: dense(s_aux=SINK, out=torch.zeros(2, 2, 4, 64).half()), "e4m3": dense_e4m3,
        "sinks": lambda: dense(sinks=SINK), "other sinks": lambda: dense(learnable_sink=SINK),
    },
    FLASH_MLA: {
        "plain": flash_mla,
        "sinks": lambda: flash_mla(attn_sink=SINK, causal=False, out=torch.zeros(2, 2, 4, 512).bfloat16()),
        "chosen": chosen_mla, "two caches": two_caches, "packed": lambda: packed_mla("656"),
        "packed caches": packed_caches, "e4m3": e4m3_mla, "e4m3 queries": e4m3_queries_mla,
    },
    TRTLLM_MLA: {
        "plain": lambda: trtllm_mla(lse=torch.zeros(4, 4)), "ragged": ragged_mla, "sparse": sparse_mla,
        "sinks": lambda: trtllm_mla(sinks=SINK, out=torch.zeros(2, 2, 4, 512).bfloat16()),
    },
    good_calls.XQA_MLA: {
        "plain": lambda: trtllm_mla(sinks=SINK, out=torch.zeros(2, 2, 4, 512).bfloat16()),
        "scales": lambda: trtllm_mla(bmm1_scale=ONE, bmm2_scale=torch.tensor([2.0])),
    },
    topk_cases.TOP_K: {"plain": top_k_of(topk_cases.TOP_K, sorted=True)},
    topk_cases.PAGE_TABLE: {"plain": page_table},
    topk_cases.RAGGED: {"plain": top_k_of(topk_cases.RAGGED, starts=True)},
    topk_cases.PREFILL: {"plain": top_k_of(topk_cases.PREFILL, starts=True)},
    topk_cases.DECODE: {"plain": top_k_of(topk_cases.DECODE)},
    "persistent_topk": {"plain": persistent},
    "cooperative_topk": {"plain": persistent},
    "append_qkv": {
        "rotated": append_rotated, "e4m3": append_e4m3,
        "copied": append(lambda: target(BF16), ints(5, -1, 9), q=None),
        "by token": append(lambda: target(E4M3, sf=tuple(torch.zeros(6, 4, 2) for _ in "kv")), PAGE_LISTS),
        "nvfp4": append(lambda: packed(k_scale=ONE, v_scale=TWO),
                        BlockTable(ints(3, 1, 2, 0).view(2, 2), ints(6, 5), ints(0, 2, 3)), q=None),
    },
    "append_paged_kv_cache": {"plain": append_paged},
    **{name: {"plain": nvfp4_append(name)} for name in (
        "nvfp4_quantize_append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping")},
    "nvfp4_quantize": {"plain": lambda: {"x": rows(3, 2, 64), "global_scale": torch.tensor([2.0])}},
    "nvfp4_dequantize": {"plain": dequantised},
    "append_latent": {
        "rotated": rotated_latent, "in two, e4m3": latent_in_two,
        "table": latent("append_latent", cache=latent_cache("584", 584), latent=lambda: rows(3, 448),
                        index=lambda: IndexerRows(rows(3, 128, seed=5), torch.zeros(6, 4, 132, dtype=U8)),
                        places=BlockTable(ints(3, 1, 2, 0).view(2, 2), ints(6, 5), ints(0, 2, 3))),
        "352": latent("append_latent", cache=latent_cache("352", 352)),
    },
    "concat_and_cache_mla": {
        "656": latent("concat_and_cache_mla"),
        "fp8": latent("concat_and_cache_mla", kv_cache=lambda: torch.zeros(6, 4, 576, dtype=U8), kv_cache_dtype="fp8",
                      scale=torch.tensor([0.5])),
    },
    "concat_and_cache_mla_rope_fused": {"plain": latent(
        "concat_and_cache_mla_rope_fused", cos_sin_cache=lambda: rows(9, 64, dtype=torch.float32, seed=7))},
    **{name: {"plain": latent(name)} for name in (
        "append_paged_mla_kv_cache", "concat_mla_q", "indexer_k_quant_and_cache")},
    NVFP4_LATENT: {
        "plain": latent(NVFP4_LATENT),
        "scale tensors": latent(NVFP4_LATENT, ckv_scale=torch.tensor([0.5]), kpe_scale=torch.tensor([0.25]))},
    **{name: {"plain": gathered(name)} for name in good_calls.GATHERS[3:]},
    **{name: {"starts": gathered(name, seq_starts=ints(3, 2))} for name in good_calls.GATHERS[1:4]},
    "gather_latent": {
        "584": gathered("gather_latent", cache=latent_cache("584", 584), out=lambda: torch.zeros(7, 512).bfloat16()),
        "starts": gathered("gather_latent", seq_starts=ints(3, 2)),
        "rows": gathered("gather_latent", cache=lambda: LatentCache(rows(6, 4, 576))),
    },
    "concat_mla_k": {"bf16": latent("concat_mla_k"), "e5m2": joined_e5m2},
    ROPE_APPEND: {
        "plain": lambda: rope_calls.good_call(ROPE_APPEND), "latent": rope_calls.latent_append,
        "latent, e5m2": lambda: rope_calls.latent_append(quantize_dtype=torch.float8_e5m2)},
    "merge_state": {"plain": lambda: states("v_a", "s_a", 3, 2, 8) | states("v_b", "s_b", 3, 2, 8, seed=2)},
    "merge_state_in_place": {"plain": lambda: {
        **states("v", "s", 3, 2, 8), **states("v_other", "s_other", 3, 2, 8, seed=2),
        "mask": torch.tensor([True, False, True])}},
    "merge_states": {"plain": lambda: states("v", "s", 3, 4, 2, 8)},
    good_calls.SPARSE_FWD: {
        "plain": lambda: good_calls.sparse_fwd() | {
            "topk_length": ints(16, 9, 0, 3, 16), "out": torch.zeros(5, 8, 512).bfloat16()},
        "two tensors": lambda: good_calls.sparse_fwd() | {
            "extra_kv": rows(9, 1, 576, seed=3), "extra_indices": ints(*range(15)).view(5, 1, 3),
            "extra_topk_length": ints(3, 2, 1, 0, 3)},
        "e4m3": lambda: good_calls.sparse_fwd() | {
            "q": good_calls.sparse_fwd()["q"].to(E4M3), "kv": rows(40, 1, 576, dtype=E4M3),
            "descale_q": torch.tensor([0.5]), "descale_k": torch.tensor([2.0])},
    },
    **{name: {"plain": lambda name=name: good_calls.dsa(name) | {"topk_length": ints(16, 9, 0, 3, 16)}}
       for name in good_calls.DSA},
    "sparse_paged_attention": {
        "plain": lambda: good_calls.sparse_paged() | {
            "counts": ints(16, 0, 9), "bmm1_scale": torch.tensor([0.1]), "bmm2_scale": torch.tensor([2.0]),
            "out": torch.zeros(3, 4, 64).bfloat16(), "lse": torch.zeros(3, 4)},
    },
    RAGGED_MLA: {
        "plain": lambda: good_calls.ragged_mla() | {
            "bmm1_scale": torch.tensor([0.1]), "bmm2_scale": torch.tensor([2.0]), "attention_sinks": SINK},
    },
    "select_slots": {"plain": lambda: good_calls.two_tables() | {"out": torch.zeros(2, 3, 16).int()}},
    "select_rows": {"plain": lambda: good_calls.selected("select_rows") | {"out": torch.zeros(5, 16).int()}},
    good_calls.SEGMENTS: {"plain": lambda: good_calls.segments() | {
        "q_causal_offsets": ints(8, 20).long(), "indices": torch.zeros(5, 16).int(), "scores": torch.zeros(5, 16)}},
    "packbits": {"plain": lambda: {"x": rows(9).float() > 0, "bitorder": "little"}},
    "segment_packbits": {"plain": lambda: {"x": rows(9).float() > 0, "indptr": ints(0, 4, 9), "bitorder": "little"}},
}  # fmt: skip
# Tensors that only hints or unsupported modes take: no call reads them.
UNREAD = {
    "token_to_seq", "host_cache", "host_row_ids", "device_row_ids",
    "workspace_buffer", "semaphores", "workspace", "cum_seq_lens_kv", "multi_ctas_kv_counter_buffer", "request_order",
    "causal_seqlens_kv_global", "max_seqlen_k", "num_splits", "schedule_meta", "indices",
    "clean_logits",  # which is indices, if it is a tensor
    "q_seq_lens_cpu", "kv_seq_lens_cpu", "sage_attn_sfs",
}  # fmt: skip

UNREAD_BY = {(RAGGED_MLA, "seq_lens")}  # likewise, of a function


def calls_of(name: str) -> dict[str, Callable[[], Arguments]]:
    """Return the calls of a public function: name of a call -> its arguments, made anew."""
    if name in RICH:
        return RICH[name]
    make = rope_calls.good_call if name in rope_calls.NAMES else good_calls.inputs_of
    return {"plain": lambda: make(name)}


FUNCTION = {row.name: getattr(wrappers, row.name) for row in FUNCTIONS}
CALLS = {(function, call): make for function in FUNCTION for call, make in calls_of(function).items()}


def tensors_taken(function: str) -> list[str]:
    """Return the parameters of a public function that may be tensors, by their types."""
    shown = inspect.signature(FUNCTION[function]).parameters.values()
    return [p.name for p in shown if "Tensor" in str(p.annotation)]


UNSERVED = {("single_prefill_with_kv_cache", "nvfp4")}  # by no kernel, on the CPU alone
_DESCALES, _LOGITS = {"q_descale", "k_descale", "v_descale"}, {"logits"}
STRICT: dict[str, set[str]] = {  # function -> tensors for which whole, aligned rows are not enough
    DECODE: {"out scale"}, "xqa": {"seq_lens"}, "flash_attn_varlen_func": _DESCALES,
    **dict.fromkeys((*good_calls.MLA, good_calls.XQA_MLA), {"out"}),
    "flash_attn_with_kvcache": _DESCALES | {"out", "k_cache", "v_cache"}, "flash_attn_func": _DESCALES | {"out"},
    topk_cases.PREFILL: _LOGITS, topk_cases.DECODE: _LOGITS,  # strides are arguments of their own
    "append_qkv": {"norm q_weight"},
    "append_latent": {"cache cache", "index cache"}, "indexer_k_quant_and_cache": {"kv_cache"},  # rows of a page
    "gather_latent": {"cache cache"}, "cp_gather_indexer_k_quant_cache": {"kv_cache"},  # likewise
    **dict.fromkeys(("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits"), {"kv_cache"}),  # likewise
    "select_slots": {"kv_cache", "out"},
}  # fmt: skip
PLANAR = {(FLASH_MLA, "packed caches"): {"k_cache", "extra_k_cache"}}  # likewise, of one call


def strict(function: str, call: str) -> set[str]:
    """Return the tensors of a call for which whole, aligned rows are not enough."""
    return STRICT.get(function, set()) | PLANAR.get((function, call), set())
