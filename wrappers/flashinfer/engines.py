"""Signatures that engines call on Hopper, over the two functions of `trtllm`: vLLM's decode and SGLang's prefill."""

from collections.abc import Sequence
from typing import Any

import torch

from ..attention.call import AttentionCall
from ..attention.checks import SIGNATURES
from ..attention.op import serve
from ..host.checks import (
    UnknownName,
    check_flag,
    check_integer,
    check_number,
    check_operand,
    check_shape,
    check_strided,
    listed,
)
from ..host.plain import traced
from ..host.scalars import integer, real
from .trtllm import CONTEXT, context_call, decode_call, one_sink

PAGED = {"Q_PAGED_KV_NHD": "NHD", "Q_PAGED_KV_HND": "HND"}
RAGGED = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V")
MASKS = ("causal", "sliding_window", "padding", "chunked")
FMHA = "trtllm_fmha_v2_prefill"
SIGNATURES[FMHA] = SIGNATURES[CONTEXT] | {
    "q": "qkv (query)", "kv": "qkv (K, V)", "k": "qkv (K)", "v": "qkv (V)", "soft_cap": "logits_soft_cap_scale",
}  # fmt: skip


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int | None,
    bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0, window_left: int = -1,
    out: torch.Tensor | None = None, sinks: torch.Tensor | None = None, kv_layout: str = "NHD",
    enable_pdl: bool | None = None, q_len_per_req: int | None = 1, o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None, kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute `trtllm_batch_decode_with_kv_cache` with the arguments of FlashInfer 0.7.2's function of this name.

    The arguments are in upstream's order. Those that are not listed are as in `trtllm_batch_decode_with_kv_cache`, and
    so are the errors.

    Args, if they differ from that function's:
        kv_layout: "NHD" by default.
        q_cu_seq_lens: int32 (B + 1,), in place of cum_seq_lens_q.
        q_len_per_req: with q_cu_seq_lens, in place of max_q_len: the largest number of query tokens of a request.
        seq_lens: int32 or uint32.
        out: always of the query's shape.
        mask: may be None if q_len_per_req > 1; drafts are then causal.

    >>> q, cache = torch.randn(2, 8, 64).half(), torch.randn(3, 2, 16, 2, 64).half()  # 3 pages of 16 rows
    >>> table, lens = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([20, 9]).int()
    >>> xqa_batch_decode_with_kv_cache(q, cache, None, table, lens, None, 64**-0.5).shape
    torch.Size([2, 8, 64])
    """
    return serve(xqa_batch_call(
        query, kv_cache, block_tables, seq_lens, bmm1_scale, bmm2_scale, window_left, out, sinks, kv_layout, enable_pdl,
        q_len_per_req, o_scale, mask, kv_cache_sf, q_cu_seq_lens,
    ))  # fmt: skip


def xqa_batch_call(
    query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, bmm1_scale: Any, bmm2_scale: Any, window_left: Any,
    out: Any, sinks: Any, kv_layout: Any, enable_pdl: Any, q_len_per_req: Any, o_scale: Any, mask: Any,
    kv_cache_sf: Any, q_cu_seq_lens: Any,
) -> AttentionCall:  # fmt: skip
    """Return the call of `xqa_batch_decode_with_kv_cache`: that of the decode function."""
    if q_cu_seq_lens is not None:
        check_operand("q_cu_seq_lens", q_cu_seq_lens, 1, (torch.int32,), getattr(query, "device", None))
        if isinstance(seq_lens, torch.Tensor) and seq_lens.ndim:
            check_shape("q_cu_seq_lens", q_cu_seq_lens, (seq_lens.shape[0] + 1,), "requests + 1")
    q_len_per_req = check_integer("q_len_per_req", integer(q_len_per_req), 1)
    return decode_call(
        query, kv_cache, block_tables, seq_lens, bmm1_scale, bmm2_scale, window_left, out, sinks=sinks,
        kv_layout=kv_layout, enable_pdl=enable_pdl, q_len_per_req=q_len_per_req, o_scale=o_scale, mask=mask,
        max_q_len=None if q_cu_seq_lens is None else q_len_per_req, cum_seq_lens_q=q_cu_seq_lens,
        kv_cache_sf=kv_cache_sf,
    )  # fmt: skip


def trtllm_fmha_v2_prefill(
    qkv: tuple[Any, ...], input_layout: str, workspace_buffer: torch.Tensor | None, seq_lens: torch.Tensor,
    max_q_len: int, max_kv_len: int | None, bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor,
    batch_size: int, cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None,
    block_tables: torch.Tensor | None = None, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None, pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None, mask_mode: str = "causal", window_left: int | None = -1,
    chunked_attention_size: int = 0, save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float | None = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Compute `trtllm_batch_context_with_kv_cache` with the arguments of FlashInfer 0.7.2's FMHA v2.

    The arguments are in upstream's order. Those that are not listed are as in `trtllm_batch_context_with_kv_cache`.

    Args:
        qkv, input_layout: (query, kv_cache) with "Q_PAGED_KV_NHD" or "Q_PAGED_KV_HND". kv_cache is (pages, 2, ...), or
            contiguous (k, v) of one shape, V's address being a whole number of pages behind K's.
        block_tables: int32 (B, M). With (k, v): (B, 2, M), and V's entries [:, 1] count pages from K's address.
        sinks: fp32 (Hq,), or a list that holds this one tensor. logits_soft_cap_scale: c * tanh(s / c); None or 0: off.
        pos_encoding_mode: None or "NONE". chunked_attention_size: 0.
        mask_mode: "causal" or "sliding_window", both with window_left; or "padding": every key, without window_left.

    NotImplementedError: the ragged input layouts, alibi, chunked attention and save_softmax_stats (the context function
    returns the LSE). All else is raised as there.

    Returns out (T, Hq, D), a new tensor unless one was given.

    >>> q, cache = torch.randn(4, 8, 64).half(), torch.randn(3, 2, 16, 2, 64).half()  # 3 pages of 16 rows
    >>> table, lens, starts = (torch.tensor(x).int() for x in ([[2, 0], [1, -1]], [20, 9], [0, 3, 4]))
    >>> trtllm_fmha_v2_prefill(
    ...     (q, cache), "Q_PAGED_KV_NHD", None, lens, 3, None, 64**-0.5, 1.0, 2, starts, None, table
    ... ).shape
    torch.Size([4, 8, 64])
    """
    return serve(fmha_call(
        qkv, input_layout, seq_lens, max_q_len, bmm1_scale, bmm2_scale, batch_size, cum_seq_lens_q, block_tables, out,
        out_dtype, sinks, pos_encoding_mode, logits_soft_cap_scale, mask_mode, window_left, chunked_attention_size,
        save_softmax_stats, skip_softmax_threshold_scale_factor,
    ))  # fmt: skip


def fmha_call(
    qkv: Any, input_layout: Any, seq_lens: Any, max_q_len: Any, bmm1_scale: Any, bmm2_scale: Any, batch_size: Any,
    cum_seq_lens_q: Any, block_tables: Any, out: Any, out_dtype: Any, sinks: Any, pos_encoding_mode: Any,
    logits_soft_cap_scale: Any, mask_mode: Any, window_left: Any, chunked_attention_size: Any, save_softmax_stats: Any,
    skip_softmax_threshold_scale_factor: Any,
) -> AttentionCall:  # fmt: skip
    """Return the call of `trtllm_fmha_v2_prefill`: that of the context function."""
    if input_layout in RAGGED:
        raise NotImplementedError(f"input_layout: {input_layout!r}, not supported, must be one of {listed(PAGED)}")
    if not isinstance(input_layout, str) or input_layout not in PAGED:
        raise UnknownName(f"input_layout: {input_layout!r}, must be one of {listed(PAGED)}")
    if not isinstance(mask_mode, str) or mask_mode.lower() not in MASKS:
        raise UnknownName(f"mask_mode: {mask_mode!r}, must be one of {listed(MASKS)}")
    window_left = -1 if window_left is None else check_integer("window_left", integer(window_left))
    causal = mask_mode.lower() != "padding"
    if not causal and window_left >= 0:
        raise ValueError(f"window_left: {window_left}, must be negative if mask_mode is 'padding'")
    _check_modes(mask_mode, chunked_attention_size, pos_encoding_mode, save_softmax_stats)
    if not isinstance(qkv, (tuple, list)) or len(qkv) != 2:
        given = f"a {type(qkv).__name__} of {len(qkv)}" if isinstance(qkv, (tuple, list)) else type(qkv).__name__
        raise TypeError(f"qkv: {given}, must be (query, kv_cache) if input_layout is {input_layout!r}")
    query, kv_cache = qkv
    shared = not isinstance(kv_cache, (tuple, list))
    table = check_operand("block_tables", block_tables, 2 if shared else 3, (torch.int32,), None)
    if not shared:
        kv_cache, table = _from_base(kv_cache, table)
    if logits_soft_cap_scale is not None:
        logits_soft_cap_scale = real(logits_soft_cap_scale)
        check_number("logits_soft_cap_scale", logits_soft_cap_scale)
        if logits_soft_cap_scale < 0:
            raise ValueError(f"logits_soft_cap_scale: {logits_soft_cap_scale}, must be None, 0 (off) or positive")
    call = context_call(
        query, kv_cache, table, seq_lens, max_q_len, bmm1_scale, bmm2_scale, batch_size, cum_seq_lens_q, window_left,
        out, out_dtype, kv_layout=PAGED[input_layout], sinks=one_sink(sinks),
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, causal=causal,
        uses_shared_paged_kv_idx=shared, logits_soft_cap=logits_soft_cap_scale,
    )  # fmt: skip
    return call._replace(signature=FMHA)


def _check_modes(mask_mode: str, chunk: Any, positions: Any, stats: Any) -> None:
    """Raise on modes that FMHA v2 has and no kernel here supports."""
    if check_integer("chunked_attention_size", integer(chunk)) > 0:
        raise NotImplementedError(f"chunked_attention_size: {chunk}, not supported, must be 0")
    if mask_mode.lower() == "chunked":
        raise NotImplementedError(f"mask_mode: {mask_mode!r}, not supported, must be one of {listed(MASKS[:3])}")
    if positions is not None and positions != "NONE":
        known = isinstance(positions, str) and positions.lower() == "alibi"
        error: type[Exception] = NotImplementedError if known else UnknownName
        raise error(f"pos_encoding_mode: {positions!r}, not supported, must be None")
    check_flag("save_softmax_stats", stats)
    if stats:
        lse = "trtllm_batch_context_with_kv_cache returns the LSE"
        raise NotImplementedError(f"save_softmax_stats: True, not supported, must be False: {lse}")


def _from_base(pools: Any, table: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return (k, v) and a page table for them, from a table in which V's pages count from K's base.

    If both lie in one storage, k and v become one pool that begins where K does and ends where V does, and the table
    stays. Otherwise the pools stay, and V's entries of the new table count from V's base.
    """
    if len(pools) != 2:
        raise ValueError(f"qkv: a kv_cache of {len(pools)} tensors, must be (k, v)")
    check_strided("qkv (K)", pools[0], 4)
    for name, t in zip(("qkv (K)", "qkv (V)"), pools):
        if not check_operand(name, t, 4, (pools[0].dtype,), pools[0].device, "that of K").is_contiguous():
            raise ValueError(f"{name}: strides {t.stride()}, must be contiguous")
    k, v = pools
    check_shape("qkv (V)", v, tuple(k.shape), "that of K")
    page, together = k.shape[1:].numel(), k.untyped_storage()._cdata == v.untyped_storage()._cdata
    if together:
        apart = v.storage_offset() - k.storage_offset()
    else:
        apart = 0 if traced(k) else (v.data_ptr() - k.data_ptr()) // k.element_size()
    if not page or apart <= 0 or apart % page:
        raise ValueError(f"qkv (V): {apart} elements behind K, must be whole pages of {page} elements behind K")
    pages = apart // page
    if not together:
        return (k, v), torch.stack([table[:, 0], table[:, 1] - pages], 1)
    both = k.as_strided((pages + v.shape[0], *k.shape[1:]), k.stride())
    return (both, both), table
