"""Calls of the public attention functions for `tools.refusals`: tensors on the CPU, of which nothing is computed.

A `Wanted` says what a call must have; each function here makes the arguments of one public function for it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.records import RECORDS

TYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}  # fmt: skip
BATCH, PAGES, COLUMNS = 2, 4, 2  # requests; pages of a cache; pages of a request
VALUES = 512  # columns of V of latent attention


@dataclass(frozen=True)
class WantedAttention:
    """A call of attention.

    q: type of the queries. tokens: of each request. window: keys before a token. whole: no request's keys are split.
    others: further arguments of the function, by name.
    """

    q: str = "bf16"
    tokens: int = 1
    causal: bool = True
    window: int = -1
    cap: float = 0.0
    sinks: bool = False
    lse: bool = False
    whole: bool = False
    others: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Wanted(WantedAttention):
    """A call with K and V per head.

    kv, out: types; kv may also be "nvfp4"; "": the query's, or the function's choice. by_token: K and V have a scale
    per token and head. dims: of a head, of Q and K and of V. page: rows of a page. heads: of queries, and of K and V.
    mask: "drafts" or "bits". position: "alibi" or "rope".
    """

    kv: str = ""
    out: str = ""
    by_token: bool = False
    dims: tuple[int, int] = (128, 128)
    page: int = 16
    heads: tuple[int, int] = (8, 2)
    skip: bool = False
    mask: str = ""
    position: str = ""


@dataclass(frozen=True)
class WantedLatent(WantedAttention):
    """A call of latent attention.

    record: of the cache, a key of `records.RECORDS`; "rows": the query's type. dim: columns of K. page: rows of a page.
    chosen: each token chooses keys. second: the record of a second cache. share: neighbouring tokens share keys.
    """

    record: str = "rows"
    dim: int = 576
    page: int = 64
    heads: int = 16
    chosen: bool = False
    second: str = ""
    share: bool = False


@dataclass(frozen=True)
class WantedLogits:
    """A call of the indexer. page: rows of a page, in decode. tokens: of a request."""

    q: str = "e4m3"
    heads: int = 64
    dim: int = 128
    page: int = 64
    tokens: int = 1
    keys: int = 200
    out: str = ""
    others: tuple[tuple[str, Any], ...] = ()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def codes_of(w: Wanted, *shape: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows of K or V, which end with the elements of a head, and their scales, if they have any."""
    kv = w.kv or w.q
    if kv == "nvfp4":
        packed = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
        return packed, torch.empty(*shape[:-1], shape[-1] // 16, dtype=torch.uint8)
    return torch.empty(shape, dtype=TYPES[kv]), torch.empty(shape[:-1]) if w.by_token else None


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a page table, and lengths that need one page."""
    return torch.arange(BATCH * COLUMNS, dtype=torch.int32).view(BATCH, COLUMNS), torch.full((BATCH,), 1).int()


def query(w: Wanted) -> torch.Tensor:
    return torch.empty(BATCH * w.tokens, w.heads[0], w.dims[0], dtype=TYPES[w.q])


def paged(w: Wanted) -> dict[str, Any]:
    """Return what trtllm's two functions have in common."""
    k, k_scales = codes_of(w, PAGES, w.heads[1], w.page, w.dims[0])
    v, v_scales = codes_of(w, PAGES, w.heads[1], w.page, w.dims[1])
    table, lens = tables()
    given: dict[str, Any] = {
        "query": query(w), "kv_cache": (k, v), "workspace_buffer": None, "block_tables": table,
        "seq_lens": lens * w.tokens, "bmm1_scale": 1.0, "bmm2_scale": 1.0, "window_left": w.window,
        "sinks": torch.empty(w.heads[0]) if w.sinks else None, "return_lse": w.lse, "logits_soft_cap": w.cap or None,
        "skip_softmax_threshold_scale_factor": 1.0 if w.skip else None,
    }  # fmt: skip
    given |= output(w)
    if k_scales is not None:
        given["kv_cache_sf"] = k_scales, v_scales
    return given | dict(w.others)


def output(w: Wanted) -> dict[str, Any]:
    """Return the arguments of an output that the function makes."""
    if w.out == "nvfp4":
        return {"out_dtype": "nvfp4", "o_sf_scale": 1.0}
    return {"out_dtype": TYPES[w.out or "bf16"]} if w.out or w.q in ("e4m3", "e5m2") else {}


def offsets(w: Wanted) -> torch.Tensor:
    return torch.arange(BATCH + 1, dtype=torch.int32) * w.tokens


def context(w: Wanted) -> dict[str, Any]:
    ends, slopes = offsets(w), torch.ones(w.heads[0]) if w.position == "alibi" else None
    return paged(w) | {
        "max_q_len": w.tokens, "max_kv_len": w.tokens, "batch_size": BATCH, "cum_seq_lens_q": ends,
        "cum_seq_lens_kv": ends, "causal": w.causal, "alibi_slopes": slopes,
    }  # fmt: skip


def decode(w: Wanted) -> dict[str, Any]:
    drafts = torch.empty(BATCH, w.tokens, 2, dtype=torch.uint16) if w.mask else None
    return paged(w) | {"max_seq_len": w.tokens, "q_len_per_req": w.tokens, "mask": drafts, "batch_invariant": w.whole}


def xqa(w: Wanted) -> dict[str, Any]:
    given, q = paged(w), query(w)
    if w.tokens > 1:
        q = q.view(BATCH, 1, w.tokens, *q.shape[1:])
    else:
        q = q.view(BATCH, 1, *q.shape[1:])
    scales = dict(zip(("k_sf_cache", "v_sf_cache"), given.get("kv_cache_sf", ())))
    return {
        "q": q, "k_cache": given["kv_cache"][0], "v_cache": given["kv_cache"][1], "page_table": given["block_tables"],
        "seq_lens": given["seq_lens"].view(-1, 1),
        "output": torch.empty(*q.shape[:-1], w.dims[1], dtype=TYPES[w.out or w.q]),
        "workspace_buffer": None, "semaphores": None, "num_kv_heads": w.heads[1], "page_size": w.page,
        "sinks": torch.empty(w.heads[1], w.heads[0] // w.heads[1]) if w.sinks else None,
        "sliding_win_size": w.window + 1, "kv_layout": "HND", "q_seq_len": w.tokens,
        "mask": torch.empty(BATCH, w.tokens, 2, dtype=torch.uint16) if w.mask else None, "batch_invariant": w.whole,
        **scales, **dict(w.others),
    }  # fmt: skip


def flash_attention(w: Wanted) -> dict[str, Any]:
    """Return the options that FlashAttention's functions share."""
    sinks = torch.empty(w.heads[0]) if w.sinks else None
    return {
        "causal": w.causal, "window_size": (w.window, 0 if w.causal else -1), "softcap": w.cap, "s_aux": sinks,
        "return_softmax_lse": w.lse, "num_splits": 1 if w.whole else 0, **dict(w.others),
    }  # fmt: skip


def varlen(w: Wanted) -> dict[str, Any]:
    table, lens = tables()
    k, v = (codes_of(w, PAGES, w.page, w.heads[1], dim)[0] for dim in w.dims)
    return {
        "q": query(w), "k": k, "v": v, "cu_seqlens_q": offsets(w), "max_seqlen_q": w.tokens, "max_seqlen_k": w.tokens,
        "seqused_k": lens * w.tokens, "block_table": table,
    } | flash_attention(w)  # fmt: skip


def kvcache(w: Wanted) -> dict[str, Any]:
    table, lens = tables()
    k, v = (codes_of(w, PAGES, w.page, w.heads[1], dim)[0] for dim in w.dims)
    q = query(w).unflatten(0, (BATCH, -1))
    given = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lens * w.tokens, "block_table": table}
    return given | flash_attention(w)


def single(w: Wanted) -> dict[str, Any]:
    k, v = (codes_of(w, BATCH * w.tokens, w.heads[1], dim)[0] for dim in w.dims)
    n = BATCH * w.tokens
    return {
        "q": query(w), "k": k, "v": v, "causal": w.causal, "window_left": w.window, "logits_soft_cap": w.cap or None,
        "return_lse": w.lse, "custom_mask": torch.ones(n, n, dtype=torch.bool) if w.mask else None,
        "pos_encoding_mode": {"alibi": "ALIBI", "rope": "ROPE_LLAMA"}.get(w.position, "NONE"),
        "o_dtype": TYPES[w.out or "bf16"] if w.out or w.q in ("e4m3", "e5m2") else None, **dict(w.others),
    }  # fmt: skip


def ragged(w: Wanted) -> dict[str, Any]:
    k, v = (codes_of(w, BATCH * w.tokens, w.heads[1], dim)[0] for dim in w.dims)
    tokens, heads = BATCH * w.tokens, w.heads[0]
    return {
        "query": query(w), "key": k, "value": v, "workspace_buffer": None, "seq_lens": None, "max_q_len": w.tokens,
        "max_kv_len": w.tokens, "bmm1_scale": 1.0, "bmm2_scale": 1.0, "o_sf_scale": None, "batch_size": BATCH,
        "window_left": w.window, "cum_seq_lens_q": offsets(w), "cum_seq_lens_kv": offsets(w), "enable_pdl": None,
        "is_causal": w.causal, "return_lse": w.lse, "attention_sinks": torch.empty(heads) if w.sinks else None,
        "skip_softmax_threshold_scale_factor": 1.0 if w.skip else None,
        "out": torch.empty(tokens, heads, w.dims[1], dtype=TYPES[w.out or "bf16"]), **dict(w.others),
    }  # fmt: skip


def sparse(w: Wanted) -> dict[str, Any]:
    cache = tuple(codes_of(w, PAGES, w.heads[1], w.page, dim)[0] for dim in w.dims)
    q = query(w)
    return {
        "q": q, "kv_cache": cache, "indices": torch.zeros(len(q), 8).int(), "kv_layout": "HND", "return_lse": w.lse,
        "logits_soft_cap": w.cap or None, "sinks": torch.empty(w.heads[0]) if w.sinks else None,
        "batch_invariant": w.whole, **output(w), **dict(w.others),
    }  # fmt: skip


# ---- latent attention


def latent_rows(w: WantedLatent, record: str) -> torch.Tensor:
    """Return a cache (pages, rows, columns or bytes)."""
    form = RECORDS[record]
    if form.packed:
        return torch.empty(PAGES, w.page, form.token_bytes, dtype=torch.uint8)
    return torch.empty(PAGES, w.page, w.dim, dtype=TYPES["e4m3" if form.codes else w.q])


def latent_query(w: WantedLatent) -> torch.Tensor:
    return torch.empty(BATCH, w.tokens, w.heads, w.dim, dtype=TYPES[w.q])


def flash_mla(w: WantedLatent) -> dict[str, Any]:
    cache, (table, lens) = latent_rows(w, w.record), tables()
    slots = torch.zeros(BATCH, w.tokens, 64).int() if w.chosen else None
    given = {
        "q": latent_query(w), "k_cache": cache.unsqueeze(2), "block_table": table, "cache_seqlens": lens * w.tokens,
        "head_dim_v": VALUES, "softmax_scale": 0.1, "causal": w.causal and not w.chosen, "indices": slots,
        "is_fp8_kvcache": w.record != "rows", "attn_sink": torch.empty(w.heads) if w.sinks else None,
        "enable_batch_invariant": w.whole, "descale_k": 1.0 if w.record == "e4m3" else None,
        "descale_q": 1.0 if w.q == "e4m3" else None, **dict(w.others),
    }  # fmt: skip
    if w.second:
        given |= {"extra_k_cache": latent_rows(w, w.second).unsqueeze(2), "extra_indices_in_kvcache": slots}
    return given


def trtllm_mla(w: WantedLatent) -> dict[str, Any]:
    cache, (table, lens) = latent_rows(w, w.record), tables()
    return {
        "query": latent_query(w), "kv_cache": cache, "workspace_buffer": None, "qk_nope_head_dim": 128,
        "kv_lora_rank": VALUES, "qk_rope_head_dim": w.dim - VALUES, "seq_lens": None if w.chosen else lens * w.tokens,
        "block_tables": torch.zeros(BATCH, w.tokens, 64).int() if w.chosen else table, "max_seq_len": w.tokens,
        "sparse_mla_top_k": 64 if w.chosen else 0, "bmm1_scale": 0.1, "return_lse": w.lse,
        "sinks": torch.empty(w.heads) if w.sinks else None, **dict(w.others),
    }  # fmt: skip


def qv(w: WantedLatent) -> dict[str, Any]:
    (parts, rest), (v, k) = (
        t.split([VALUES, w.dim - VALUES], -1) for t in (latent_query(w), latent_rows(w, w.record).unsqueeze(2))
    )
    table, lens = tables()
    return {
        "q": rest, "k_cache": k, "v_cache": v, "cache_seqlens": lens * w.tokens, "block_table": table, "qv": parts,
        "softmax_scale": 0.1, "causal": w.causal, "window_size": (w.window, -1), "softcap": w.cap,
        "s_aux": torch.empty(w.heads) if w.sinks else None, "return_softmax_lse": w.lse,
        "num_splits": 1 if w.whole else 0, **dict(w.others),
    }  # fmt: skip


def sparse_fwd(w: WantedLatent) -> dict[str, Any]:
    def rows(record: str) -> torch.Tensor:
        cache = latent_rows(w, record)
        return cache.unsqueeze(2) if RECORDS[record].planar else cache.flatten(0, 1).unsqueeze(1)

    q = latent_query(w).flatten(0, 1)
    slots = torch.zeros(len(q), 1, 64).int()
    given = {
        "q": q, "kv": rows(w.record), "indices": slots, "sm_scale": 0.1, "share_keys": w.share,
        "attn_sink": torch.empty(w.heads) if w.sinks else None, "descale_k": 1.0 if w.record == "e4m3" else None,
        "descale_q": 1.0 if w.q == "e4m3" else None, **dict(w.others),
    }  # fmt: skip
    return given | ({"extra_kv": rows(w.second), "extra_indices": slots} if w.second else {})


def dsa(w: WantedLatent) -> dict[str, Any]:
    (q, q_rope), (k, k_rope) = (
        t.split([VALUES, w.dim - VALUES], -1)
        for t in (latent_query(w).flatten(0, 1), latent_rows(w, w.record).flatten(0, 1))
    )
    slots = torch.zeros(len(q), 64).int()
    given = {"q_latent": q, "q_rope": q_rope, "kv_latent": k, "k_rope": k_rope, "indices": slots}
    return given | {"return_lse": w.lse, **dict(w.others)}


# ---- the indexer


def logits_query(w: WantedLogits, *batch: int) -> torch.Tensor:
    dtype = torch.int8 if w.q == "fp4" else TYPES[w.q]
    return torch.empty(*batch, w.heads, w.dim // 2 if w.q == "fp4" else w.dim, dtype=dtype)


def prompt_logits(w: WantedLogits) -> dict[str, Any]:
    n = BATCH * w.tokens
    keys = torch.empty(w.keys, w.dim, dtype=TYPES["e4m3"]), torch.empty(w.keys)
    ends = torch.full((n,), w.keys).int()
    return {
        "q": logits_query(w, n), "kv": keys, "weights": torch.empty(n, w.heads), "cu_seq_len_k_start": 0 * ends,
        "cu_seq_len_k_end": ends, **dict(w.others),
    }  # fmt: skip


def paged_logits(w: WantedLogits) -> dict[str, Any]:
    columns = -(-w.keys // w.page)
    return {
        "q": logits_query(w, BATCH, w.tokens), "weights": torch.empty(BATCH * w.tokens, w.heads),
        "kv_cache": torch.empty(PAGES, w.page, 1, w.dim + 4, dtype=torch.uint8),
        "context_lens": torch.full((BATCH,), w.keys).int(), "block_table": torch.zeros(BATCH, columns).int(),
        "schedule_meta": None, "max_context_len": w.keys, **dict(w.others),
    }  # fmt: skip


def chosen_slots(w: WantedLogits) -> dict[str, Any]:
    given = paged_logits(w)
    del given["schedule_meta"]
    return given | {"top_k": 64}


def chosen_rows(w: WantedLogits) -> dict[str, Any]:
    return prompt_logits(w) | {"top_k": 64}


def segments(w: WantedLogits) -> dict[str, Any]:
    n = BATCH * w.tokens
    return {
        "q": logits_query(w, n), "k": torch.empty(w.keys, w.dim, dtype=TYPES["bf16"]), "w": torch.empty(n, w.heads),
        "cu_seqlens_q": ints(0, n), "cu_seqlens_k": ints(0, w.keys), "top_k": 64, "softmax_scale": 0.1,
        **dict(w.others),
    }  # fmt: skip
