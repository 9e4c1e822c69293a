"""The public functions of TensorRT-LLM's kernels, with FlashInfer's signatures."""

from collections.abc import Sequence
from typing import Any

import torch

from ..attention.call import SEPARATE, SHARED, AttentionCall, TableLayout, sequences_of
from ..attention.checks import SIGNATURES, drafts_of
from ..attention.op import serve
from ..attention.views import pair, scale_pair
from ..fp4 import BLOCK, FP4Tensor
from ..host.checks import (
    UnknownName,
    check_flag,
    check_integer,
    check_number,
    check_optional_flag,
    check_strided,
    listed,
)
from ..host.plain import traced
from ..host.scalars import OR_TENSOR, integer, real, scale_of, split_scale

LN2 = 0.6931471805599453
BACKENDS = ("auto", "xqa", "trtllm-gen", "cake")  # upstream's; a hint here
TRANSFORM_MODES = (None, "k_only", "separate_kv")  # likewise
CONTEXT, DECODE = "trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache"
CONTEXT_BLOCK = CONTEXT + ", kv_block_scales"  # with the older name of the scale factors
EQUAL = DECODE + ", q_len_per_req"  # requests of equal length
LOG2 = ", bmm1_scale_log2"  # suffix of DECODE or EQUAL
_SCALES = {"scales": "kv_cache_sf", "k_scales": "kv_cache_sf (K)", "v_scales": "kv_cache_sf (V)"}
_NAMES = {
    "q": "query", "kv": "kv_cache", "k": "kv_cache (K)", "v": "kv_cache (V)", "page_table": "block_tables",
    "kv_lens": "seq_lens", "cu_seqlens_q": "cum_seq_lens_q", "scale": "bmm1_scale", "out_scale": "bmm2_scale",
    "soft_cap": "logits_soft_cap", "skip": "skip_softmax_threshold_scale_factor", "out_sf_scale": "o_sf_scale",
    "drafts": "mask", "interleaved": "v_scales_interleaved",
}  # fmt: skip
SIGNATURES[CONTEXT] = _NAMES | _SCALES
SIGNATURES[CONTEXT_BLOCK] = _NAMES | {f: name.replace("kv_cache_sf", "kv_block_scales") for f, name in _SCALES.items()}
SIGNATURES[DECODE] = SIGNATURES[CONTEXT]
SIGNATURES[EQUAL] = SIGNATURES[DECODE] | {"max_q_len": "q_len_per_req"}
SIGNATURES |= {f + LOG2: SIGNATURES[f] | {"scale": "bmm1_scale_log2"} for f in (DECODE, EQUAL)}
_Tensor = torch.Tensor


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int,
    max_kv_len: int | None, bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int | None = -1,
    out: torch.Tensor | FP4Tensor | None = None, out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None, o_sf_vec_size: int | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: torch.Tensor | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, uses_shared_paged_kv_idx: bool = True,
    causal: bool = True, lse: torch.Tensor | None = None, return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None, use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None, backend: str = "auto", *, logits_soft_cap: float | None = None,
    kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    v_scales_interleaved: bool = False, alibi_slopes: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Compute attention of ragged queries over a paged KV cache that already holds the queries' own tokens.

    Arguments are in upstream's order (FlashInfer 0.7.2). Those that only this package has are keyword-only.

    Args:
        query: (T, Hq, D) fp16, bf16, e4m3 or e5m2, any token and head stride. Request r owns rows
            cum_seq_lens_q[r:r + 2].
        kv_cache: (k, v), each (pages, Hkv, P, D) "HND" or (pages, P, Hkv, D) "NHD"; or one tensor (pages, 2, ...),
            or (pages, 1, ...) if K and V share storage. P is any page size from 1. The dtype is the query's. 16-bit
            queries also take e4m3, e5m2, int8 and uint8 (packed NVFP4, last dimension D / 2); e4m3 queries also take
            the last three.
        block_tables: int32 (B, M), or (B, 2, M) for (K, V) with uses_shared_paged_kv_idx=False. Entries past a
            request's last page are not read.
        seq_lens: int32 or uint32 (B,), KV lengths including this step's tokens. cum_seq_lens_q: int32 (B + 1,).
        max_q_len: an upper bound of the query lengths. It steers the schedule and never changes the result. batch_size:
            B.
        bmm1_scale, bmm2_scale: factors on the logits (natural units, nothing is implied) and on the output, each a
            float or an fp32 tensor of one element. The kernel reads a tensor on the query's device. A tensor on the
            host counts as a float: a captured graph keeps its value. On CUDA bmm1_scale must be positive.
        window_left: key j is kept if j >= position - window_left. Negative or None: no window. Independent of causal.
        out, out_dtype: the result tensor, or its dtype: fp16, bf16, e4m3 (saturated) or "nvfp4" (an FP4Tensor).
            Default: the query's dtype; with e5m2 queries one of the two is required. o_sf_scale: NVFP4's forward scale
            (`nvfp4_quantize`). o_sf_vec_size: None, or 16 with an NVFP4 output.
        sinks: fp32 (Hq,), added to each head's softmax denominator; natural-log units, not scaled.
        kv_cache_sf: scale factors of NVFP4, e4m3 or its bytes in uint8, a tuple or one tensor as kv_cache, each
            (pages, Hkv, P, D / 16) in kv_layout, linear; or, of an e4m3, e5m2 or int8 cache, fp32, one factor per token
            and head, without the last dimension, which upstream lacks. kv_block_scales is the older name.
            v_scales_interleaved: V's scale factors are in the layout of TensorRT-LLM's kernels
            (`fp4.deinterleave_v_scales`).
        causal: query row i has position i + kv_len - q_len and sees the keys up to it.
        lse: fp32 (T, Hq), receives log2 of the softmax denominator, sink included. logits_soft_cap: c * tanh(s / c).
        alibi_slopes: fp32 (Hq,); slope * (key - query row of its request) is added to a logit, before the soft cap.
        skip_softmax_threshold_scale_factor: a block of keys may be left out of out and of lse, for up to 64 query rows
            at a time, if all its probabilities are below this factor / seq_len times the largest so far. None or 0: no
            block is left out. A block has as many keys as the kernel processes at once: 128 with head_dim 128. On the
            CPU none is left out.
        use_fp16_softmax, uses_spcompress: None or False; True raises NotImplementedError.

    Hints: workspace_buffer, cum_seq_lens_kv, max_kv_len, multi_ctas_kv_counter_buffer, backend, enable_pdl (None: on).

    Returns out (a new tensor unless one was given), or (out, lse) with return_lse. A row without keys gives 0 and -inf
    (or sink * log2 e). Rows that belong to no request are undefined. CPU tensors run the fp32 reference, which also
    checks lengths, offsets and page ids.

    Raises before any launch: ValueError for a rank, shape, stride, alignment or device; NotImplementedError if no
    kernel serves the call; TypeError for a dtype; an unknown kv_layout is both a KeyError and a ValueError.

    >>> q, cache = torch.randn(4, 8, 64).half(), torch.randn(3, 2, 2, 16, 64).half()  # 3 pages of 16 rows
    >>> table, lens, starts = (torch.tensor(x).int() for x in ([[2, 0], [1, -1]], [20, 9], [0, 3, 4]))
    >>> trtllm_batch_context_with_kv_cache(q, cache, None, table, lens, 3, None, 64**-0.5, 1.0, 2, starts, None).shape
    torch.Size([4, 8, 64])
    """
    return serve(context_call(
        query, kv_cache, block_tables, seq_lens, max_q_len, bmm1_scale, bmm2_scale, batch_size, cum_seq_lens_q,
        window_left, out, out_dtype, o_sf_scale, o_sf_vec_size, kv_layout, enable_pdl, sinks, kv_cache_sf,
        skip_softmax_threshold_scale_factor, uses_shared_paged_kv_idx, causal, lse, return_lse, use_fp16_softmax,
        uses_spcompress, backend, logits_soft_cap, kv_block_scales, v_scales_interleaved, alibi_slopes,
    ))  # fmt: skip


def context_call(
    query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, max_q_len: Any, bmm1_scale: Any, bmm2_scale: Any,
    batch_size: Any, cum_seq_lens_q: Any, window_left: Any = -1, out: Any = None, out_dtype: Any = None,
    o_sf_scale: Any = None, o_sf_vec_size: Any = None, kv_layout: Any = "HND", enable_pdl: Any = None,
    sinks: Any = None, kv_cache_sf: Any = None, skip_softmax_threshold_scale_factor: Any = None,
    uses_shared_paged_kv_idx: Any = True, causal: Any = True, lse: Any = None, return_lse: Any = False,
    use_fp16_softmax: Any = None, uses_spcompress: Any = None, backend: Any = "auto", logits_soft_cap: Any = None,
    kv_block_scales: Any = None, v_scales_interleaved: Any = False, alibi_slopes: Any = None,
) -> AttentionCall:  # fmt: skip
    """Return the call of `trtllm_batch_context_with_kv_cache`. Its hints that are not checked are left out."""
    signature, scales = CONTEXT, kv_cache_sf
    if kv_block_scales is not None:
        if kv_cache_sf is not None:
            raise ValueError("kv_block_scales: another name of kv_cache_sf, only one of the two may be given")
        signature, scales = CONTEXT_BLOCK, kv_block_scales
    if backend not in BACKENDS:
        raise UnknownName(f"backend: {backend!r}, must be one of {listed(BACKENDS)}")
    if use_fp16_softmax is not None or uses_spcompress is not None:
        refuse_variants(use_fp16_softmax, uses_spcompress)
    if cum_seq_lens_q is None:
        check_strided("cum_seq_lens_q", None)
    k, v = pair("kv_cache", kv_cache, kv_layout)
    k_scales = v_scales = None
    if scales is not None:
        name = "kv_cache_sf" if kv_block_scales is None else "kv_block_scales"
        k_scales, v_scales = scale_pair(name, scales, kv_layout)
    if max_q_len.__class__ is not int or window_left.__class__ is not int or batch_size.__class__ is not int:
        max_q_len, batch_size = integer(max_q_len), integer(batch_size)
        window_left = -1 if window_left is None else integer(window_left)
    if logits_soft_cap is not None or skip_softmax_threshold_scale_factor is not None or o_sf_scale is not None:
        logits_soft_cap, o_sf_scale = real(logits_soft_cap), real(o_sf_scale)
        skip_softmax_threshold_scale_factor = real(skip_softmax_threshold_scale_factor)
    layout = _layout(uses_shared_paged_kv_idx)
    requests = sequences_of(block_tables, seq_lens, cum_seq_lens_q, not traced(query), layout)
    if batch_size.__class__ is not int or batch_size != requests.batch:
        check_integer("batch_size", batch_size, 0)
        if batch_size != requests.batch >= 0:  # seq_lens is a tensor
            raise ValueError(f"batch_size: {batch_size}, must be the {requests.batch} entries of seq_lens")
    scale, scale_tensor = split_scale("bmm1_scale", bmm1_scale)
    out_scale, out_scale_tensor = split_scale("bmm2_scale", bmm2_scale)
    call = AttentionCall(
        signature=signature, q=query, k=k, v=v, requests=requests, max_q_len=max_q_len, scale=scale,
        out_scale=out_scale, causal=causal, window_left=window_left, soft_cap=logits_soft_cap,
        skip=skip_softmax_threshold_scale_factor, interleaved=v_scales_interleaved, return_lse=return_lse,
        enable_pdl=enable_pdl, out_dtype=out_dtype, out_sf_scale=o_sf_scale, out=out, lse=lse, sinks=sinks,
        scale_tensor=scale_tensor, out_scale_tensor=out_scale_tensor, k_scales=k_scales, v_scales=v_scales,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
    if o_sf_vec_size is not None:
        _check_vector(call, o_sf_vec_size)
    return call


def refuse_variants(use_fp16_softmax: Any, uses_spcompress: Any) -> None:
    """Raise if a call asks for a variant of TensorRT-LLM's kernels that no kernel here has."""
    for name, value in (("use_fp16_softmax", use_fp16_softmax), ("uses_spcompress", uses_spcompress)):
        check_optional_flag(name, value)
        if value:
            raise NotImplementedError(f"{name}: {value}, not supported, must be None or False")


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int | None,
    bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0, window_left: int | None = -1,
    out: torch.Tensor | FP4Tensor | None = None, out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None, o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, backend: str = "auto", q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0, mask: torch.Tensor | None = None, max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None, skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True, lse: torch.Tensor | None = None, return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None, multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None, bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None, request_order_plan: Any = None, *,
    logits_soft_cap: float | None = None, v_scales_interleaved: bool = False, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Compute attention of the last tokens of each request over a paged KV cache that already holds these tokens.

    Arguments are in upstream's order (FlashInfer 0.7.2). Those that only this package has are keyword-only. Arguments
    that are not listed are as in `trtllm_batch_context_with_kv_cache`.

    Args:
        query: (B * q_len_per_req, Hq, D); or ragged (T, Hq, D) with cum_seq_lens_q, int32 (B + 1,), and max_q_len, an
            upper bound of its differences (a hint). Row t of a request with q tokens has position seq_len - q + t and
            sees no later key.
        seq_lens: int32 or uint32 (B,), KV lengths including the query's tokens.
        bmm1_scale_log2: replaces bmm1_scale: an fp32 tensor of one element, on the query's device or on the host, that
            holds the scale times log2(e).
        sinks: fp32 (Hq,), or a list that holds this one tensor.
        o_scale: for quantised output, the factor by which the caller divided bmm2_scale; 16-bit output is multiplied by
            it again.
        mask: uint16 (B, q_len_per_req, W), or (T, W) with cum_seq_lens_q; W is 2 for every 32 drafts. Little-endian
            words: if bit t is set, the row's token sees draft t. Replaces causal among the drafts; older keys are
            always seen.
        skip_softmax_threshold_scale_factor: keys may be left out if all their probabilities are below this factor /
            seq_len times the largest so far. The kernel chooses which keys it tests together. On the CPU none is left
            out.
        batch_invariant: if True, a request's bits do not depend on the rest of its batch; slower
            (bench/notes/decode.md).

    Hints: workspace_buffer, max_seq_len, backend, enable_pdl, multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode,
    request_order, request_order_plan. Only the default is supported: enable_block_sparse_attention, cp_world, cp_rank,
    causal_seqlens_kv_global (context parallelism).

    Returns out (a new tensor unless one was given), or (out, lse) with return_lse. Raises as
    `trtllm_batch_context_with_kv_cache` does. Caches of 8 and 4 bits are computed in fp16.

    >>> q, cache = torch.randn(2, 8, 64).half(), torch.randn(3, 2, 2, 16, 64).half()  # 3 pages of 16 rows
    >>> table, lens = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([20, 9]).int()
    >>> trtllm_batch_decode_with_kv_cache(q, cache, None, table, lens, None, 64**-0.5).shape
    torch.Size([2, 8, 64])
    """
    return serve(decode_call(
        query, kv_cache, block_tables, seq_lens, bmm1_scale, bmm2_scale, window_left, out, out_dtype, o_sf_scale,
        o_sf_vec_size, sinks, kv_layout, enable_pdl, backend, q_len_per_req, o_scale, mask, max_q_len, cum_seq_lens_q,
        skip_softmax_threshold_scale_factor, kv_cache_sf, uses_shared_paged_kv_idx, lse, return_lse, bmm1_scale_log2,
        enable_block_sparse_attention, cp_world, cp_rank, causal_seqlens_kv_global, bf16q_fp8kv_transform_mode,
        logits_soft_cap, v_scales_interleaved, batch_invariant,
    ))  # fmt: skip


def decode_call(
    query: Any, kv_cache: Any, block_tables: Any, seq_lens: Any, bmm1_scale: Any = 1.0, bmm2_scale: Any = 1.0,
    window_left: Any = -1, out: Any = None, out_dtype: Any = None, o_sf_scale: Any = None, o_sf_vec_size: Any = None,
    sinks: Any = None, kv_layout: Any = "HND", enable_pdl: Any = None, backend: Any = "auto", q_len_per_req: Any = 1,
    o_scale: Any = 1.0, mask: Any = None, max_q_len: Any = None, cum_seq_lens_q: Any = None,
    skip_softmax_threshold_scale_factor: Any = None, kv_cache_sf: Any = None, uses_shared_paged_kv_idx: Any = True,
    lse: Any = None, return_lse: Any = False, bmm1_scale_log2: Any = None, enable_block_sparse_attention: Any = False,
    cp_world: Any = 1, cp_rank: Any = 0, causal_seqlens_kv_global: Any = None, bf16q_fp8kv_transform_mode: Any = None,
    logits_soft_cap: Any = None, v_scales_interleaved: Any = False, batch_invariant: Any = False,
) -> AttentionCall:  # fmt: skip
    """Return the call of `trtllm_batch_decode_with_kv_cache`. Its hints that are not checked are left out."""
    if backend not in BACKENDS:
        raise UnknownName(f"backend: {backend!r}, must be one of {listed(BACKENDS)}")
    _check_modes(
        enable_block_sparse_attention, cp_world, cp_rank, causal_seqlens_kv_global, bf16q_fp8kv_transform_mode
    )  # fmt: skip
    k, v = pair("kv_cache", kv_cache, kv_layout)
    k_scales, v_scales = (None, None) if kv_cache_sf is None else scale_pair("kv_cache_sf", kv_cache_sf, kv_layout)
    if logits_soft_cap is not None or skip_softmax_threshold_scale_factor is not None or o_sf_scale is not None:
        logits_soft_cap, o_sf_scale = real(logits_soft_cap), real(o_sf_scale)
        skip_softmax_threshold_scale_factor = real(skip_softmax_threshold_scale_factor)
    layout = _layout(uses_shared_paged_kv_idx)
    requests = sequences_of(block_tables, seq_lens, cum_seq_lens_q, not traced(query), layout)
    signature = DECODE
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            check_integer("max_q_len", integer(max_q_len))  # not used
        signature, max_q_len = EQUAL, q_len_per_req
    elif max_q_len is None:
        raise ValueError("max_q_len: None, required with cum_seq_lens_q")
    elif q_len_per_req is not None and q_len_per_req.__class__ is not int:
        check_integer("q_len_per_req", integer(q_len_per_req))  # not used
    if max_q_len.__class__ is not int or window_left.__class__ is not int:
        max_q_len, window_left = integer(max_q_len), -1 if window_left is None else integer(window_left)
    drafts = None
    if mask is not None and isinstance(query, _Tensor) and requests.batch >= 0:
        equal = cum_seq_lens_q is None
        lead = (requests.batch, max_q_len) if equal else (query.shape[0],)
        drafts = drafts_of(mask, lead, max_q_len, "q_len_per_req" if equal else "max_q_len", query.device)
    scale, scale_tensor = split_scale("bmm1_scale", bmm1_scale)
    if bmm1_scale_log2 is not None:
        check_strided("bmm1_scale_log2", bmm1_scale_log2)
        scale_of("bmm1_scale", bmm1_scale, getattr(query, "device", None))  # not used
        signature += LOG2
        scale, scale_tensor = split_scale("bmm1_scale_log2", bmm1_scale_log2)
        scale *= LN2
    out_scale, out_scale_tensor = split_scale("bmm2_scale", bmm2_scale)
    if o_scale is not None:
        out_scale = _unscaled(out_scale, o_scale, out_dtype or getattr(query if out is None else out, "dtype", None))
    check_flag("batch_invariant", batch_invariant)
    call = AttentionCall(  # in the order of the fields: keywords take 1.3 us more
        signature, query, k, v, requests, max_q_len, scale, out_scale,
        True, window_left, -1, 0,  # causal, window_left, range_left, chunk
        logits_soft_cap, skip_softmax_threshold_scale_factor, v_scales_interleaved,
        "fixed" if batch_invariant else "auto", return_lse, enable_pdl, out_dtype, o_sf_scale,
        None, False, 0, "", "", False,  # rope, shares_v, lse_form, record, extra_record, share_keys
        out, lse, one_sink(sinks), scale_tensor, out_scale_tensor, k_scales, v_scales, drafts,
    )  # fmt: skip
    if o_sf_vec_size is not None:
        _check_vector(call, o_sf_vec_size)
    return call


def one_sink(sinks: Any) -> Any:
    """Return the sinks, which may be in a list that holds this one tensor."""
    if not isinstance(sinks, (list, tuple)):
        return sinks
    if len(sinks) != 1:
        raise ValueError(f"sinks: a {type(sinks).__name__} of {len(sinks)}, must hold one tensor")
    return sinks[0]


def _check_modes(sparse: Any, world: Any, rank: Any, lens: Any, mode: Any) -> None:
    """Raise on values of decode's arguments that ask for a mode that no kernel has."""
    if sparse is False and lens is None and mode is None and world.__class__ is int and rank.__class__ is int:
        if world == 1 and rank == 0:
            return
    check_flag("enable_block_sparse_attention", sparse)
    if sparse:
        what = "separate pages for each KV head are not supported"
        raise NotImplementedError(f"enable_block_sparse_attention: True, must be False: {what}")
    for name, value, only in (("cp_world", world, 1), ("cp_rank", rank, 0)):
        if check_integer(name, integer(value)) != only:
            raise NotImplementedError(f"{name}: {value}, must be {only}: context parallelism is not supported")
    if lens is not None:
        given = f"causal_seqlens_kv_global: {type(lens).__name__}"
        raise NotImplementedError(f"{given}, must be None: context parallelism is not supported")
    if not isinstance(mode, str | None) or mode not in TRANSFORM_MODES:
        raise UnknownName(f"bf16q_fp8kv_transform_mode: {mode!r}, must be one of {listed(TRANSFORM_MODES)}")


def _unscaled(out_scale: Any, o_scale: Any, dtype: Any) -> Any:
    """Return the factor on an output of `dtype`: bmm2_scale, times o_scale if the output is not quantised."""
    if o_scale.__class__ is float and o_scale == 1.0:  # the default; the checks of a plan see out_scale
        return out_scale
    o_scale = real(o_scale)
    check_number("o_scale", o_scale, positive=True)
    check_number("bmm2_scale", out_scale, OR_TENSOR)
    return out_scale * o_scale if dtype in (torch.float16, torch.bfloat16) else out_scale


def _layout(shared: Any) -> TableLayout:
    check_flag("uses_shared_paged_kv_idx", shared)
    return SHARED if shared else SEPARATE


def _check_vector(call: AttentionCall, size: Any) -> None:
    check_integer("o_sf_vec_size", size)
    if "nvfp4" not in (call.out_dtype, getattr(call.out, "dtype", None)):
        raise ValueError(f"o_sf_vec_size: {size}, must be None unless the output is nvfp4")
    if size != BLOCK:
        raise ValueError(f"o_sf_vec_size: {size}, must be None or {BLOCK}")
