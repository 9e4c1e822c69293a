"""FlashMLA's functions: decode of latent attention (MLA) over a paged cache, of which V is the first columns of K, and
prefill of tokens that have chosen their keys."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_kernels.attention.spec import LSE_INF, LSE_MAX, LSE_NATURAL, LSE_OF_KEYS
from cute_kernels.records import RECORDS

from ..attention.call import AttentionCall, SequenceBatch, sequences_of, slot_sequences
from ..attention.checks import SIGNATURES
from ..attention.op import serve
from ..attention.views import columns_and_rope, counts_of
from ..host.checks import check_device, check_flag, check_integer, check_one_of, check_shape, check_strided, listed
from ..host.plain import traced
from ..host.scalars import check_scale, integer, real, split_scale, times

NAME = "flash_mla_with_kvcache"
SPARSE_NAME = NAME + ", indices"
SIGNATURES[NAME] = {
    **dict.fromkeys(("kv", "k", "v", "shares_v", "k_rope"), "k_cache"), "page_table": "block_table",
    "kv_lens": "cache_seqlens", "scale": "softmax_scale", "sinks": "attn_sink", "max_q_len": "q", "q_rope": "q",
}  # fmt: skip
SIGNATURES[SPARSE_NAME] = SIGNATURES[NAME] | {
    "page_table": "indices", "kv_lens": "topk_length", **dict.fromkeys(("extra_k", "extra_k_rope"), "extra_k_cache"),
    "extra_slots": "extra_indices_in_kvcache", "extra_lens": "extra_topk_length",
}  # fmt: skip
PREFILL_NAME = "flash_mla_sparse_fwd"
SIGNATURES[PREFILL_NAME] = {
    **dict.fromkeys(("kv", "k", "v", "shares_v", "k_rope"), "kv"), "page_table": "indices", "kv_lens": "topk_length",
    "scale": "sm_scale", "sinks": "attn_sink", "max_q_len": "q", "q_rope": "q",
    **dict.fromkeys(("extra_k", "extra_k_rope"), "extra_kv"), "extra_slots": "extra_indices",
    "extra_lens": "extra_topk_length",
}  # fmt: skip
PROMPT_CHOSEN = ("indices", "topk_length", "extra_kv", "extra_indices", "extra_topk_length")
CHOSEN = ("indices", "topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)  # dtypes of a cache of packed records
PACKED = {576: {656: "656", 352: "352"}, 512: {584: "584", 528: "528"}}  # columns of q -> bytes of a row -> record
NO_RECORDS: dict[int, dict[int, str]] = {}
SECOND = {512: PACKED[512] | {288: "288"}}  # the same of a second cache, where it has others
E4M3 = "e4m3"  # record of values without factors
ROWS_PER_PART, META_SIZE = 64, 8  # of FlashMLA's schedule


class SchedulerMetadata:
    """An object in the place of the schedule that FlashMLA keeps from call to call; its attributes stay None.

    Kernels here find their work from the lengths at each launch.
    """

    tile_scheduler_metadata = None
    num_splits = None


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None, num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None, num_heads_q: int | None = None, is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, torch.Tensor | None]:  # fmt: skip
    """Return placeholders for the metadata of `flash_mla_with_kvcache`, which needs none.

    Without cache_seqlens: an empty object, and None, which FlashMLA returns since 2026 whatever its arguments are. With
    cache_seqlens, int32 (B,): zeros int32 (parts, 8) and int32 (B + 1,), of the shapes that FlashMLA gave before 2026
    for s_q * H / h_k query rows of a head of K (num_q_tokens_per_head_k) and h_k heads of K (num_heads_k). Callers
    of that form, such as SGLang, copy these tensors; callers of the new form only pass the first result on.
    num_heads_q, is_fp8_kvcache and topk are hints.

    Raises TypeError for an argument of another type, and ValueError for another shape and for a number below 1.
    FlashMLA's function.

    >>> get_mla_metadata()[1] is None
    True
    """
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    for name, value in (("num_heads_q", num_heads_q), ("topk", topk)):
        if value is not None:
            check_integer(name, integer(value), 1)
    if cache_seqlens is None:
        return SchedulerMetadata(), None
    lens = check_strided("cache_seqlens", cache_seqlens, 1)
    check_one_of("cache_seqlens: dtype", lens.dtype, (torch.int32,))
    rows = check_integer("num_q_tokens_per_head_k", integer(num_q_tokens_per_head_k), 1)
    heads = check_integer("num_heads_k", integer(num_heads_k), 1)
    sms = torch.cuda.get_device_properties(lens.device).multi_processor_count if lens.is_cuda else 1
    parts = max(sms // heads // -(-rows // ROWS_PER_PART), 1)
    return lens.new_zeros((parts, META_SIZE), dtype=torch.int32), lens.new_zeros(lens.shape[0] + 1, dtype=torch.int32)


def flash_mla_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None, cache_seqlens: torch.Tensor | None,
    head_dim_v: int, tile_scheduler_metadata: Any = None, num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None, attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None, extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None, extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False, out: torch.Tensor | None = None,
    descale_q: torch.Tensor | float | None = None,
    descale_k: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute decode attention over a paged cache of latent attention, of which V is the first columns of K.

    Args:
        q: fp16 or bf16 (B, s_q, H, D), any strides, the last 1. (D, head_dim_v) is (576, 512) or (512, 512). With D
            values of e4m3 in a row of the cache, also of float8_e4m3fn; is_fp8_kvcache may then be False.
        k_cache: (pages, P, h_k, D) of q's dtype, any P and page stride; H is a multiple of h_k. With is_fp8_kvcache, q
            is bf16, h_k is 1, and a row of the cache has D values of e4m3 or the bytes of a packed record, in uint8,
            int8 or float8_e4m3fn: 656 or 352 if D is 576; 584 or 528 if it is 512. fp32 factors are rounded to bf16,
            and the codes of e4m3 for NaN read as 480 and -480, or, in keys with up to 16 query rows, as NaN.
        block_table: int32 (B, M), pages of each request. cache_seqlens: int32 (B,), its keys. Neither is read, and both
            may be None, with indices.
        indices: int32 (B, s_q, K), or None: the keys of each query row are these rows of the cache, where page p has
            the rows from p * P on. Another number, such as -1, is no key, wherever it is; a row that comes twice counts
            twice. causal must be False. topk_length: int32 (B,), only the first so many of each row count, or None.
        extra_k_cache: (pages, P, h_k, D), or None: a second cache, from which each row chooses keys, too, by
            extra_indices_in_kvcache, int32 (B, s_q, K), and extra_topk_length, as in the first one, with indices. Its
            pages may have another size, and its rows another record, also one of 288 bytes. The softmax is over the
            keys of both.
        softmax_scale: factor on the logits; None: D ** -0.5. causal: row i of a request sees keys up to cache_seqlens -
            s_q + i. attn_sink: fp32 (H,), in natural-log units, or None.
        enable_batch_invariant: the result of a request does not depend on the others. It may be slower.
        out: receives the result, (B, s_q, H, head_dim_v) of q's dtype, or None. Over e4m3 queries it is bf16.
        tile_scheduler_metadata, num_splits: not read; lengths may change between replays of a graph.
        descale_q, descale_k: floats, or fp32 tensors of one element: the factors of e4m3 queries and of e4m3 values of
            the cache without one of their own; None: 1.

    Returns (out, lse): lse fp32 (B, H, s_q), in natural logarithms, without the sink. A row without keys is 0, with an
    lse of +inf. Pages of the table behind a request's keys are not read, and may be any numbers. Raises before anything
    is launched: TypeError for a dtype; ValueError for a shape, stride or device. FlashMLA's function.

    >>> cache, table = torch.zeros(3, 64, 1, 576).half(), torch.tensor([[2, 0]]).int()
    >>> out, lse = flash_mla_with_kvcache(
    ...     torch.ones(1, 1, 16, 576).half(), cache, table, torch.tensor([100]).int(), 512, get_mla_metadata()[0]
    ... )
    >>> out.shape, lse[0, 0]
    (torch.Size([1, 1, 16, 512]), tensor([4.6052]))
    """
    call = decode_call(
        q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, is_fp8_kvcache, indices, attn_sink,
        extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length, enable_batch_invariant, out,
        descale_q, descale_k,
    )  # fmt: skip
    return shaped(call, serve(call), q, out)


def decode_call(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: Any, softmax_scale: Any = None,
    causal: Any = False, is_fp8_kvcache: Any = False, indices: Any = None, attn_sink: Any = None,
    extra_k_cache: Any = None, extra_indices_in_kvcache: Any = None, topk_length: Any = None,
    extra_topk_length: Any = None, enable_batch_invariant: Any = False, out: Any = None, descale_q: Any = None,
    descale_k: Any = None,
) -> AttentionCall:  # fmt: skip
    """Return the call of `flash_mla_with_kvcache`."""
    for name, flag in (
        ("causal", causal), ("is_fp8_kvcache", is_fp8_kvcache), ("enable_batch_invariant", enable_batch_invariant)
    ):  # fmt: skip
        check_flag(name, flag)
    batch, length, heads, dim = check_strided("q", q, 4).shape
    columns = check_integer("head_dim_v", integer(head_dim_v), 1)
    packed = PACKED if is_fp8_kvcache else NO_RECORDS
    if q.dtype is torch.float8_e4m3fn and not is_fp8_kvcache and check_strided("k_cache", k_cache).dtype is q.dtype:
        packed = {dim: {}}  # as vLLM's function for e4m3 takes it
    k, k_rope, record = _cache("k_cache", k_cache, dim, columns, packed)
    if columns > dim:
        raise ValueError(f"head_dim_v: {columns}, must be at most {dim}, the last dimension of q and k_cache")
    scale = dim**-0.5 if softmax_scale is None else real(softmax_scale)
    query, q_rope = columns_and_rope(q.flatten(0, 1), columns)
    chosen = (indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    second: dict[str, Any] = {}
    if indices is None:
        signature, rows, requests = NAME, length, _own_keys(q, block_table, cache_seqlens, chosen)
    else:
        signature, rows = SPARSE_NAME, 1
        cache_of = partial(_cache, dim=dim, columns=columns, packed=PACKED | SECOND if is_fp8_kvcache else NO_RECORDS)
        requests, second = _chosen_keys(q, CHOSEN, chosen, cache_of)
        _check_kinds("k_cache", k_cache, record, CHOSEN[2], extra_k_cache, second)
        if causal:
            shape = tuple(indices.shape)
            raise ValueError(f"causal: True, must be False with indices {shape}, which say what a row sees")
    factors = CallFactors(scale)
    if descale_q is not None or descale_k is not None:  # rare
        records = {record, second.get("extra_record", record)}
        factors = _descaled(descale_q, descale_k, records, q, scale, "is_fp8_kvcache and ")
    split_kv = "never" if enable_batch_invariant else "auto"
    return AttentionCall(
        signature, query, k, k, requests, rows, *factors[:2], causal=bool(causal), split_kv=split_kv, return_lse=True,
        shares_v=True, lse_form=LSE_NATURAL | LSE_INF | LSE_OF_KEYS,
        out_dtype=torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype,
        out=_flat(out, (batch, length, heads, columns)), sinks=attn_sink, q_rope=q_rope, k_rope=k_rope, record=record,
        scale_tensor=factors.scale_tensor, out_scale_tensor=factors.out_scale_tensor, **second,
    )  # fmt: skip


class CallFactors(NamedTuple):
    """The factors of a call on the logits and on the output, as `AttentionCall` has them."""

    scale: float
    out_scale: float = 1.0
    scale_tensor: torch.Tensor | None = None
    out_scale_tensor: torch.Tensor | None = None


def _descaled(
    descale_q: Any, descale_k: Any, records: set[str], q: torch.Tensor, scale: float, also: str = ""
) -> CallFactors:
    """Return the factors of a call with factors of e4m3 values. records: of its caches. scale: the factor on the logits
    without them. also: what else descale_k needs."""
    values = f"{also}values of {torch.float8_e4m3fn}, as many as q has, {q.shape[-1]}, in rows of caches"
    tensor, out_scale, out_tensor = None, 1.0, None
    for name, descale, quantised, need in (
        ("descale_q", descale_q, q.dtype is torch.float8_e4m3fn, f"queries of {torch.float8_e4m3fn}"),
        ("descale_k", descale_k, records == {E4M3}, values),
    ):  # fmt: skip
        if descale is None:
            continue
        number, given = split_scale(name, descale)
        check_scale(name, number, given, q.device)
        if not quantised:
            shown = "Tensor" if isinstance(descale, torch.Tensor) else repr(descale)
            raise ValueError(f"{name}: {shown}, must be None without {need}")
        scale, tensor = times(name, descale, q.device, scale, tensor, (1, 1), 1)
        if name == "descale_k":
            out_scale, out_tensor = number, given
    return CallFactors(scale, out_scale, tensor, out_tensor)


def _cache(
    name: str, cache: Any, dim: int, columns: int, packed: dict[int, dict[int, str]]
) -> tuple[torch.Tensor, torch.Tensor | None, str]:  # fmt: skip
    """Return a cache (pages, P, h_k, D) as (pages, h_k, P, D), those columns of it that V does not have, if they lie
    apart, and its record. packed: columns of q -> bytes of a row -> record; empty: rows have values of 16 bits."""
    own = check_strided(name, cache, 4)
    record = packed.get(dim, {}).get(own.shape[3], "") if packed and own.dtype in BYTES else ""
    if record:
        return own.view(torch.uint8).transpose(1, 2), None, record
    if own.shape[3] != dim:
        rows = f", or {listed(packed[dim])} bytes" if packed.get(dim) else ""
        raise ValueError(f"{name}: shape {tuple(own.shape)}, must end with {dim}{rows}, the last dimension of q")
    if packed:
        check_one_of(f"{name}: with is_fp8_kvcache, dtype", own.dtype, BYTES)
        own, record = own.view(torch.float8_e4m3fn), E4M3
    if columns > dim:  # which is refused
        return own, None, record
    k, rope = columns_and_rope(own.transpose(1, 2), columns)
    return k, rope, record


def _own_keys(q: torch.Tensor, table: Any, lens: Any, chosen: tuple[Any, ...]) -> SequenceBatch:
    """Return the requests of rows that see the keys of their request. chosen: what must then be None."""
    for name, value in zip(CHOSEN[1:], chosen[1:], strict=True):
        if value is not None:
            raise ValueError(f"{name}: shape {tuple(check_strided(name, value).shape)}, must be None without indices")
    check_strided("block_table", table, 2)
    check_strided("cache_seqlens", lens, 1)
    if q.shape[0] != table.shape[0]:
        raise ValueError(f"q: shape {tuple(q.shape)}, must begin with {table.shape[0]}, the rows of block_table")
    return sequences_of(table, lens, None, not traced(q))


def _chosen_keys(
    q: torch.Tensor, names: tuple[str, ...], chosen: tuple[Any, ...],
    cache_of: Callable[[str, Any], tuple[torch.Tensor, torch.Tensor | None, str]],
) -> tuple[SequenceBatch, dict[str, Any]]:  # fmt: skip
    """Return the requests of rows that have chosen their keys, and the fields of the second cache of their call.

    names, chosen: of the arguments, in the order of `CHOSEN`. cache_of: does what `_cache` does, of that cache.
    """
    indices, lens, extra, extra_indices, extra_lens = chosen
    slots, plain = _slots(q, names[0], indices, names[1], lens), not traced(q)
    if extra is None:
        for name, value in zip(names[3:], (extra_indices, extra_lens), strict=True):
            if value is not None:
                shape = tuple(check_strided(name, value).shape)
                raise ValueError(f"{name}: shape {shape}, must be None without {names[2]}")
        return slot_sequences(slots, counts_of(slots, lens, 1, plain), plain), {}
    extra_k, extra_rope, record = cache_of(names[2], extra)
    others = _slots(q, names[3], extra_indices, names[4], extra_lens)
    entries = 1 if lens is None and extra_lens is None else q.shape[0]
    requests = slot_sequences(slots, counts_of(slots, lens, entries, plain), plain)
    return requests, {
        "extra_k": extra_k, "extra_k_rope": extra_rope, "extra_slots": others,
        "extra_lens": counts_of(others, extra_lens, entries, plain), "extra_record": record,
    }  # fmt: skip


def _check_kinds(name: str, cache: Any, record: str, other_name: str, other: Any, second: dict[str, Any]) -> None:
    """Raise unless a second cache, if there is one, has rows of the kind of the first one: 16 bits, e4m3 or records."""
    kinds = [r if r in ("", E4M3) else "packed" for r in (record, second.get("extra_record", record))]
    if kinds[0] != kinds[1]:
        given = f"{other_name}: shape {tuple(other.shape)}, dtype {other.dtype}"
        need = "values of 16 bits, of e4m3, or packed records, in both"
        raise ValueError(f"{given} beside {name} {tuple(cache.shape)}, {cache.dtype}, must have {need}")


def _slots(q: torch.Tensor, name: str, slots: Any, lens_name: str, lens: Any) -> torch.Tensor:
    """Return slots (B, s_q, K) of keys as (B * s_q, K), after a check of their shape and of that of lens, if given."""
    check_shape(name, check_strided(name, slots, 3), (*q.shape[:2], slots.shape[2]), "requests and rows of q, keys")
    if lens is not None:
        check_shape(lens_name, check_strided(lens_name, lens, 1), (q.shape[0],), "one per request")
    return slots.flatten(0, 1)


def _flat(out: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return out (B, s_q, H, Dv) as (B * s_q, H, Dv): a view, since it is written."""
    if out is None:
        return None
    check_shape("out", check_strided("out", out, 4), shape, "that of q, with head_dim_v")
    if shape[0] > 1 and shape[1] > 1 and out.stride(0) != shape[1] * out.stride(1):
        raise ValueError(f"out: strides {out.stride()}, the first must be {shape[1]} times the second")
    return out.view(shape[0] * shape[1], *shape[2:])


def shaped(call: AttentionCall, found: Any, q: torch.Tensor, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the function's result for that of its call. out: the output that was given, or None."""
    flat, lse = found
    if out is None:
        out = flat.view(*q.shape[:2], *flat.shape[1:])
    return out, lse.view(*q.shape[:2], lse.shape[1]).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512,
    attn_sink: torch.Tensor | None = None, topk_length: torch.Tensor | None = None, out: torch.Tensor | None = None, *,
    extra_kv: torch.Tensor | None = None, extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None, descale_q: torch.Tensor | float | None = None,
    descale_k: torch.Tensor | float | None = None, share_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute attention of tokens that have chosen their keys from one tensor of rows, for prompts of sparse attention.

    Args:
        q: fp16 or bf16 (T, H, D), any strides, the last 1, and any H. (D, d_v) is (576, 512) or (512, 512).
        kv: (S, 1, D) of q's dtype, any row stride: keys, of which the first d_v columns are values. Also what
            FlashMLA's function does not take: under bf16 queries, rows in uint8, int8 or float8_e4m3fn that have D
            values of e4m3, under e4m3 queries, too, or the bytes of a packed record, 656 or 352 if D is 576, 528 if it
            is 512; and a whole paged cache (pages, P, 1, ...) of any of these, or of 584 bytes with D of 512.
        indices: int32 (T, 1, K), any K: the rows of kv that a token sees, which count from page to page in a cache.
            Another number is no key, wherever it is, and a row that comes twice counts twice. topk_length: int32 (T,),
            only the first so many of each token count, or None; entries behind them are not read.
        sm_scale: factor on the logits. attn_sink: fp32 (H,), in natural-log units, or None. It changes out alone.
        out: receives the result, (T, H, d_v) of q's dtype, of bf16 for e4m3 queries, or None.
        extra_kv, extra_indices, extra_topk_length: a second tensor or cache, of which rows may be packed in another
            record, also in one of 288 bytes, and a token's rows of it, (T, 1, K2), as in the first one. The softmax is
            over the keys of both.
        descale_q, descale_k: as in `flash_mla_with_kvcache`.
        share_keys: 64 / H consecutive tokens, at most 8, read the union of their keys once, which is faster if they
            choose mostly the same ones, and slower if not. For 8, 16, 24 or 32 heads and one tensor of keys. It takes 5
            bytes of memory for each of the indices until the launch ends.

    Returns (out, max_logits, lse): max_logits and lse are fp32 (T, H), in natural units. A token without keys has 0,
    -inf and +inf. The bits of a token's result depend on the token alone or, with share_keys, on those of its group,
    and a key that is not finite makes the results of all of them NaN. Raises before anything is launched, as
    `flash_mla_with_kvcache` does. FlashMLA's function.

    >>> q, kv = torch.ones(1, 16, 576).half(), torch.ones(9, 1, 576).half()
    >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, torch.tensor([[[3, -1, 8, 9]]]).int(), 576**-1)
    >>> out.shape, max_logits[0, 0], lse[0, 0]
    (torch.Size([1, 16, 512]), tensor(1.), tensor(1.6931))
    """
    call = sparse_call(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out, extra_kv, extra_indices, extra_topk_length,
        descale_q, descale_k, share_keys,
    )  # fmt: skip
    return with_max(call, serve(call), q, out)


def sparse_call(
    q: Any, kv: Any, indices: Any, sm_scale: Any, d_v: Any = 512, attn_sink: Any = None, topk_length: Any = None,
    out: Any = None, extra_kv: Any = None, extra_indices: Any = None, extra_topk_length: Any = None,
    descale_q: Any = None, descale_k: Any = None, share_keys: Any = False,
) -> AttentionCall:  # fmt: skip
    """Return the call of `flash_mla_sparse_fwd`."""
    check_flag("share_keys", share_keys)
    _, _, dim = check_strided("q", q, 3).shape
    columns = check_integer("d_v", integer(d_v), 1)
    cache_of = partial(_rows_of_prompt, dim=dim, columns=columns)
    k, k_rope, record = cache_of("kv", kv)
    if columns > dim:
        raise ValueError(f"d_v: {columns}, must be at most {dim}, the last dimension of q and kv")
    chosen = (indices, topk_length, extra_kv, extra_indices, extra_topk_length)
    requests, second = _chosen_keys(q.unsqueeze(1), PROMPT_CHOSEN, chosen, cache_of)
    _check_kinds("kv", kv, record, PROMPT_CHOSEN[2], extra_kv, second)
    for name in (PROMPT_CHOSEN[0], PROMPT_CHOSEN[3]):
        given = chosen[PROMPT_CHOSEN.index(name)]
        if given is not None:
            check_device(name, given, q.device, "that of q")
    factors = CallFactors(real(sm_scale))
    if descale_q is not None or descale_k is not None:  # rare
        factors = _descaled(descale_q, descale_k, {record, second.get("extra_record", record)}, q, factors.scale)
    query, q_rope = columns_and_rope(q, columns)
    return AttentionCall(
        PREFILL_NAME, query, k, k, requests, 1, *factors[:2], causal=False, split_kv="never", return_lse=True,
        shares_v=True, lse_form=LSE_NATURAL | LSE_INF | LSE_OF_KEYS | LSE_MAX,
        out_dtype=torch.bfloat16 if q.dtype is torch.float8_e4m3fn else q.dtype, out=out, sinks=attn_sink,
        q_rope=q_rope, k_rope=k_rope, record=record, scale_tensor=factors.scale_tensor,
        out_scale_tensor=factors.out_scale_tensor, share_keys=bool(share_keys), **second,
    )  # fmt: skip


def _rows_of_prompt(
    name: str, kv: Any, dim: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor | None, str]:  # fmt: skip
    """Return what `_cache` does of rows (S, 1, D), which are one page, or of a cache (pages, P, 1, D). Rows of bytes
    have values of e4m3 or are packed records."""
    packed = check_strided(name, kv).dtype in BYTES
    records = (PACKED if name == "kv" else PACKED | SECOND) if packed else NO_RECORDS
    if kv.dim() == 4:
        check_shape(name, kv, (*kv.shape[:2], 1, kv.shape[3]), "pages, rows, one head, the last dimension of q")
        return _cache(name, kv, dim, columns, records)
    rows, _, width = check_strided(name, kv, 3).shape
    known = [size for size in records.get(dim, {}) if not RECORDS[records[dim][size]].planar]
    if packed and width not in (dim, *known):
        allowed = f"{listed((dim, *known))} bytes with {dim} of q"
        raise ValueError(f"{name}: shape {tuple(kv.shape)}, must end with a row of values, or a packed row: {allowed}")
    check_shape(name, kv, (rows, 1, width if packed else dim), "rows, one head, the last dimension of q")
    return _cache(name, kv.unsqueeze(0), dim, columns, records)


def with_max(call: AttentionCall, found: Any, q: Any, out: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the result of `flash_mla_sparse_fwd` for that of its call."""
    flat, both = found
    heads = flat.shape[1]
    return flat, both[:, heads:], both[:, :heads]


def bound_tokens(call: AttentionCall, q: Any, out: Any) -> tuple[Any, torch.Tensor | None]:
    """Return a query and an output, or None, of `flash_mla_sparse_fwd` as its call takes them."""
    return columns_and_rope(check_strided("q", q, 3), call.dim_vo), out


def bound_rows(call: AttentionCall, q: Any, out: Any) -> tuple[Any, torch.Tensor | None]:
    """Return a query and an output, or None, as the call takes them. They replace those of a bound call."""
    shape = call.requests.batch, call.max_q_len
    given = check_strided("q", q, 4).shape[:2]
    if given != shape and (call.signature == NAME or given.numel() != shape[0]):
        raise ValueError(f"q: shape {tuple(q.shape)}, must begin with {shape}, the requests and rows of the bound call")
    return columns_and_rope(q.flatten(0, 1), call.dim_vo), _flat(out, (*q.shape[:3], call.dim_vo))
