"""`xqa`: decode attention in place, in the terms of FlashInfer's XQA."""

from typing import Any

import torch

from ..attention.call import AttentionCall, SequenceBatch, TableLayout, sequences_of
from ..attention.checks import E4M3, E5M2, SIGNATURES, drafts_of
from ..attention.op import serve
from ..attention.views import pair
from ..fp4 import SCALE_TYPES
from ..host.checks import (
    FP32_LEAST,
    FP32_MOST,
    check_flag,
    check_integer,
    check_number,
    check_one_of,
    check_shape,
    check_strided,
)
from ..host.plain import traced
from ..host.scalars import integer, product, real, scale_of

LAYOUT = TableLayout("page_table", column=True)
SIGNATURES["xqa"] = {
    "kv": "k_cache, v_cache", "k": "k_cache", "v": "v_cache", "kv_lens": "seq_lens", "out": "output",
    "cu_seqlens_q": "q_cu_seq_lens", "max_q_len": "q_seq_len", "scale": "q_scale * kv_scale", "out_scale": "kv_scale",
    "scales": "k_sf_cache, v_sf_cache", "k_scales": "k_sf_cache", "v_scales": "v_sf_cache",
    "interleaved": "v_scales_interleaved", "drafts": "mask",
}  # fmt: skip
_Tensor, _strided = torch.Tensor, torch.strided


def xqa(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor,
    output: torch.Tensor, workspace_buffer: torch.Tensor | None, semaphores: torch.Tensor | None, num_kv_heads: int,
    page_size: int, sinks: torch.Tensor | None = None, q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor | None = None, sliding_win_size: int = 0, kv_layout: str | int | None = "NHD",
    sm_count: int | None = None, enable_pdl: bool | None = None, rcp_out_scale: float = 1.0, q_seq_len: int = 1,
    mask: torch.Tensor | None = None, *, q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None, v_sf_cache: torch.Tensor | None = None,
    v_scales_interleaved: bool = False, batch_invariant: bool = False,
) -> None:  # fmt: skip
    """Compute attention of one token per request, or of several drafts, over a paged KV cache that already holds them.

    The result is written to `output`: kv_scale * softmax(q_scale * kv_scale / sqrt(D) * q k^T) v. kv_scale applies to
    caches of any dtype. Arguments are in upstream's order (FlashInfer 0.7.2). Those that only this package has are
    keyword-only.

    Args:
        q: (B, 1, Hq, D) fp16 or bf16; the second dimension is the beam width and must be 1. With drafts:
            (B, 1, q_seq_len, Hq, D); or ragged (T, Hq, D) with q_cu_seq_lens, int32 or uint32 (B + 1,), and q_seq_len,
            the largest number of tokens of a request.
        output: q's shape; q's dtype or e4m3. e4m3 output is multiplied by rcp_out_scale and saturated.
        k_cache, v_cache: (pages, P, Hkv, D) "NHD" or (pages, Hkv, P, D) "HND", or flat (pages * P * Hkv, D) with rows
            in NHD order. The dtype is q's, e4m3, or uint8: packed NVFP4, last dimension D / 2, with k_sf_cache and
            v_sf_cache, uint8 or e4m3 scale factors in the same order, last dimension D / 16.
        page_table: int32 (B, M). Entries past a request's last page are not read; a negative entry before it stands for
            a page of zeros. seq_lens: uint32 or int32 (B, 1) or (B,), KV lengths including the tokens of q.
        num_kv_heads, page_size: Hkv, and P, at least 1 each.
        sinks: fp32 (Hkv, Hq / Hkv), added to the softmax denominator; natural-log units, not scaled.
        q_scale, kv_scale: each a float or an fp32 tensor of one element, on q's device or on the host, where it counts
            as a float. kv_scale None: 1.
        sliding_win_size: the last W positions are seen; 0: all.
        kv_layout: "NHD" or "HND". An int in this position is sm_count, as in older signatures.
        mask: uint16 (B, q_seq_len, W) or (T, W), W being 2 for every 32 drafts: the drafts that each draft sees, as in
            `trtllm_batch_decode_with_kv_cache`. Required if q_seq_len > 1.
        v_scales_interleaved, batch_invariant: as there.

    Accepted and not used: workspace_buffer, semaphores (any content), sm_count. A hint: enable_pdl (None: on).

    Raises before any launch: ValueError for a rank, shape, stride or device; TypeError for a dtype; NotImplementedError
    if no kernel serves the call.

    >>> q, cache = torch.randn(2, 1, 8, 64).half(), torch.randn(3, 16, 2, 64).half()  # 3 pages of 16 rows
    >>> table, lens, out = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([[20], [9]]).int(), torch.empty_like(q)
    >>> xqa(q, cache, cache, table, lens, out, None, None, 2, 16)
    >>> out.isfinite().all()
    tensor(True)
    """
    serve(xqa_call(
        q, k_cache, v_cache, page_table, seq_lens, output, num_kv_heads, page_size, sinks, q_scale, kv_scale,
        sliding_win_size, kv_layout, enable_pdl, rcp_out_scale, q_seq_len, mask, q_cu_seq_lens, k_sf_cache, v_sf_cache,
        v_scales_interleaved, batch_invariant,
    ))  # fmt: skip


def xqa_call(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, output: Any, num_kv_heads: Any, page_size: Any,
    sinks: Any, q_scale: Any, kv_scale: Any, sliding_win_size: Any, kv_layout: Any, enable_pdl: Any, rcp_out_scale: Any,
    q_seq_len: Any, mask: Any, q_cu_seq_lens: Any, k_sf_cache: Any, v_sf_cache: Any, v_scales_interleaved: Any,
    batch_invariant: Any,
) -> AttentionCall:  # fmt: skip
    """Return the call of `xqa`."""
    if (k_sf_cache is None) != (v_sf_cache is None):
        raise ValueError("k_sf_cache, v_sf_cache: one of the two is None, must be both given or both None")
    _check_given(q, output, seq_lens)
    if q_seq_len.__class__ is not int or q_seq_len < 1:
        q_seq_len = check_integer("q_seq_len", integer(q_seq_len), 1)
    if q_cu_seq_lens is not None and check_strided("q_cu_seq_lens", q_cu_seq_lens, 1).dtype == torch.uint32:
        q_cu_seq_lens = q_cu_seq_lens.view(torch.int32)
    rows, out = _tokens(q, output, q_seq_len, q_cu_seq_lens)
    requests = _requests(page_table, seq_lens, q, q_cu_seq_lens)
    drafts = None
    if mask is not None:
        lead = (requests.batch, q_seq_len) if q_cu_seq_lens is None else (q.shape[0],)
        drafts = drafts_of(mask, lead, q_seq_len, "q_seq_len", q.device)
    elif q_seq_len > 1:
        raise ValueError(f"mask: None, required if q_seq_len is {q_seq_len}")
    if not isinstance(kv_layout, str) and (kv_layout is None or integer(kv_layout).__class__ is int):
        kv_layout = "NHD"  # the value was sm_count
    if page_size.__class__ is not int or num_kv_heads.__class__ is not int or sliding_win_size.__class__ is not int:
        page_size, num_kv_heads, sliding_win_size = map(integer, (page_size, num_kv_heads, sliding_win_size))
    check_integer("page_size", page_size, 1)
    check_integer("num_kv_heads", num_kv_heads, 1)
    size = page_size, num_kv_heads
    caches = _paged("k_cache", k_cache, *size, kv_layout), _paged("v_cache", v_cache, *size, kv_layout)
    k, v = pair("k_cache, v_cache", caches, kv_layout)
    if k.dtype is E5M2:  # xqa refuses it, but may find the plan of another decode function that accepts it
        check_one_of("k_cache: dtype", E5M2, (q.dtype, E4M3, torch.uint8))
    k_scales = v_scales = None
    if k_sf_cache is not None:
        both = (
            _block_scales("k_sf_cache", k_sf_cache, *size, kv_layout),
            _block_scales("v_sf_cache", v_sf_cache, *size, kv_layout),
        )
        k_scales, v_scales = pair("k_sf_cache, v_sf_cache", both, kv_layout)
    _, heads, dim = rows.shape
    if not dim:
        raise ValueError(f"q: shape {tuple(q.shape)}, head_dim must be at least 1")
    if sinks is not None:
        check_strided("sinks", sinks)
        check_shape("sinks", sinks, (num_kv_heads, heads // num_kv_heads), "KV heads, query heads per KV head")
        sinks = sinks.reshape(heads)
    window_left = check_integer("sliding_win_size", sliding_win_size, 0) - 1  # off is 0 there, negative here
    q_number, q_tensor = _split("q_scale", q_scale, q.device)
    out_scale, kv_tensor = _split("kv_scale", 1.0 if kv_scale is None else kv_scale, q.device)
    scale, scale_tensor = q_number * out_scale * dim**-0.5, q_tensor
    if kv_tensor is not None:
        scale_tensor = product(q_tensor, kv_tensor)
    if rcp_out_scale.__class__ is not float or rcp_out_scale != 1.0:
        rcp_out_scale = real(rcp_out_scale)
        check_number("rcp_out_scale", rcp_out_scale, positive=True)
    if output.dtype == E4M3:
        out_scale *= rcp_out_scale
    check_flag("batch_invariant", batch_invariant)
    return AttentionCall(
        signature="xqa", q=rows, k=k, v=v, requests=requests, max_q_len=q_seq_len, scale=scale, out_scale=out_scale,
        window_left=window_left, interleaved=v_scales_interleaved, split_kv="fixed" if batch_invariant else "auto",
        enable_pdl=enable_pdl, out=out, sinks=sinks, scale_tensor=scale_tensor, out_scale_tensor=kv_tensor,
        k_scales=k_scales, v_scales=v_scales, drafts=drafts,
    )  # fmt: skip


def bound_rows(call: AttentionCall, q: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a query and an output as the call takes them. They replace those of a bound call."""
    for name, t in (("q", q), ("output", output)):
        check_strided(name, t)
    ragged = call.requests.cu_seqlens_q
    if ragged is None and q.dim() and q.shape[0] != call.requests.batch:
        raise ValueError(f"q: {q.shape[0]} requests, must be {call.requests.batch}, those of the bound call")
    return _tokens(q, output, call.max_q_len, ragged)


def shaped(call: AttentionCall, found: Any, q: Any, output: Any) -> None:
    """Return what `xqa` returns: nothing, as it writes its output."""


def _check_given(q: Any, output: Any, seq_lens: Any) -> None:
    for name, t in (("q", q), ("output", output), ("seq_lens", seq_lens)):
        if not isinstance(t, _Tensor):
            check_strided(name, t)
    if q.layout is not _strided or output.layout is not _strided or q.is_nested or output.is_nested:
        check_strided("q", q)
        check_strided("output", output)


def _requests(table: Any, lens: Any, q: torch.Tensor, offsets: torch.Tensor | None) -> SequenceBatch:
    requests = sequences_of(table, lens, offsets, not traced(q), LAYOUT)
    if requests.batch < 0:
        check_strided("page_table", table, 2)
        check_strided("seq_lens", lens)
    if offsets is None and requests.batch != q.shape[0]:
        check_shape("seq_lens", lens, (q.shape[0], 1), "batch, 1")
    return requests


def _split(name: str, value: Any, device: torch.device) -> tuple[float, torch.Tensor | None]:
    """Return (float, tensor), the product of which is a scale."""
    if value.__class__ is float and FP32_LEAST <= value <= FP32_MOST:
        return value, None
    scale, tensor = scale_of(name, value, device)
    return float(scale), tensor


def _tokens(
    q: torch.Tensor, output: torch.Tensor, most: int, offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and output as (T, Hq, D)."""
    check_one_of("q: dtype", q.dtype, (torch.float16, torch.bfloat16))
    drafts, ragged = most > 1 or q.dim() == 5, offsets is not None
    if ragged:
        shape, fits = "(tokens, heads, head_dim) with q_cu_seq_lens", q.dim() == 3
    elif drafts:
        shape, fits = "(batch, beam width 1, q_seq_len {}, heads, head_dim)", q.dim() == 5 and q.shape[2] == most
    else:
        shape, fits = "(batch, beam width 1, heads, head_dim)", q.dim() == 4
    if not fits or not ragged and q.shape[1] != 1:
        raise ValueError(f"q: shape {tuple(q.shape)}, must be {shape.format(most)}")
    if output.shape != q.shape:
        check_shape("output", output, tuple(q.shape), "that of q")
    check_one_of("output: dtype", output.dtype, (q.dtype, E4M3))
    if ragged:
        return q, output
    if not drafts:
        return q.squeeze(1), output.squeeze(1)
    if not output.is_contiguous():
        raise ValueError(f"output: strides {output.stride()}, must be contiguous if q has 5 dimensions")
    return q[:, 0].flatten(0, 1), output.view(-1, *q.shape[3:])


def _paged(name: str, cache: Any, page_size: int, heads: int, layout: Any) -> torch.Tensor:
    """Return a cache in 4 dimensions, checked against page_size and num_kv_heads."""
    if not isinstance(cache, _Tensor):
        check_strided(name, cache)
    if cache.dim() == 2:
        if cache.shape[0] % (page_size * heads) or layout != "NHD" or not cache.is_contiguous():
            given = f"shape {tuple(cache.shape)}, strides {cache.stride()}, {layout}"
            pages = f"whole pages of {page_size} tokens x {heads} heads"
            raise ValueError(f"{name}: {given}, a flat cache must be contiguous, NHD, of {pages}")
        return cache.view(-1, page_size, heads, cache.shape[1])
    if cache.dim() != 4:
        raise ValueError(f"{name}: shape {tuple(cache.shape)}, must have 2 or 4 dimensions")
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    if cache.shape[1:3] != inner and layout in ("NHD", "HND"):
        check_shape(
            name, cache, (cache.shape[0], *inner, cache.shape[3]), f"kv_layout {layout}, page_size, num_kv_heads"
        )
    return cache


def _block_scales(name: str, scales: Any, page_size: int, heads: int, layout: Any) -> torch.Tensor:
    """Return scale factors in 4 dimensions."""
    check_one_of(f"{name}: dtype", check_strided(name, scales).dtype, SCALE_TYPES)
    return _paged(name, scales, page_size, heads, layout)
