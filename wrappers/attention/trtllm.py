"""The public functions of TensorRT-LLM's kernels, as FlashInfer signs them."""

from collections.abc import Sequence
from typing import Any

import torch

from ..checks import (
    UnknownName,
    check_flag,
    check_integer,
    check_number,
    check_optional_flag,
    check_strided,
    listed,
    refuse_flag,
)
from ..fp4 import BLOCK, FP4Tensor
from ..plain import traced
from ..scalars import OR_TENSOR, integer, real, scale_of, split_scale
from .checks import SIGNATURES, drafts_of
from .op import serve
from .problem import ABSENT, SEPARATE, SHARED, Form, Problem, make_problem, pair, requests_of

LN2 = 0.6931471805599453
BACKENDS = ("auto", "xqa", "trtllm-gen", "cake")  # of upstream: here a hint
TRANSFORM_MODES = (None, "k_only", "separate_kv")  # the same
CONTEXT, DECODE = "trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache"
CONTEXT_BLOCK = CONTEXT + ", kv_block_scales"  # with the other name of the scale factors
EQUAL = DECODE + ", q_len_per_req"  # requests of equal length
LOG2 = ", bmm1_scale_log2"  # behind either
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
    v_scales_interleaved: bool = False,
) -> Any:  # fmt: skip
    """Attention of ragged queries over a paged KV cache that already holds the queries' own tokens.

    Args, upstream's order (FlashInfer 0.7.2), ours by keyword only:
        query: (T, Hq, D) fp16, bf16, e4m3 or e5m2, any token and head stride; request r owns rows
            cum_seq_lens_q[r:r + 2].
        kv_cache: (k, v), each (pages, Hkv, P, D) "HND" or (pages, P, Hkv, D) "NHD"; or one (pages, 2, ...) or
            (pages, 1, ...) (K and V share storage). Any P from 1. The query's dtype; with 16-bit queries e4m3, e5m2,
            or uint8: packed NVFP4, last dim D / 2; with e4m3 queries the latter two.
        block_tables: int32 (B, M), or (B, 2, M) (K, V) with uses_shared_paged_kv_idx=False; entries past a request's
            last page are not read.
        seq_lens: int32 or uint32 (B,), KV length with this step's tokens. cum_seq_lens_q: int32 (B + 1,).
        max_q_len: bound of query lengths; steers the schedule, never the result.
        bmm1_scale, bmm2_scale: factor on the logits (natural units, nothing implicit) and on the output; a float or
            a one-element fp32 tensor: the kernel reads it on the query's device; on the host it counts as a float, and
            a captured graph keeps its value. On CUDA bmm1_scale must be positive.
        window_left: key j is kept where j >= position - window_left; negative or None: off. With or without causal.
        out, out_dtype: result tensor or its dtype, of fp16, bf16, e4m3 (saturated), "nvfp4" (an FP4Tensor); None: the
            query's, which for e5m2 is refused. o_sf_scale is NVFP4's forward scale (`nvfp4_quantize`).
        sinks: fp32 (Hq,), joins each head's softmax denominator, natural-log units, unscaled.
        kv_cache_sf: e4m3, a tuple or one tensor as kv_cache, each (pages, Hkv, P, D / 16) in kv_layout, linear;
            kv_block_scales is its older name. v_scales_interleaved: V's are as TensorRT-LLM's kernels want them
            (`fp4.deinterleave_v_scales`).
        causal: position of query row i is i + kv_len - q_len; keys up to it are kept.
        lse: fp32 (T, Hq), filled with log2 of the softmax denominator, sink included. logits_soft_cap: c * tanh(s / c).
        skip_softmax_threshold_scale_factor: a block of keys whose probabilities all lie below it, over seq_len, times
            the largest so far may be left out, of out and of lse, for 64 query rows at a time; None or 0: none is. A
            block has as many keys as the kernel takes at once, 128 with head_dim 128. On the CPU none are left out.

    Hints: workspace_buffer, cum_seq_lens_kv, max_kv_len, multi_ctas_kv_counter_buffer, backend, enable_pdl (None: on).
    Returns out (new where None was given), or (out, lse) where return_lse. A row without keys gives 0 and -inf (or
    sink * log2 e). Rows of no request are undefined. CPU tensors run the fp32 reference, which checks
    lengths, offsets and page ids too.
    Raises before any launch: ValueError rank, shape, stride, alignment, device; TypeError dtype; NotImplementedError
    what no kernel does; an unknown kv_layout is a KeyError and a ValueError.

    >>> q, cache = torch.randn(4, 8, 64).half(), torch.randn(3, 2, 2, 16, 64).half()  # 3 pages of 16 rows
    >>> table, lens, starts = (torch.tensor(x).int() for x in ([[2, 0], [1, -1]], [20, 9], [0, 3, 4]))
    >>> trtllm_batch_context_with_kv_cache(q, cache, None, table, lens, 3, None, 64**-0.5, 1.0, 2, starts, None).shape
    torch.Size([4, 8, 64])
    """
    signature, scales = CONTEXT, kv_cache_sf
    if kv_block_scales is not None:
        if kv_cache_sf is not None:
            raise ValueError("kv_block_scales: alias of kv_cache_sf, only one of the two may be given")
        signature, scales = CONTEXT_BLOCK, kv_block_scales
    if backend not in BACKENDS:
        raise UnknownName(f"backend: {backend!r}, must be one of {listed(BACKENDS)}")
    if use_fp16_softmax is not None or uses_spcompress is not None:
        for name, value in (("use_fp16_softmax", use_fp16_softmax), ("uses_spcompress", uses_spcompress)):
            check_optional_flag(name, value)
            if value:
                raise NotImplementedError(f"{name}: {value}, not supported, must be None or False")
    k, v = pair("kv_cache", kv_cache, kv_layout)
    k_scales = v_scales = None
    if scales is not None:
        k_scales, v_scales = pair("kv_cache_sf" if kv_block_scales is None else "kv_block_scales", scales, kv_layout)
    if max_q_len.__class__ is not int or window_left.__class__ is not int or batch_size.__class__ is not int:
        max_q_len, batch_size = integer(max_q_len), integer(batch_size)
        window_left = -1 if window_left is None else integer(window_left)
    if logits_soft_cap is not None or skip_softmax_threshold_scale_factor is not None or o_sf_scale is not None:
        logits_soft_cap, o_sf_scale = real(logits_soft_cap), real(o_sf_scale)
        skip_softmax_threshold_scale_factor = real(skip_softmax_threshold_scale_factor)
    form = SHARED if uses_shared_paged_kv_idx is True else _form(uses_shared_paged_kv_idx)
    requests = requests_of(block_tables, seq_lens, cum_seq_lens_q, not traced(query), form)
    if batch_size.__class__ is not int or batch_size != requests.batch:
        check_integer("batch_size", batch_size, 0)
        if batch_size != requests.batch >= 0:  # seq_lens is a tensor
            raise ValueError(f"batch_size: {batch_size}, must be the {requests.batch} entries of seq_lens")
    scale, scale_tensor = (bmm1_scale, None) if bmm1_scale.__class__ is float else split_scale("bmm1_scale", bmm1_scale)
    out_scale, out_scale_tensor = (
        (bmm2_scale, None) if bmm2_scale.__class__ is float else split_scale("bmm2_scale", bmm2_scale)
    )
    p = make_problem(Problem, (
        signature, "prefill", query, k, v, requests, max_q_len, scale, scale_tensor, out_scale,
        out_scale_tensor, causal, window_left, logits_soft_cap, sinks, k_scales, v_scales, v_scales_interleaved, None,
        skip_softmax_threshold_scale_factor, out, out_dtype, o_sf_scale, lse, return_lse, False, enable_pdl,
    ) + ABSENT)  # fmt: skip
    if o_sf_vec_size is not None:
        _check_vector(p, o_sf_vec_size)
    return serve(p)


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
    """Attention of the last tokens of each request over a paged KV cache that already holds these tokens.

    Args, upstream's order (FlashInfer 0.7.2), ours by keyword only; what is not named here is as in
    `trtllm_batch_context_with_kv_cache`:
        query: (B * q_len_per_req, Hq, D), or ragged (T, Hq, D) with cum_seq_lens_q, int32 (B + 1,), and max_q_len, a
            hint: bound of its differences. Row t of a request of q tokens stands at position seq_len - q + t, and sees
            no later key.
        seq_lens: int32 or uint32 (B,), KV length with the query's tokens. bmm1_scale_log2: fp32 tensor of one element,
            on the query's device or the host, instead of bmm1_scale, times log2(e). sinks: fp32 (Hq,), or a list of
            that one tensor.
        o_scale: by which bmm2_scale is divided, for quantised output; 16-bit output is multiplied by it again.
        mask: uint16 (B, q_len_per_req, W), or (T, W) with cum_seq_lens_q, W two for every 32 drafts: little-endian
            words whose bit t says that the row's token sees draft t, instead of causal; older keys are seen.
        skip_softmax_threshold_scale_factor: keys whose probabilities all lie below it, over seq_len, times the largest
            so far may be left out; which ones are looked at together is the kernel's choice. On the CPU none are.
        batch_invariant: a request's bits do not depend on the rest of its batch; slower (bench/notes/decode.md).

    Hints: workspace_buffer, max_seq_len, backend, enable_pdl, multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode,
    request_order, request_order_plan. Refused but for their defaults: enable_block_sparse_attention, cp_world, cp_rank,
    causal_seqlens_kv_global (context parallelism). Returns out (new where None was given), or (out, lse).
    Raises as `trtllm_batch_context_with_kv_cache` does. Caches of 8 and 4 bits are computed with in fp16.

    >>> q, cache = torch.randn(2, 8, 64).half(), torch.randn(3, 2, 2, 16, 64).half()  # 3 pages of 16 rows
    >>> table, lens = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([20, 9]).int()
    >>> trtllm_batch_decode_with_kv_cache(q, cache, None, table, lens, None, 64**-0.5).shape
    torch.Size([2, 8, 64])
    """
    if backend not in BACKENDS:
        raise UnknownName(f"backend: {backend!r}, must be one of {listed(BACKENDS)}")
    if (enable_block_sparse_attention is not False or cp_world.__class__ is not int or cp_world != 1
            or cp_rank.__class__ is not int or cp_rank != 0 or causal_seqlens_kv_global is not None
            or bf16q_fp8kv_transform_mode is not None):  # fmt: skip
        _check_modes(
            enable_block_sparse_attention, cp_world, cp_rank, causal_seqlens_kv_global, bf16q_fp8kv_transform_mode
        )
    sink: Any = sinks
    if sinks is not None and isinstance(sinks, (list, tuple)):
        if len(sinks) != 1:
            raise ValueError(f"sinks: a {type(sinks).__name__} of {len(sinks)}, must hold one tensor")
        sink = sinks[0]
    k, v = pair("kv_cache", kv_cache, kv_layout)
    k_scales = v_scales = None
    if kv_cache_sf is not None:
        k_scales, v_scales = pair("kv_cache_sf", kv_cache_sf, kv_layout)
    if logits_soft_cap is not None or skip_softmax_threshold_scale_factor is not None or o_sf_scale is not None:
        logits_soft_cap, o_sf_scale = real(logits_soft_cap), real(o_sf_scale)
        skip_softmax_threshold_scale_factor = real(skip_softmax_threshold_scale_factor)
    form = SHARED if uses_shared_paged_kv_idx is True else _form(uses_shared_paged_kv_idx)
    requests = requests_of(block_tables, seq_lens, cum_seq_lens_q, not traced(query), form)
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
    scale, scale_tensor = (bmm1_scale, None) if bmm1_scale.__class__ is float else split_scale("bmm1_scale", bmm1_scale)
    if bmm1_scale_log2 is not None:
        check_strided("bmm1_scale_log2", bmm1_scale_log2)
        scale_of("bmm1_scale", bmm1_scale, getattr(query, "device", None))  # not used
        signature += LOG2
        scale, scale_tensor = split_scale("bmm1_scale_log2", bmm1_scale_log2)
        scale *= LN2
    out_scale, out_scale_tensor = (
        (bmm2_scale, None) if bmm2_scale.__class__ is float else split_scale("bmm2_scale", bmm2_scale)
    )
    if o_scale is not None and (o_scale.__class__ is not float or o_scale != 1.0):
        out_scale = _unscaled(out_scale, o_scale, out_dtype or getattr(query if out is None else out, "dtype", None))
    p = make_problem(Problem, (
        signature, "decode", query, k, v, requests, max_q_len, scale, scale_tensor, out_scale,
        out_scale_tensor, True, window_left, logits_soft_cap, sink, k_scales, v_scales, v_scales_interleaved, drafts,
        skip_softmax_threshold_scale_factor, out, out_dtype, o_sf_scale, lse, return_lse, batch_invariant, enable_pdl,
    ) + ABSENT)  # fmt: skip
    if o_sf_vec_size is not None:
        _check_vector(p, o_sf_vec_size)
    return serve(p)


def _check_modes(sparse: Any, world: Any, rank: Any, lens: Any, mode: Any) -> None:
    """Raises on values of decode's arguments that ask for what no kernel does."""
    check_flag("enable_block_sparse_attention", sparse)
    if sparse:
        what = "pages of its own for each KV head are not supported"
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
    """The factor on an output of `dtype`: what bmm2_scale was divided by is put back where nothing is quantised."""
    o_scale = real(o_scale)
    check_number("o_scale", o_scale, positive=True)
    check_number("bmm2_scale", out_scale, OR_TENSOR)
    return out_scale * o_scale if dtype in (torch.float16, torch.bfloat16) else out_scale


def _form(shared: Any) -> Form:
    """Of a page table that is not, or not surely, shared."""
    return SEPARATE if shared is False else refuse_flag("uses_shared_paged_kv_idx", shared)


def _check_vector(p: Problem, size: Any) -> None:
    check_integer("o_sf_vec_size", size)
    if "nvfp4" not in (p.out_dtype, getattr(p.out, "dtype", None)):
        raise ValueError(f"o_sf_vec_size: {size}, must be None unless the output is nvfp4")
    if size != BLOCK:
        raise ValueError(f"o_sf_vec_size: {size}, must be None or {BLOCK}")
