"""Prefill of latent attention (MLA) with K and V per head: ragged rows, with TensorRT-LLM's signature."""

from typing import Any

import torch

from ..attention.call import AttentionCall, ragged_sequences
from ..attention.checks import SIGNATURES
from ..attention.op import serve
from ..attention.views import rows_of
from ..fp4 import FP4Tensor
from ..host.checks import check_integer, check_number, check_strided, listed
from ..host.plain import traced
from ..host.scalars import integer, real, split_scale
from . import values
from .trtllm import refuse_variants

NAME = "trtllm_ragged_attention_deepseek"
BACKENDS = ("auto", "trtllm-gen", "cute-dsl")  # a hint here
SIGNATURES[NAME] = {
    "q": "query", "kv": "key, value", "k": "key", "v": "value",
    **dict.fromkeys(("page_table", "kv_lens", "kv_starts"), "cum_seq_lens_kv"), "cu_seqlens_q": "cum_seq_lens_q",
    "scale": "bmm1_scale", "out_scale": "bmm2_scale", "causal": "is_causal", "sinks": "attention_sinks",
    "skip": "skip_softmax_threshold_scale_factor", "out_dtype": "out", "out_sf_scale": "o_sf_scale",
}  # fmt: skip


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, workspace_buffer: torch.Tensor | None,
    seq_lens: torch.Tensor | None, max_q_len: int, max_kv_len: int | None, bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor, o_sf_scale: float | None, batch_size: int, window_left: int | None,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor, enable_pdl: bool | None, is_causal: bool,
    return_lse: bool, attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, out: torch.Tensor | FP4Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (
        None, None, None, None,
    ),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0), backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None, kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Any:  # fmt: skip
    """Compute attention of ragged queries over ragged K and V, as models with latent attention (MLA) do in prefill.

    Arguments are in the order of FlashInfer 0.7.2, which has no kernel of this function for Hopper. Chunks of a long
    context are calls of their own with is_causal=False, and `merge_state` merges their outputs and LSEs.

    Args:
        query: (T, Hq, D) fp16, bf16, e4m3 or e5m2. Request r owns rows cum_seq_lens_q[r:r + 2].
        key, value: (rows, Hkv, D) and (rows, Hkv, Dvo), any token and head strides, so that slices of a projection are
            accepted. Request r owns rows cum_seq_lens_kv[r:r + 2]. (D, Dvo) may be (192, 128), (128, 128), (256, 256)
            and every other pair that prefill has; Hq is a multiple of Hkv. The dtype is the query's, or else e4m3, e5m2
            or int8, except with e5m2 queries.
        cum_seq_lens_q, cum_seq_lens_kv: int32 (B + 1,). A request may lack queries or keys.
        max_q_len: an upper bound of the query lengths. It steers the schedule and never changes the result. batch_size:
            B.
        bmm1_scale, bmm2_scale: factors on the logits (natural units, nothing is implied) and on the output, each a
            float or an fp32 tensor of one element, as in `trtllm_batch_context_with_kv_cache`.
        is_causal: query row i has position i + kv_len - q_len and sees the keys up to it. window_left: key j is kept if
            j >= position - window_left. Negative or None: no window. Independent of is_causal.
        attention_sinks: fp32 (Hq,), added to each head's softmax denominator; natural-log units, not scaled.
        skip_softmax_threshold_scale_factor: as in `trtllm_batch_context_with_kv_cache`, with kv_len for seq_len.
        out: receives the result: fp16, bf16, e4m3 (saturated) or an FP4Tensor. None: a new tensor of the query's dtype,
            bf16 if that has 8 bits. o_sf_scale: the forward scale of an FP4Tensor; without one, not used.
        lse: fp32 (T, Hq), receives log2 of the softmax denominator, sink included. return_lse: return it, too.
        sage_attn_sfs, num_elts_per_sage_attn_blk, use_fp16_softmax, uses_spcompress: other values than the defaults
            raise NotImplementedError. False means the same as None.

    Hints: workspace_buffer, seq_lens, max_kv_len, enable_pdl (None: on), backend ("auto", "trtllm-gen", "cute-dsl"),
    q_seq_lens_cpu, kv_seq_lens_cpu, skip_all_rows_active_check. Lengths are read on the device alone, and requests
    without queries or keys need no other path, so a captured graph serves any lengths.

    Returns out, or (out, lse) with return_lse. A row without keys gives 0 and -inf (or sink * log2 e). Rows that belong
    to no request are undefined. Raises as `trtllm_batch_context_with_kv_cache` does.

    >>> q, k, v = (torch.randn(rows, 16, dim).bfloat16() for rows, dim in ((5, 192), (9, 192), (9, 128)))
    >>> starts, kv_starts = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 6, 9]).int()  # two requests
    >>> out, lse = trtllm_ragged_attention_deepseek(
    ...     q, k, v, None, None, 3, None, 192**-0.5, 1.0, 1.0, 2, -1, starts, kv_starts, None, True, True
    ... )
    >>> out.shape, lse.shape
    (torch.Size([5, 16, 128]), torch.Size([5, 16]))
    """
    return serve(ragged_deepseek_call(
        query, key, value, max_q_len, bmm1_scale, bmm2_scale, o_sf_scale, batch_size, window_left, cum_seq_lens_q,
        cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks, skip_softmax_threshold_scale_factor, out,
        lse, sage_attn_sfs, num_elts_per_sage_attn_blk, backend, use_fp16_softmax, uses_spcompress,
    ))  # fmt: skip


def ragged_deepseek_call(
    query: Any, key: Any, value: Any, max_q_len: Any, bmm1_scale: Any, bmm2_scale: Any, o_sf_scale: Any,
    batch_size: Any, window_left: Any, cum_seq_lens_q: Any, cum_seq_lens_kv: Any, enable_pdl: Any, is_causal: Any,
    return_lse: Any, attention_sinks: Any, skip_softmax_threshold_scale_factor: Any, out: Any, lse: Any,
    sage_attn_sfs: Any, num_elts_per_sage_attn_blk: Any, backend: Any, use_fp16_softmax: Any, uses_spcompress: Any,
) -> AttentionCall:  # fmt: skip
    """Return the call of `trtllm_ragged_attention_deepseek`. Its hints that are not checked are left out."""
    values.check_name("backend", backend, BACKENDS)
    refuse_variants(use_fp16_softmax, uses_spcompress)
    _refuse_sage(sage_attn_sfs, num_elts_per_sage_attn_blk)
    check_strided("query", query, 3)
    if cum_seq_lens_q is None:
        check_strided("cum_seq_lens_q", None)
    k, v = rows_of("key", key, "NHD"), rows_of("value", value, "NHD")
    if k.dtype is torch.uint8:
        raise NotImplementedError(f"key: dtype {k.dtype}, not supported: rows of NVFP4 need scale factors")
    requests = ragged_sequences(cum_seq_lens_q, cum_seq_lens_kv, not traced(query))
    if batch_size.__class__ is not int or batch_size != requests.batch:
        check_integer("batch_size", integer(batch_size), 0)
        if batch_size != requests.batch >= 0:  # cum_seq_lens_kv is a tensor
            need = f"{requests.batch}, one less than the entries of cum_seq_lens_kv"
            raise ValueError(f"batch_size: {batch_size}, must be {need}")
    o_sf_scale, packed = real(o_sf_scale), isinstance(out, FP4Tensor)
    if o_sf_scale is not None and not packed:
        check_number("o_sf_scale", o_sf_scale, " or None")
    scale, scale_tensor = split_scale("bmm1_scale", bmm1_scale)
    out_scale, out_scale_tensor = split_scale("bmm2_scale", bmm2_scale)
    return AttentionCall(
        signature=NAME, q=query, k=k, v=v, requests=requests, max_q_len=integer(max_q_len), scale=scale,
        out_scale=out_scale, causal=is_causal, window_left=-1 if window_left is None else integer(window_left),
        skip=real(skip_softmax_threshold_scale_factor), return_lse=return_lse, enable_pdl=enable_pdl,
        out_dtype=torch.bfloat16 if out is None and query.dtype.itemsize == 1 else None,
        out_sf_scale=o_sf_scale if packed else None, out=out, lse=lse, sinks=attention_sinks,
        scale_tensor=scale_tensor, out_scale_tensor=out_scale_tensor,
    )  # fmt: skip


def _refuse_sage(factors: Any, sizes: Any) -> None:
    """Raise if a call asks for the scale factors of SageAttention, which no kernel has."""
    for name, given in (("sage_attn_sfs", factors), ("num_elts_per_sage_attn_blk", sizes)):
        if not isinstance(given, (tuple, list)) or len(given) != 4:
            what = f"a {type(given).__name__} of {len(given)}" if isinstance(given, (tuple, list)) else repr(given)
            raise TypeError(f"{name}: {what}, must be a tuple of 4")
    if any(factor is not None for factor in factors):
        found = listed(type(factor).__name__ for factor in factors)
        raise NotImplementedError(f"sage_attn_sfs: ({found}), must be four times None: SageAttention is not supported")
    sizes = tuple(integer(size) for size in sizes)
    if any(type(size) is not int for size in sizes):  # torch.compile of torch 2.11 cannot compare size.__class__
        raise TypeError(f"num_elts_per_sage_attn_blk: {sizes}, must be a tuple of 4 ints")
    if any(sizes):
        found = f"num_elts_per_sage_attn_blk: {sizes}"
        raise NotImplementedError(f"{found}, must be (0, 0, 0, 0): SageAttention is not supported")
