"""FlashInfer's functions of latent attention (MLA) with the signatures of TensorRT-LLM's kernels."""

from typing import Any

import torch

from cute_kernels.records import RECORDS

from ..attention.call import AttentionCall, SequenceBatch, sequences_of, slot_sequences
from ..attention.checks import SIGNATURES
from ..attention.op import serve
from ..attention.views import columns_and_rope, counts_of
from ..host import machine
from ..host.checks import (
    UnknownName,
    check_flag,
    check_integer,
    check_operand,
    check_optional_flag,
    check_shape,
    check_strided,
    checking,
    listed,
)
from ..host.plain import traced
from ..host.scalars import integer, split_scale
from .trtllm import one_sink

NAME = "trtllm_batch_decode_with_kv_cache_mla"
EQUAL = NAME + ", query with rows"  # requests of equal length
SPARSE = NAME + ", sparse"
BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl", "sparse")  # upstream's; a hint here
SIGNATURES[NAME] = {
    "q": "query", "q_rope": "query", **dict.fromkeys(("kv", "k", "v", "shares_v", "k_rope"), "kv_cache"),
    "page_table": "block_tables",
    "kv_lens": "seq_lens", "cu_seqlens_q": "cum_seq_lens_q", "scale": "bmm1_scale", "out_scale": "bmm2_scale",
}  # fmt: skip
SIGNATURES[EQUAL] = SIGNATURES[NAME] | {"max_q_len": "query"}
SIGNATURES[SPARSE] = SIGNATURES[EQUAL]
PACKED = {(512, 64): "656", (512, 0): "528_fp32"}  # (kv_lora_rank, qk_rope_head_dim) -> record of sparse caches
COUNTED = SPARSE + ", sparse_mla_top_k_lens"
SIGNATURES[COUNTED] = SIGNATURES[SPARSE] | {"kv_lens": "sparse_mla_top_k_lens"}


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor | None, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0, out: torch.Tensor | None = None, bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0, sinks: torch.Tensor | list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, enable_pdl: bool | None = None, backend: str = "auto",
    is_var_seq: bool = True, uses_shared_paged_kv_idx: bool = True, lse: torch.Tensor | None = None,
    return_lse: bool = False, cute_dsl_impl: str = "auto", kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None, max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None, sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None, use_fp16_softmax: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute decode attention over a paged cache of latent attention, of which V is the first columns of K.

    Args:
        query: fp16, bf16 or, over an e4m3 cache, e4m3 (B, rows, H, kv_lora_rank + qk_rope_head_dim), causal, the last
            row sees all keys; or, with cum_seq_lens_q, int32 (B + 1,), and max_q_len, (tokens, H, ...). Any strides,
            the last 1.
        kv_cache: (pages, P, D) or (pages, 1, P, D) of query's dtype, D the last dimension of query; any P. With a bf16
            query also of float8_e4m3fn, with one scale, in bmm1_scale and bmm2_scale; or, with sparse_mla_top_k, of
            uint8, packed records: 656 bytes or, if D is 512, the first 528 bytes of a row (512 e4m3, 4 fp32 scales).
        kv_lora_rank: columns of V. (D, kv_lora_rank) is (576, 512) or (512, 512).
        block_tables: int32 (B, M), pages of each request; with uses_shared_paged_kv_idx=False (B, 2, M), those of K and
            the same ones again for V. seq_lens: int32 (B,), its keys.
        sparse_mla_top_k: K > 0: block_tables is int32 (B, rows, K) or, with cum_seq_lens_q, (tokens, K), and holds the
            keys of each query row: these rows of the cache, where page p has the rows from p * P on. Another number,
            such as -1, is no key. sparse_mla_top_k_lens or, without it, seq_lens: int32, how many of them count, one
            per query row or, if there are fewer or more requests than rows, one per request; None: all. With seq_lens
            of requests, which are their keys, the last row of a request has as many, and each row before it one less.
        out: receives the result, of query's dtype (bf16 for e4m3) and shape with kv_lora_rank columns, or None. lse:
            receives the LSE, fp32 (tokens, H), base 2, sink included; return_lse returns it, too.
        bmm1_scale: factor on the logits, bmm2_scale on the output: floats, or fp32 tensors of one element. sinks: fp32
            (H,), in natural-log units, in a list or not.
        workspace_buffer, qk_nope_head_dim, max_seq_len, backend, is_var_seq, cute_dsl_impl, kv_scale_format,
            multi_ctas_kv_counter_buffer, use_fp16_softmax, enable_pdl (None: on): hints.
        skip_softmax_threshold_scale_factor, enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global: other values than
            the defaults raise NotImplementedError.

    Raises before anything is launched: TypeError for a dtype; ValueError for a shape, stride or device. FlashInfer's
    function, which has no kernel for Hopper.

    >>> cache, table = torch.zeros(3, 64, 576).half(), torch.tensor([[2, 0]]).int()
    >>> trtllm_batch_decode_with_kv_cache_mla(
    ...     torch.ones(1, 1, 16, 576).half(), cache, None, 128, 512, 64, table, torch.tensor([100]).int(), 128
    ... ).shape
    torch.Size([1, 1, 16, 512])
    """
    call = mla_decode_call(
        query, kv_cache, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, sparse_mla_top_k, out, bmm1_scale,
        bmm2_scale, sinks, skip_softmax_threshold_scale_factor, enable_pdl, backend, uses_shared_paged_kv_idx, lse,
        return_lse, cum_seq_lens_q, max_q_len, sparse_mla_top_k_lens, enable_dcp, cp_world, cp_rank,
        causal_seqlens_kv_global, is_var_seq, use_fp16_softmax,
    )  # fmt: skip
    return shaped(call, serve(call), query, out)


def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor, kv_cache: torch.Tensor, workspace_buffer: torch.Tensor | None, qk_nope_head_dim: int,
    kv_lora_rank: int, qk_rope_head_dim: int, block_tables: torch.Tensor, seq_lens: torch.Tensor | None,
    max_seq_len: int,
    out: torch.Tensor | None = None, bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None, enable_pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the same as `trtllm_batch_decode_with_kv_cache_mla`, in the signature of XQA.

    query: (B, rows, H, kv_lora_rank + qk_rope_head_dim). All other arguments, and the errors, are as in
    `trtllm_batch_decode_with_kv_cache_mla`. FlashInfer's function, which has no kernel for Hopper.

    >>> cache, table = torch.zeros(3, 64, 576).half(), torch.tensor([[2, 0]]).int()
    >>> xqa_batch_decode_with_kv_cache_mla(
    ...     torch.ones(1, 1, 16, 576).half(), cache, None, 128, 512, 64, table, torch.tensor([100]).int(), 128
    ... ).shape
    torch.Size([1, 1, 16, 512])
    """
    call = xqa_mla_call(
        query, kv_cache, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, out, bmm1_scale, bmm2_scale, sinks,
        enable_pdl,
    )  # fmt: skip
    return shaped(call, serve(call), query, out)


def xqa_mla_call(
    query: Any, kv_cache: Any, kv_lora_rank: Any, qk_rope_head_dim: Any, block_tables: Any, seq_lens: Any,
    out: Any = None, bmm1_scale: Any = 1.0, bmm2_scale: Any = 1.0, sinks: Any = None, enable_pdl: Any = None,
) -> AttentionCall:  # fmt: skip
    """Return the call of `xqa_batch_decode_with_kv_cache_mla`."""
    return mla_decode_call(
        query, kv_cache, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, out=out, bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale, sinks=sinks, enable_pdl=enable_pdl,
    )  # fmt: skip


def mla_decode_call(
    query: Any, kv_cache: Any, kv_lora_rank: Any, qk_rope_head_dim: Any, block_tables: Any, seq_lens: Any,
    sparse_mla_top_k: Any = 0, out: Any = None, bmm1_scale: Any = 1.0, bmm2_scale: Any = 1.0, sinks: Any = None,
    skip_softmax_threshold_scale_factor: Any = None, enable_pdl: Any = None, backend: Any = "auto",
    uses_shared_paged_kv_idx: Any = True, lse: Any = None, return_lse: Any = False, cum_seq_lens_q: Any = None,
    max_q_len: Any = None, sparse_mla_top_k_lens: Any = None, enable_dcp: Any = False, cp_world: Any = 1,
    cp_rank: Any = 0, causal_seqlens_kv_global: Any = None, is_var_seq: Any = True, use_fp16_softmax: Any = None,
) -> AttentionCall:  # fmt: skip
    """Return the call of `trtllm_batch_decode_with_kv_cache_mla`. Its hints that are not checked are left out."""
    if backend not in BACKENDS:
        raise UnknownName(f"backend: {backend!r}, must be one of {listed(BACKENDS)}")
    _check_modes(skip_softmax_threshold_scale_factor, enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global)
    check_flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx)
    check_flag("is_var_seq", is_var_seq)
    check_optional_flag("use_fp16_softmax", use_fp16_softmax)
    check_flag("return_lse", return_lse)
    columns = check_integer("kv_lora_rank", integer(kv_lora_rank), 1)
    rotated = check_integer("qk_rope_head_dim", integer(qk_rope_head_dim), 0)
    ragged = cum_seq_lens_q is not None
    if ragged:
        check_strided("cum_seq_lens_q", cum_seq_lens_q, 1)
    shape = check_strided("query", query).shape
    if len(shape) != (3 if ragged else 4):
        need = "3 dimensions with" if ragged else "4 dimensions without"
        raise ValueError(f"query: shape {tuple(shape)}, must have {need} cum_seq_lens_q")
    dim = columns + rotated
    if shape[-1] != dim:
        raise ValueError(f"query: shape {tuple(shape)}, must end with {dim}, {_parts(columns, rotated)}")
    k = check_strided("kv_cache", kv_cache)
    if k.dim() == 3:
        k = k.unsqueeze(1)
    if k.dim() != 4 or k.shape[1] != 1:
        raise ValueError(f"kv_cache: shape {tuple(kv_cache.shape)}, must be (pages, P, D) or (pages, 1, P, D)")
    top_k = check_integer("sparse_mla_top_k", integer(sparse_mla_top_k), 0)
    k, k_rope, record = _cache(k, kv_cache, columns, rotated, top_k)
    most = shape[1]
    if ragged:
        most = check_integer("max_q_len", integer(max_q_len), 0)
    elif max_q_len is not None:
        check_integer("max_q_len", integer(max_q_len))  # not used
    if top_k:
        signature, most = SPARSE if sparse_mla_top_k_lens is None else COUNTED, 1
        if not uses_shared_paged_kv_idx:
            raise NotImplementedError("uses_shared_paged_kv_idx: False, must be True with sparse_mla_top_k")
        requests = _chosen(query, block_tables, top_k, seq_lens, sparse_mla_top_k_lens, cum_seq_lens_q)
    elif sparse_mla_top_k_lens is not None:
        given = tuple(check_strided("sparse_mla_top_k_lens", sparse_mla_top_k_lens).shape)
        raise ValueError(f"sparse_mla_top_k_lens: shape {given}, must be None without sparse_mla_top_k")
    else:
        signature = NAME if ragged else EQUAL
        if not uses_shared_paged_kv_idx:
            block_tables = _pages_of_keys(block_tables, seq_lens, k.shape[2], not traced(query))
        check_strided("block_tables", block_tables, 2)
        requests = sequences_of(block_tables, check_strided("seq_lens", seq_lens, 1), cum_seq_lens_q, not traced(query))
        if not ragged and shape[0] != block_tables.shape[0]:
            need = f"{block_tables.shape[0]}, rows of block_tables"
            raise ValueError(f"query: shape {tuple(shape)}, must begin with {need}")
    scale, scale_tensor = split_scale("bmm1_scale", bmm1_scale)
    out_scale, out_scale_tensor = split_scale("bmm2_scale", bmm2_scale)
    q, q_rope = columns_and_rope(query if ragged else query.flatten(0, 1), columns)
    out_dtype = torch.bfloat16 if query.dtype is torch.float8_e4m3fn else query.dtype
    return AttentionCall(
        signature, q, k, k, requests, most,
        scale, out_scale, return_lse=bool(return_lse), enable_pdl=enable_pdl, out_dtype=out_dtype, shares_v=True,
        out=_flat(out, (*shape[:-1], columns)), lse=lse, sinks=one_sink(sinks), scale_tensor=scale_tensor,
        out_scale_tensor=out_scale_tensor, q_rope=q_rope, k_rope=k_rope, record=record,
    )  # fmt: skip


def _parts(columns: int, rotated: int) -> str:
    """Return the parts of a row for an error message. Only a branch that raises may call this, since torch.compile
    cannot format dynamic sizes."""
    return f"kv_lora_rank {columns} + qk_rope_head_dim {rotated}"


def _cache(
    k: torch.Tensor, given: torch.Tensor, columns: int, rotated: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Return a cache (pages, 1, P, D), those columns of it that V does not have, if they lie apart, and its record."""
    record, dim = PACKED.get((columns, rotated), ""), columns + rotated
    if k.dtype == torch.uint8 and top_k and record:
        size = RECORDS[record].row
        if k.shape[3] != size and (rotated or k.shape[3] < size):
            need = f"{size}{'' if rotated else ' or more'}, bytes of {_parts(columns, rotated)}"
            raise ValueError(f"kv_cache: shape {tuple(given.shape)}, must end with {need}")
        return k[..., :size], None, record
    if k.shape[3] != dim:
        raise ValueError(f"kv_cache: shape {tuple(given.shape)}, must end with {dim}, {_parts(columns, rotated)}")
    return *columns_and_rope(k, columns), "e4m3" if k.dtype == torch.float8_e4m3fn else ""


def _chosen(
    query: torch.Tensor, slots: Any, top_k: int, lens: Any, own_lens: Any, offsets: torch.Tensor | None
) -> SequenceBatch:
    """Return the requests of rows with keys that they have chosen, after a check of the shapes."""
    lead = query.shape[:-2]
    columns = check_strided("block_tables", slots).shape[-1:].numel()
    if columns != top_k:
        raise ValueError(f"sparse_mla_top_k: {top_k}, must be {columns}, the last dimension of block_tables")
    check_strided("block_tables", slots, len(lead) + 1)
    check_shape("block_tables", slots, (*lead, top_k), "rows of query, sparse_mla_top_k")
    name, lens = ("seq_lens", lens) if own_lens is None else ("sparse_mla_top_k_lens", own_lens)
    if lens is not None:
        lens = check_strided(name, lens).flatten()
        batch = lead[0]
        if offsets is not None:
            batch = check_operand("cum_seq_lens_q", offsets, 1, (torch.int32,), lens.device).shape[0] - 1
        if lens.shape[0] not in (lead.numel(), batch):
            raise ValueError(f"{name}: {lens.shape[0]} elements, must have {lead.numel()} or {batch}")
        if lens.shape[0] != lead.numel() and batch > 0:
            lens = _counts_of_rows(lens, lead, offsets, own_lens is None)
    slots, plain = slots.flatten(0, -2), not traced(query)
    return slot_sequences(slots, counts_of(slots, lens, 1, plain), plain)


def _counts_of_rows(lens: torch.Tensor, lead: torch.Size, offsets: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """Return how many keys count for each row, from those of its request. causal: the last row of a request has all,
    and each row before it one less. offsets: as cum_seq_lens_q; None for requests of lead[1] rows."""
    rows = torch.arange(lead.numel(), dtype=torch.int32, device=lens.device)
    if offsets is None:
        lens, behind = lens.repeat_interleave(lead[1]), lead[1] - 1 - rows % lead[1]
    else:
        ends = offsets[1:]  # the clamp makes no view of it and changes no result, see `host.segments.segments_of`
        request = torch.searchsorted(ends.clamp(min=0), rows, right=True).clamp(max=ends.shape[0] - 1)
        lens, behind = lens[request], ends[request] - 1 - rows
    return lens - behind if causal else lens


def _pages_of_keys(tables: Any, lens: Any, page_size: int, plain: bool) -> torch.Tensor:
    """Return the pages of K, (B, M), of tables (B, 2, M) that have those of V behind them, which must be the same.

    The values are compared on the CPU, and elsewhere if `checking`. plain: nothing traces the call.
    """
    shape = check_strided("block_tables", tables, 3).shape
    if shape[1] != 2:
        need = "(B, 2, M) unless uses_shared_paged_kv_idx"
        raise ValueError(f"block_tables: shape {tuple(shape)}, must be {need}")
    if plain and not tables.is_meta and (tables.is_cpu or checking() and not machine.current.is_capturing()):
        columns = torch.arange(shape[2], device=tables.device)
        used = columns < -(-check_strided("seq_lens", lens, 1) // page_size)[:, None]
        if lens.shape[0] == shape[0] and ((tables[:, 0] != tables[:, 1]) & used).any():
            raise ValueError("block_tables: pages of V that are not those of K, must be the same: V is a part of K")
    return tables[:, 0]


def _check_modes(skip: Any, dcp: Any, world: Any, rank: Any, lens: Any) -> None:
    """Raise on values of arguments that ask for a mode that no kernel has."""
    parallel = "context parallelism is not supported"
    for name, value, only in (("cp_world", world, 1), ("cp_rank", rank, 0)):
        if check_integer(name, integer(value)) != only:
            raise NotImplementedError(f"{name}: {value}, must be {only}: {parallel}")
    for name, value, why in (
        ("causal_seqlens_kv_global", lens, parallel),
        ("skip_softmax_threshold_scale_factor", skip, "skip-softmax is not supported"),
    ):  # fmt: skip
        if value is not None:
            raise NotImplementedError(f"{name}: {type(value).__name__}, must be None: {why}")
    check_flag("enable_dcp", dcp)
    if dcp:
        raise NotImplementedError(f"enable_dcp: True, must be False: {parallel}")


def _flat(out: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return an output as the call takes it, (tokens, H, Dv): a view, since it is written."""
    if out is None:
        return None
    check_shape("out", check_strided("out", out, len(shape)), shape, "that of query, with kv_lora_rank columns")
    if len(shape) == 3:
        return out
    if shape[0] > 1 and shape[1] > 1 and out.stride(0) != shape[1] * out.stride(1):
        raise ValueError(f"out: strides {out.stride()}, the first must be {shape[1]} times the second")
    return out.view(shape[0] * shape[1], *shape[2:])


def shaped(call: AttentionCall, found: Any, query: torch.Tensor, out: Any) -> Any:
    """Return the function's result for that of its call. out: the output that was given, or None."""
    flat, lse = found if call.return_lse else (found, None)
    if out is None:
        out = flat if query.dim() == 3 else flat.view(*query.shape[:2], *flat.shape[1:])
    return out if lse is None else (out, lse)


def bound_rows(call: AttentionCall, query: Any, out: Any) -> tuple[Any, torch.Tensor | None]:
    """Return a query and an output, or None, as the call takes them. They replace those of a bound call."""
    chosen = call.requests.form == "slots"
    ragged = query.dim() == 3 if chosen else call.requests.cu_seqlens_q is not None
    shape = check_strided("query", query, 3 if ragged else 4).shape
    if ragged:
        return columns_and_rope(query, call.dim_vo), _flat(out, (*shape[:-1], call.dim_vo))
    tokens = call.requests.batch * call.max_q_len
    if shape[:2] != (call.requests.batch, call.max_q_len) and (not chosen or shape[:2].numel() != tokens):
        need = call.requests.batch, call.max_q_len
        raise ValueError(f"query: shape {tuple(shape)}, must begin with {need}, those of the bound call")
    return columns_and_rope(query.flatten(0, 1), call.dim_vo), _flat(out, (*shape[:-1], call.dim_vo))
