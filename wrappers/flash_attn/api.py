"""FlashAttention's inference functions, as vLLM, SGLang and Hugging Face call them.

The names are those of versions 2, 3 and 4 and of the engines' own copies. Arguments that these versions order
differently are keywords here; an argument with several names accepts any one of them. Two tables hold the rest: `HINTS`
may have any value and change no result; `REFUSED` ask for something that no kernel here does, and raise
NotImplementedError unless they are None or have the listed value.

Nothing waits for the device: lengths stay there, max_seqlen_q may be a tensor, which is not read, and all calls can be
captured.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from ..attention.call import AttentionCall, SequenceBatch, TableLayout, ragged_sequences, sequences_of
from ..attention.checks import EIGHT_BITS, HEAD_SCALES, SIGNATURES
from ..attention.op import serve
from ..attention.views import VIEWED_PAGES, pair, rows_of, without_table
from ..host.checks import check_flag, check_integer, check_operand, check_shape, check_strided
from ..host.plain import traced
from ..host.scalars import integer, number, real, times
from ..host.scratch import constant, filled
from . import gather
from .append import NewKeyValues, append, new_rows, rotary_of
from .descale import check_descale, each_head
from .leftpad import check_padding, padding_of, without_padding

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
FUNC, VARLEN, CACHED = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"
LN2 = 0.6931471805599453
TABLES, NEW = ("block_table", "page_table"), " + new keys"
HINTS = frozenset("""
    pack_gqa scheduler_metadata sm_margin deterministic fa_version ver max_seqlen_k min_seqlen_k seqlen_k_per_split
    disable_scheduler_metadata rotary_interleaved
""".split())  # fmt: skip
REFUSED: dict[str, Any] = dict.fromkeys("""
    alibi_slopes qv q_v output_scale cp_tot_seqused_k score_mod mask_mod aux_tensors aux_tensor_leading_dims aux_scalars
    block_sparse_tensors dynamic_causal gather_kv_indices gather_kv_valid_length sfq sfk sfv rel_bias
    rel_bias_prep_cache rotary_cos rotary_sin rotary_seqlens cache_leftpad seqused_q
""".split()) | {  # fmt: skip
    "dropout_p": 0.0, "return_attn_probs": False, "only_qv": False, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip
_LOGITS = {
    "scale": "softmax_scale", "soft_cap": "softcap", "out_scale": "v_descale", "max_q_len": "max_seqlen_q",
    "out_dtype": "out", "chunk": "attention_chunk", "kv_layout": "the order (..., rows, heads, head_dim)",
}  # fmt: skip
LATENT_QUERIES = ("qv", "q_v")
LAYOUTS = {name: TableLayout(name) for name in (*TABLES, "k")}
_Tensor = torch.Tensor


def _signature(function: str, table: str, lens: str) -> str:
    return f"{function}, {table}, {lens}"


def _latent_signature(signature: str, qv: str) -> str:
    return f"{signature} + {qv}"


for _table, _lens in product(TABLES, ("seqused_k", "cu_seqlens_k")):
    SIGNATURES[_signature(VARLEN, _table, _lens)] = _LOGITS | {
        "kv": "k, v", "page_table": _table, "kv_lens": _lens, "kv_starts": "cu_seqlens_k", "scales": "k, v",
    }  # fmt: skip
for _table, _lens in product(TABLES, ("cache_seqlens", f"cache_seqlens{NEW}")):
    SIGNATURES[_signature(CACHED, _table, _lens)] = _LOGITS | {
        "kv": "k_cache, v_cache", "k": "k_cache", "v": "v_cache", "page_table": _table, "kv_lens": _lens,
        "scales": "k_cache, v_cache",
    }  # fmt: skip
SIGNATURES[FUNC] = _LOGITS | {"kv": "k, v", "page_table": "k", "kv_lens": "k", "scales": "k, v", "max_q_len": "q"}
HEAD_SCALES |= {name for name in SIGNATURES if name.startswith((FUNC, VARLEN, CACHED))}
for _name in [name for name in SIGNATURES if name.startswith((VARLEN, CACHED)) and not name.endswith(NEW)]:
    _k, _v = ("k", "v") if _name.startswith(VARLEN) else ("k_cache", "v_cache")
    for _qv in LATENT_QUERIES:
        SIGNATURES[_latent_signature(_name, _qv)] = SIGNATURES[_name] | {
            "q": _qv, "q_rope": "q", "k_rope": _k, **dict.fromkeys(("kv", "k", "v", "shares_v"), _v)
        }  # fmt: skip
        if _name.startswith(VARLEN):
            gather.register(_latent_signature(_name, _qv))


class CachedCall(NamedTuple):
    """A call of `flash_attn_with_kvcache`: attention, as it is before its new keys are appended.

    new: keys and values that are appended first, or None. padding: cache_leftpad, or None.
    """

    attention: AttentionCall
    new: NewKeyValues | None
    padding: torch.Tensor | None


class RotatedParts(NamedTuple):
    """The columns of Q and K behind those of V, where V lies in K."""

    q_rope: torch.Tensor | None
    k_rope: torch.Tensor | None
    shares_v: bool


NOT_LATENT = RotatedParts(None, None, False)


class FlashAttnOptions(NamedTuple):
    """Arguments that all functions treat alike, as the caller gives them. sinks: by the argument's name."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    sinks: dict[str, Any]
    descales: tuple[Any, Any, Any]
    num_splits: Any
    out: Any
    attention_chunk: Any
    qv: tuple[str, Any] = ("", None)  # with its name


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None, *, seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int | None] | None = (-1, -1),
    softcap: float | None = 0.0, s_aux: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, num_splits: int = 0,
    out: torch.Tensor | None = None, return_softmax_lse: bool = False, return_lse: bool = False,
    attention_chunk: int = 0, **others: Any,
) -> Any:  # fmt: skip
    """Compute attention of ragged queries over ragged K and V, or over a paged cache that holds the queries' tokens.

    Positional arguments are those of FlashAttention 2 and 3.

    Args:
        q: (T, Hq, D) fp16, bf16 or e4m3, any token and head strides; request b owns rows cu_seqlens_q[b:b + 2].
        k, v: (N, Hkv, D), (N, Hkv, Dv), request b owning rows cu_seqlens_k[b:b + 2]; with a table (pages, P, Hkv, D),
            any page size P from 1 and any strides with 1 as the last. The dtype is q's; 16-bit q also takes e4m3 and
            e5m2.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,).
        block_table (or page_table): int32 (B, M). Entries past a request's last page are not read.
        seqused_k: int32 (B,), keys of each request; only with a table. None: the differences of cu_seqlens_k.
        max_seqlen_q: an upper bound of the query lengths; it steers the schedule and never changes the result. None or
            a tensor, which is not read: T. max_seqlen_k: a hint.
        softmax_scale: factor on the logits; None: 1 / sqrt(D).
        causal: row i of m sees keys up to i + n - m of n.
        window_size: (left, right); None or negative: unbounded. Keys from the row's position minus left on are seen.
            With causal, right is ignored; without, it must be 0, which means causal, or unbounded.
        attention_chunk: a row sees no key before its own chunk of this many positions, as in Llama 4; 0: off. Only with
            causal. No kernel of a bundle has it, so the first call compiles one.
        softcap: c * tanh(s / c); None or 0: off.
        s_aux (or sinks, learnable_sink): (Hq,), added to each head's softmax denominator; natural-log units, not
            scaled. fp32; fp16 and bf16 are cast to it at each call.
        q_descale, k_descale, v_descale: fp32 (B, Hkv), factors on q, k and v. They apply only to tensors of 8 bits, as
            in FlashAttention 3. They must be the same for all requests: one element, expanded over B, or B is 1. A
            tensor of one element may be on the host.
        num_splits: 1: CTAs do not share a request's keys, so its bits depend only on the request; slow if few requests
            have long keys. Other values are hints.
        out: (T, Hq, Dv) fp16, bf16 or e4m3, written and returned. None: a new tensor of q's dtype, or bf16 for 8-bit q.
        return_softmax_lse (or return_lse): whether to return the LSE too.
        others: `flash_attn.api.HINTS`, such as scheduler_metadata, pack_gqa and fa_version, with any value;
            `flash_attn.api.REFUSED`, such as dropout_p, alibi_slopes and rotary_cos, with a neutral value only; and qv
            (or q_v), (T, Hq, Dv) of q's dtype, fp16 or bf16: qv v^T is added to q k^T, as in FlashAttention 3 for
            latent attention. D is then 64 and Dv 512, and softmax_scale None means 1 / sqrt(D + Dv). Beside qv, and
            without a table, gather_kv_indices, int32 (T, K), as in FlashAttention 4: a token sees only the keys at
            these positions in its request, of which causal hides those behind its own. Another number is no key, and a
            position that comes twice counts twice. lse is then (T, Hq), as there. A window, a chunk or a soft cap is
            not served with it. Small torch operations make rows of the positions at each call.

    Returns out, or (out, lse): lse is fp32 (Hq, T), contiguous, the natural logarithm of the softmax denominator, sink
    included. A row without keys gives 0 and -inf, or the sink. Rows of no request are undefined.

    Raises before any launch: NotImplementedError for `REFUSED`, a right window, a descale that differs between
    requests, seqused_k without a table, or if no kernel serves the call; ValueError for a rank, shape, stride or
    device; TypeError for a dtype or type.

    >>> q, k, v = torch.randn(4, 8, 64).half(), torch.randn(9, 2, 64).half(), torch.randn(9, 2, 64).half()
    >>> starts, key_starts = torch.tensor([0, 3, 4]).int(), torch.tensor([0, 5, 9]).int()  # two requests
    >>> out, lse = flash_attn_varlen_func(q, k, v, starts, key_starts, 3, 5, causal=True, return_softmax_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([4, 8, 64]), torch.Size([8, 4]))
    >>> k, v = torch.randn(3, 16, 2, 64).half(), torch.randn(3, 16, 2, 64).half()  # 3 pages of 16 rows
    >>> table, lens = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([20, 9]).int()
    >>> flash_attn_varlen_func(q, k, v, starts, max_seqlen_q=3, seqused_k=lens, block_table=table, causal=True).shape
    torch.Size([4, 8, 64])
    """
    call = varlen_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k, block_table, page_table, softmax_scale, causal,
        window_size, softcap, s_aux, sinks, learnable_sink, q_descale, k_descale, v_descale, num_splits, out,
        return_softmax_lse, return_lse, attention_chunk, others,
    )  # fmt: skip
    return shaped(call, serve(call), q, out)


def varlen_call(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, seqused_k: Any, block_table: Any,
    page_table: Any, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, s_aux: Any, sinks: Any,
    learnable_sink: Any, q_descale: Any, k_descale: Any, v_descale: Any, num_splits: Any, out: Any,
    return_softmax_lse: Any, return_lse: Any, attention_chunk: Any, others: dict[str, Any],
) -> AttentionCall:  # fmt: skip
    """Return the call of `flash_attn_varlen_func`. others: its other keywords."""
    _check_others(VARLEN, others)
    return_lse = _flags(return_softmax_lse=return_softmax_lse, return_lse=return_lse)
    check_strided("q", q, 3)
    check_operand("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), q.device)
    plain, (name, table) = not traced(q), _one(block_table=block_table, page_table=page_table)
    if table is None:
        if seqused_k is not None:
            raise NotImplementedError("seqused_k: given without block_table, not supported, must be None")
        check_operand("cu_seqlens_k", cu_seqlens_k, 1, (torch.int32,), q.device)
        requests = ragged_sequences(cu_seqlens_q, cu_seqlens_k, plain)
        keys, lens = (rows_of("k", k, "NHD"), rows_of("v", v, "NHD")), "seqused_k"
    else:
        lens = "cu_seqlens_k" if seqused_k is None else "seqused_k"
        if seqused_k is None:
            seqused_k = check_operand("cu_seqlens_k", cu_seqlens_k, 1, (torch.int32,), q.device).diff()
        check_operand(lens, seqused_k, 1, (torch.int32,), q.device)
        keys = pair("k, v", (k, v), "NHD")
        requests = sequences_of(table, seqused_k, cu_seqlens_q, plain, LAYOUTS[name])
    descales = q_descale, k_descale, v_descale
    given = {"s_aux": s_aux, "sinks": sinks, "learnable_sink": learnable_sink}
    options = FlashAttnOptions(
        softmax_scale, causal, window_size, softcap, given, descales, num_splits, out, attention_chunk,
        _latent_query(q, others),
    )  # fmt: skip
    most = _most(max_seqlen_q, q.shape[0])
    call = _attention_call(_signature(VARLEN, name, lens), q, keys, requests, most, options, return_lse)
    return gather.gathered(call, others[gather.NAME]) if others.get(gather.NAME) is not None else call


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, *, cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None, max_seqlen_q: int | torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1), softcap: float | None = 0.0,
    s_aux: torch.Tensor | None = None, sinks: torch.Tensor | None = None, learnable_sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, num_splits: int = 0, out: torch.Tensor | None = None,
    return_softmax_lse: bool = False, return_lse: bool = False,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None, rotary_interleaved: bool = True,
    attention_chunk: int = 0, **others: Any,
) -> Any:  # fmt: skip
    """Compute attention over a cache, after appending k and v to it if they are given.

    Positional arguments are those that FlashAttention 2 and 3 share. Arguments that are not listed are as in
    `flash_attn_varlen_func`.

    Args:
        q: (B, S, Hq, D), or (T, Hq, D) with cu_seqlens_q.
        k_cache, v_cache: (pages, P, Hkv, D) with a table; otherwise (B, N, Hkv, D), or any batch with cache_batch_idx,
            int32 (B,), the entry of each request. Without a table, TMA reads pages of 64, 32, 16 or 8 rows, whichever
            divides N, if batch and rows have one stride; other caches are read row by row.
        cache_seqlens: int32 (B,), or one int for all requests: keys in the cache before the call. Without k, q's tokens
            are the last of them. Required with k; else None means all rows.
        k, v: (B, S_new, Hkv, D), or (T_new, Hkv, D) with cu_seqlens_k_new, int32 (B + 1,); of the cache's dtype. They
            are written to the cache behind cache_seqlens, in the launch of one more kernel, and q sees them. Rows past
            a request's pages are not written, nor is a row before position 0. cu_seqlens_k_new is ignored without k.
        rotary_cos, rotary_sin: (L, R / 2), of q's dtype, 16 bits, rows aligned to 8 bytes, R a multiple of 16 up to D,
            L at least the rows of a request's pages. The first R elements of k and q are rotated before k is written,
            in the same launch: row i of a request by row cache_seqlens + i of these tables. Needs k; and causal, a
            window or one query per request.
        rotary_interleaved: whether pairs are neighbours, (2 i, 2 i + 1), instead of (i, i + R / 2).
        cache_leftpad: int32 (B,), the row of a request's first key; rows before it are not seen. cache_seqlens still
            counts from row 0, so a request has cache_seqlens - cache_leftpad keys. New keys go to row cache_seqlens and
            rotary positions are cache_seqlens + i, as without it. Not with a table; batch and rows of a cache must
            have one stride. Rows are then read one by one, by a table that four small torch operations make.
        max_seqlen_q: only used with cu_seqlens_q; otherwise it is S.

    Returns out, with q's shape and Dv for D; or (out, lse), lse fp32 (B, Hq, S) or (Hq, T). Raises as there, before
    anything is written.

    >>> cache = torch.zeros(2, 3, 16, 2, 64).half()  # K and V: 3 pages of 16 rows
    >>> table, lens = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([19, 8]).int()
    >>> q, k, v = (torch.randn(2, 1, heads, 64).half() for heads in (8, 2, 2))
    >>> flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lens, block_table=table, causal=True).shape
    torch.Size([2, 1, 8, 64])
    >>> bool((cache[0, 0, 3] == k[0, 0]).all()), bool((cache[1, 1, 8] == v[1, 0]).all())
    (True, True)
    """
    made = kvcache_call(
        q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table, page_table, cu_seqlens_q,
        cu_seqlens_k_new, max_seqlen_q, cache_leftpad, softmax_scale, causal, window_size, softcap, s_aux, sinks,
        learnable_sink, q_descale, k_descale, v_descale, num_splits, out, return_softmax_lse, return_lse, rotary_cos,
        rotary_sin, rotary_interleaved, attention_chunk, others,
    )  # fmt: skip
    call = made if made.__class__ is AttentionCall else appended(made)
    return shaped(call, serve(call), q, out)


def kvcache_call(
    q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cache_seqlens: Any, cache_batch_idx: Any, block_table: Any,
    page_table: Any, cu_seqlens_q: Any, cu_seqlens_k_new: Any, max_seqlen_q: Any, cache_leftpad: Any,
    softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, s_aux: Any, sinks: Any, learnable_sink: Any,
    q_descale: Any, k_descale: Any, v_descale: Any, num_splits: Any, out: Any, return_softmax_lse: Any, return_lse: Any,
    rotary_cos: Any, rotary_sin: Any, rotary_interleaved: Any, attention_chunk: Any, others: dict[str, Any],
) -> Any:  # fmt: skip
    """Return the call of `flash_attn_with_kvcache`: a `CachedCall` if it has new keys or padding, else the
    `AttentionCall`. others: its other keywords."""
    _check_others(CACHED, others)
    return_lse = _flags(return_softmax_lse=return_softmax_lse, return_lse=return_lse)
    packed = cu_seqlens_q is not None
    check_strided("q", q, 3 if packed else 4)
    if packed:
        check_operand("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), q.device)
    batch = q.shape[0] if cu_seqlens_q is None else max(cu_seqlens_q.shape[0] - 1, 0)
    plain, (name, table) = not traced(q), _one(block_table=block_table, page_table=page_table)
    k_pages, v_pages = k_cache, v_cache
    if cache_leftpad is not None:
        padding_of(cache_leftpad, table, name, (k_cache, v_cache), batch)
    if table is None:
        sizes = VIEWED_PAGES if cache_leftpad is None else (1,)
        k_pages, v_pages, table = without_table(k_cache, v_cache, cache_batch_idx, batch, plain, sizes=sizes)
    elif cache_batch_idx is not None:
        raise ValueError(f"cache_batch_idx: given, must be None with {name}")
    keys = pair("k_cache, v_cache", (k_pages, v_pages), "NHD")
    check_operand(name, table, 2, (torch.int32,), q.device)
    lens = _lengths(cache_seqlens, batch, table.shape[1] * keys[0].shape[2], q.device, k is not None, plain)
    new, signature = None, _signature(CACHED, name, "cache_seqlens")
    appends = k is not None or v is not None
    rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, appends)
    if appends:
        signature = _signature(CACHED, name, f"cache_seqlens{NEW}")
        new = new_rows(k, v, cu_seqlens_k_new, batch, keys, plain)._replace(rotary=rotary)
    flat, flat_out = (q, out) if packed else (q.flatten(0, 1), _flat(out, q, keys[1]))
    qv_name, qv = _latent_query(q, others) if others else ("", None)
    if qv is not None and (appends or cache_leftpad is not None):
        other = "cache_leftpad" if not appends else "v" if k is None else "k"
        raise NotImplementedError(f"{other}: given with {qv_name}, not supported, must be None")
    given = {"s_aux": s_aux, "sinks": sinks, "learnable_sink": learnable_sink}
    descales = q_descale, k_descale, v_descale
    options = FlashAttnOptions(
        softmax_scale, causal, window_size, softcap, given, descales, num_splits, flat_out, attention_chunk,
        (qv_name, qv if qv is None or packed else qv.flatten(0, 1)),
    )  # fmt: skip
    most = _most(max_seqlen_q, q.shape[0]) if packed else q.shape[1]
    offsets = cu_seqlens_q if packed or q.shape[1] else constant(filled, q.device, plain, batch + 1, 0)
    requests = sequences_of(table, lens, offsets, plain, LAYOUTS[name])
    call = _attention_call(signature, flat, keys, requests, most, options, return_lse)
    return call if new is None and cache_leftpad is None else CachedCall(call, new, cache_leftpad)


def appended(made: CachedCall) -> AttentionCall:
    """Append new keys, and return the attention over the cache that holds them, without its padding."""
    call, new, padding = made
    if padding is not None:
        check_padding(call, padding)
    if new is not None:
        call = append(call, new)
    return call if padding is None else without_padding(call, padding)


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] | None = (-1, -1), softcap: float | None = 0.0,
    s_aux: torch.Tensor | None = None, sinks: torch.Tensor | None = None, learnable_sink: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, num_splits: int = 0, out: torch.Tensor | None = None,
    return_softmax_lse: bool = False, return_lse: bool = False,
    attention_chunk: int = 0, **others: Any,
) -> Any:  # fmt: skip
    """Compute attention of requests of one length.

    q: (B, S, Hq, D), k: (B, N, Hkv, D), v: (B, N, Hkv, Dv), any strides with 1 as the last. The other arguments are as
    in `flash_attn_with_kvcache`, with all rows of k and v as its cache. qv, (B, S, Hq, Dv), is served with
    gather_kv_indices, int32 (B, S, K), alone, as in `flash_attn_varlen_func`, if tensors are views of their rows; lse
    is then (B, S, Hq).

    >>> q, k, v = torch.randn(2, 3, 8, 64).half(), torch.randn(2, 9, 2, 64).half(), torch.randn(2, 9, 2, 64).half()
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 3, 8, 64])
    """
    call = func_call(
        q, k, v, softmax_scale, causal, window_size, softcap, s_aux, sinks, learnable_sink, q_descale, k_descale,
        v_descale, num_splits, out, return_softmax_lse, return_lse, attention_chunk, others,
    )  # fmt: skip
    return shaped(call, serve(call), q, out)


def func_call(
    q: Any, k: Any, v: Any, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, s_aux: Any, sinks: Any,
    learnable_sink: Any, q_descale: Any, k_descale: Any, v_descale: Any, num_splits: Any, out: Any,
    return_softmax_lse: Any, return_lse: Any, attention_chunk: Any, others: dict[str, Any],
) -> AttentionCall:  # fmt: skip
    """Return the call of `flash_attn_func`. others: its other keywords."""
    _check_others(FUNC, others)
    return_lse = _flags(return_softmax_lse=return_softmax_lse, return_lse=return_lse)
    batch, length = check_strided("q", q, 4).shape[:2]
    plain = not traced(q)
    if others.get(gather.NAME) is not None:
        also = {name: others[name] for name in (*LATENT_QUERIES, gather.NAME) if others.get(name) is not None}
        rows = {"q": q, "k": k, "v": v} | also
        flat = {name: gather.rows_of_requests(name, t) for name, t in rows.items()}
        starts = [gather.equal_starts(batch, n, q.device, plain) for n in (length, k.shape[1])]
        return varlen_call(
            flat.pop("q"), flat.pop("k"), flat.pop("v"), starts[0], starts[1], length, None, None, None, softmax_scale,
            causal, window_size, softcap, s_aux, sinks, learnable_sink, q_descale, k_descale, v_descale, num_splits,
            _flat(out, q, v), return_softmax_lse, return_lse, attention_chunk, others | flat,
        )  # fmt: skip
    k_pages, v_pages, table = without_table(k, v, None, batch, plain, ("k", "v"))
    keys = pair("k, v", (k_pages, v_pages), "NHD")
    lens = _lengths(None, batch, k.shape[1], q.device, False, plain)
    given = {"s_aux": s_aux, "sinks": sinks, "learnable_sink": learnable_sink}
    descales = q_descale, k_descale, v_descale
    flat_out = _flat(out, q, keys[1])
    options = FlashAttnOptions(
        softmax_scale, causal, window_size, softcap, given, descales, num_splits, flat_out, attention_chunk
    )
    offsets = None if length else constant(filled, q.device, plain, batch + 1, 0)
    requests = sequences_of(table, lens, offsets, plain, LAYOUTS["k"])
    return _attention_call(FUNC, q.flatten(0, 1), keys, requests, length, options, return_lse)


def _attention_call(
    signature: str, q: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], requests: SequenceBatch, most: Any,
    o: FlashAttnOptions, return_lse: bool,
) -> AttentionCall:  # fmt: skip
    """Return the attention call.

    most: an upper bound of the query lengths; if requests have no offsets, the length of each.
    """
    (_, heads, dim), (k, v) = q.shape, keys
    kv_heads, latent = k.shape[1], NOT_LATENT
    qv_name, qv = o.qv
    if qv is not None:
        signature, dim = _latent_signature(signature, qv_name), dim + v.shape[3]
        q, k, latent = qv, v, RotatedParts(q, k, True)
    causal, left, chunk = _window(o.causal, o.window_size, o.attention_chunk)
    scale = max(dim, 1) ** -0.5 if o.softmax_scale is None else number("softmax_scale", o.softmax_scale)
    out_scale, scale_tensor, out_scale_tensor = 1.0, None, None
    q_descale, k_descale, v_descale = o.descales
    if q_descale is not None or k_descale is not None or v_descale is not None:  # rare
        for name, descale, t in zip(("q_descale", "k_descale", "v_descale"), o.descales, (q, k, v), strict=True):
            if descale is not None:
                check_descale(name, descale, requests.batch, kv_heads)
            if descale is None or t.dtype not in EIGHT_BITS or not descale.numel():
                continue
            per_head = each_head(name, descale)
            if name == "v_descale":
                out_scale, out_scale_tensor = times(name, per_head, q.device, 1.0, None, (heads, kv_heads), 1)
            else:
                scale, scale_tensor = times(name, per_head, q.device, scale, scale_tensor, (heads, kv_heads), 1)
    never = check_integer("num_splits", integer(o.num_splits), 0) == 1
    return AttentionCall(
        signature=signature, q=q, k=k, v=v, requests=requests, max_q_len=most, scale=scale, out_scale=out_scale,
        causal=causal, window_left=left, chunk=chunk, soft_cap=real(o.softcap),
        split_kv="never" if never else "auto", return_lse=return_lse, out=o.out,
        out_dtype=torch.bfloat16 if o.out is None and q.dtype in EIGHT_BITS else None,
        sinks=_sinks(q, o.sinks), scale_tensor=scale_tensor, out_scale_tensor=out_scale_tensor,
        q_rope=latent.q_rope, k_rope=latent.k_rope, shares_v=latent.shares_v,
    )  # fmt: skip


def _latent_query(q: torch.Tensor, others: dict[str, Any]) -> tuple[str, torch.Tensor | None]:
    """Return the name and the tensor of qv; the tensor is None if the caller gives none. Its shape must be that of q,
    with any number of columns."""
    name, qv = _one(**{name: others.get(name) for name in LATENT_QUERIES})
    if qv is not None:
        check_strided(name, qv, q.dim())
        check_shape(name, qv, (*q.shape[:-1], qv.shape[-1]), "that of q, with V's head_dim")
    return name, qv


def _check_others(function: str, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name in LATENT_QUERIES and (function != FUNC or given.get(gather.NAME) is not None):
            continue
        if name == gather.NAME and function != CACHED:
            continue
        if name in HINTS or value is None and name in REFUSED:
            continue
        if name not in REFUSED:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        neutral = REFUSED[name]
        if neutral is None or not isinstance(value, (int, float)) or value != neutral:
            shown = value if isinstance(value, (int, float, str)) else type(value).__name__
            raise NotImplementedError(f"{name}: {shown}, not supported, must be {neutral}")


def _flags(**given: Any) -> bool:
    """Return whether one of the flags is set."""
    for name, value in given.items():
        check_flag(name, value)
    return any(given.values())


def _one(**given: Any) -> tuple[str, Any]:
    """Return the name and value of an argument with several names; the first name and None if none is given."""
    found = [(name, value) for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise ValueError(f"{found[1][0]}: another name of {found[0][0]}, only one of the two may be given")
    return found[0] if found else (next(iter(given)), None)


def _window(causal: Any, size: Any, chunk: Any) -> tuple[bool, int, int]:
    """Return (causal, window_left, chunk) of a call."""
    check_flag("causal", causal)
    if size is not None and (not isinstance(size, (tuple, list)) or len(size) != 2):
        raise TypeError(f"window_size: {size!r}, must be (left, right)")
    left, right = -1, -1
    if size is not None:
        left, right = (-1 if side is None else check_integer("window_size", integer(side)) for side in size)
    if right > 0 and not causal:
        need = "right must be 0 or negative (unbounded) unless causal"
        raise NotImplementedError(f"window_size: {(left, right)}, a window of later keys is not supported: {need}")
    causal = causal or right == 0
    if chunk.__class__ is not int or chunk < 0:
        chunk = 0 if chunk is None else check_integer("attention_chunk", integer(chunk), 0)
    if chunk and not causal:
        raise NotImplementedError(f"attention_chunk: {chunk}, not supported without a causal mask, must be 0")
    return causal, left, chunk


def _most(given: Any, rows: Any) -> Any:
    if given is None or isinstance(given, _Tensor):
        return rows
    return check_integer("max_seqlen_q", integer(given), 0)


def _sinks(q: torch.Tensor, given: dict[str, Any]) -> torch.Tensor | None:
    name, found = _one(**given)
    if found is None:
        return None
    sinks = check_operand(name, found, 1, (torch.float32, torch.float16, torch.bfloat16), q.device)
    check_shape(name, sinks, (q.shape[1],), "one value per query head")
    return sinks.float()


def _lengths(given: Any, batch: int, room: int, device: torch.device, required: bool, plain: bool) -> torch.Tensor:
    """Return the number of keys of each request, int32 (B,)."""
    if given is None and required:
        raise ValueError("cache_seqlens: None, required if k is given")
    if isinstance(given, _Tensor):
        check_operand("cache_seqlens", given, 1, (torch.int32,), device)
        check_shape("cache_seqlens", given, (batch,), "one per request of q")
        return given
    count = room if given is None else check_integer("cache_seqlens", integer(given), 0)
    if count > room:
        raise ValueError(f"cache_seqlens: {count}, must be at most {room}, the rows of a request")
    return constant(filled, device, plain, batch, count)


def _flat(out: Any, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Return out (B, S, Hq, Dv) as (B * S, Hq, Dv): a view, since it is written."""
    if out is None:
        return None
    check_shape("out", check_strided("out", out, 4), (*q.shape[:3], v.shape[3]), "that of q, V's head_dim")
    batch, length = out.shape[:2]
    if batch > 1 and length > 1 and out.stride(0) != length * out.stride(1):
        raise ValueError(f"out: strides {out.stride()}, the first must be {length} times the second")
    return out.view(batch * length, *out.shape[2:])


def _natural(lse: torch.Tensor) -> torch.Tensor:
    """Convert a base-2 LSE (..., T, Hq) to natural logarithms (..., Hq, T), contiguous, in one operation."""
    turned = lse.transpose(-1, -2)
    return torch.mul(turned, LN2, out=lse.new_empty(turned.shape))


def shaped(call: AttentionCall, found: Any, q: torch.Tensor, out: Any) -> Any:
    """Return a function's result for that of its call, in the shape of q, which is ragged if it has 3 dimensions.

    out: the output that was given, or None.
    """
    q = q[0] if isinstance(q, tuple) else q
    packed, (flat, lse) = q.dim() == 3, found if call.return_lse else (found, None)
    if out is None:
        out = flat if packed else flat.view(*q.shape[:2], *flat.shape[1:])
    if lse is None:
        return out
    if call.lse_form:  # of keys that tokens choose: natural, in the order of FlashAttention 4
        return out, lse if packed else lse.view(*q.shape[:2], lse.shape[1])
    return out, _natural(lse if packed else lse.view(*q.shape[:2], *lse.shape[1:]))


def bound_rows(call: AttentionCall, q: Any, out: Any) -> tuple[Any, torch.Tensor | None]:
    """Return a query and an output, or None, as the call takes them. They replace those of a bound call. The query of a
    call with qv is the pair (q, qv)."""
    if call.shares_v:
        if not isinstance(q, tuple) or len(q) != 2:
            raise TypeError(f"q: {type(q).__name__}, must be (q, qv), since the bound call has qv")
        (rope, flat_out), (latent, _) = (bound_rows(call._replace(shares_v=False), t, out) for t in q)
        return (latent, rope), flat_out
    ragged = call.requests.cu_seqlens_q is not None and call.max_q_len > 0  # requests without rows have offsets, too
    check_strided("q", q, 3 if ragged else 4)
    if ragged:
        return q, out
    shape = call.requests.batch, call.max_q_len
    if q.shape[:2] != shape:
        raise ValueError(f"q: shape {tuple(q.shape)}, must begin with {shape}, the requests and rows of the bound call")
    return q.flatten(0, 1), _flat(out, q, call.v)
