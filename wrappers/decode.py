"""Decode attention over a paged KV cache: few query tokens a request, whose keys all SMs share (split-KV).

The split is made on the device from the lengths: nothing is planned or copied, and a captured graph holds for any.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from . import checks, machine, ops
from .attention import Mode, attend

LN2 = 0.6931471805599453
BACKENDS = ("auto", "xqa", "trtllm-gen")
SPLIT = Mode(split=True)
_is_compiling = torch.compiler.is_compiling


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int | None,
    bmm1_scale: float | torch.Tensor = 1.0, bmm2_scale: float | torch.Tensor = 1.0, window_left: int = -1,
    out: torch.Tensor | None = None, out_dtype: torch.dtype | str | None = None, o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None, sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_layout: str = "HND", enable_pdl: bool | None = None, backend: str = "auto", q_len_per_req: int = 1,
    o_scale: float = 1.0, mask: torch.Tensor | None = None, max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None, skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True, lse: torch.Tensor | None = None, return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None, logits_soft_cap: float | None = None, *,
    v_scales_interleaved: bool = False, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Attention of the last tokens of each request over a paged KV cache that already holds these tokens.

    Args, upstream's order (FlashInfer); those not named here as in `trtllm_batch_context_with_kv_cache`:
        query: (B * q_len_per_req, Hq, D), or ragged (T, Hq, D) with cum_seq_lens_q, int32 (B + 1,), and max_q_len, a
            hint: bound of its differences. Row t of a request of q tokens stands at position seq_len - q + t, and sees
            no later key.
        seq_lens: int32 or uint32 (B,), KV length with the query's tokens. bmm1_scale_log2: fp32 tensor of one element,
            instead of bmm1_scale, times log2(e). sinks: fp32 (Hq,), or a list of that one tensor.
        out, out_dtype: the query's dtype, or e4m3, saturated. o_scale: by which bmm2_scale is divided, for quantised
            output; 16-bit output is multiplied by it again.
        mask: uint16 (B, q_len_per_req, W), or (T, W) with cum_seq_lens_q, W two for every 32 drafts: little-endian
            words whose bit t says that the row's token sees draft t, instead of causal; older keys are seen.
        skip_softmax_threshold_scale_factor: keys whose probabilities all lie below it, over seq_len, times the largest
            so far may be left out; which ones are looked at together is the kernel's choice. On the CPU none are.
        v_scales_interleaved: V's scale factors as TensorRT-LLM's kernels want them (`fp4.deinterleave_v_scales`).
        batch_invariant: a request's bits do not depend on the rest of its batch; slower (bench/notes/decode.md).

    Hints: workspace_buffer, max_seq_len, backend, enable_pdl. Returns out (new where None was given), or (out, lse).
    Raises as `trtllm_batch_context_with_kv_cache` does. e4m3 and NVFP4 caches are computed with in fp16.
    """
    if backend not in BACKENDS:
        raise checks.UnknownName(f"backend: {backend!r}, must be one of {checks.listed(BACKENDS)}")
    if isinstance(sinks, (list, tuple)):
        if len(sinks) != 1:
            raise ValueError(f"sinks: a list of {len(sinks)}, must hold one tensor")
        sinks = sinks[0]
    mode = SPLIT
    check_interleaved(v_scales_interleaved, kv_cache_sf)
    if v_scales_interleaved or batch_invariant:
        mode = mode._replace(interleaved=bool(v_scales_interleaved), invariant=bool(batch_invariant))
    if bmm1_scale_log2 is not None:
        if not isinstance(bmm1_scale_log2, torch.Tensor):
            raise TypeError(f"bmm1_scale_log2: {type(bmm1_scale_log2).__name__}, must be a torch.Tensor")
        bmm1_scale, mode = bmm1_scale_log2, mode._replace(scale=LN2)
    if o_scale != 1.0:
        if isinstance(o_scale, bool) or not isinstance(o_scale, (int, float)):
            raise TypeError(f"o_scale: {o_scale!r}, must be a float")
        dtype = out_dtype or getattr(query if out is None else out, "dtype", None)
        if dtype in (torch.float16, torch.bfloat16):
            mode = mode._replace(out_scale=float(o_scale))
    batch = seq_lens.shape[0] if isinstance(seq_lens, torch.Tensor) and seq_lens.dim() else 0
    equal = cum_seq_lens_q is None
    if equal:
        checks.check_integer("q_len_per_req", q_len_per_req, 1)
        if isinstance(query, torch.Tensor) and query.dim() == 3 and query.shape[0] != batch * q_len_per_req:
            tokens = f"{batch} x {q_len_per_req}"
            raise ValueError(f"query: {query.shape[0]} tokens, must be {tokens} (seq_lens, q_len_per_req)")
        max_q_len = q_len_per_req
        if isinstance(query, torch.Tensor):
            cum_seq_lens_q = uniform(batch, q_len_per_req, query.device)
    elif max_q_len is None:
        raise ValueError("max_q_len: None, required with cum_seq_lens_q")
    if mask is not None and isinstance(query, torch.Tensor):
        checks.check_integer("max_q_len", max_q_len, 0)
        lead = (batch, q_len_per_req) if equal else (query.shape[0],)
        mode = mode._replace(drafts=drafts_of(mask, lead, max_q_len, query.device))
    call = (
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_seq_len, bmm1_scale, bmm2_scale,
        batch, cum_seq_lens_q, None, window_left, out, out_dtype, o_sf_scale, o_sf_vec_size, kv_layout, enable_pdl,
        sinks, kv_cache_sf, skip_softmax_threshold_scale_factor, uses_shared_paged_kv_idx, None, True, lse, return_lse,
        None, None, None, logits_soft_cap)  # fmt: skip
    return ops.trace(mode, checks.Call(*call)) if _is_compiling() else attend(mode, *call)


def check_interleaved(interleaved: bool, scales: Any) -> None:
    if interleaved and scales is None:
        raise ValueError(f"v_scales_interleaved: {interleaved}, must be False where the cache has no scale factors")


def drafts_of(mask: Any, lead: tuple[int, ...], most: int, device: torch.device) -> torch.Tensor:
    """A mask of drafts, uint16 (*lead, W), as int32 (tokens, W / 2)."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask: {type(mask).__name__}, must be a torch.Tensor or None")
    checks.check_one_of("mask: dtype", mask.dtype, (torch.uint16,))
    checks.check_shape("mask", mask, (*lead, (most + 31) // 32 * 2), "rows of query tokens, two words for 32 drafts")
    if mask.device != device:
        raise ValueError(f"mask: device {mask.device}, must be the query's, {device}")
    return mask.contiguous().view(torch.int32).reshape(-1, (most + 31) // 32)


def uniform(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """int32 offsets (batch + 1,) of requests of `length` query tokens each. Memory of a graph is not kept."""
    if _is_compiling() or device.type == "cuda" and machine.current.is_capturing():
        return _new_offsets(batch, length, device)
    return _offsets(batch, length, device)


def _new_offsets(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


_offsets = lru_cache(1024)(_new_offsets)
