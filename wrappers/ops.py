"""The torch.library operator behind `torch.compile`: mutates preallocated outputs, never reached by eager calls."""

from typing import Any

import torch

from . import checks, fp4

NAME = "cute_kernels::paged_attention"
SCHEMA = """(
    Tensor query, Tensor k, Tensor v, Tensor block_tables, Tensor seq_lens, Tensor cum_seq_lens_q,
    Tensor(a!) out, Tensor(b!)? out_scale, Tensor(c!)? lse,
    float bmm1_scale, Tensor? bmm1_tensor, float bmm2_scale, Tensor? bmm2_tensor, Tensor? sinks,
    Tensor? k_scales, Tensor? v_scales, SymInt max_q_len, SymInt window_left,
    float? o_sf_scale, SymInt scale_start_index, str kv_layout, bool? enable_pdl, float? skip_factor, bool shared_idx,
    bool causal, float? logits_soft_cap,
    bool split, float scale, float factor, Tensor? drafts, bool interleaved, bool invariant) -> ()"""

torch.library.define(NAME, SCHEMA.replace("\n", " "), tags=torch.Tag.pt2_compliant_tag)


@torch.library.impl(NAME, ("cpu", "cuda"))
def _run(*args: Any) -> None:
    """The eager path on the operator's arguments, in the schema's order; the last ones are a `attention.Mode`."""
    from .attention import Mode, attend

    query, k, v, tables, lens, offsets, out, out_scale, lse, s1, t1, s2, t2, sinks, ks, vs = args[:16]
    max_q, window, o_sf_scale, start, layout, pdl, skip, shared, causal, cap, *mode = args[16:]
    call = checks.Call(
        query, (k, v), None, tables, lens, max_q, None, s1 if t1 is None else t1, s2 if t2 is None else t2,
        lens.shape[0], offsets, None, window, out=out if out_scale is None else fp4.FP4Tensor(out, out_scale, start),
        o_sf_scale=o_sf_scale, kv_layout=layout, enable_pdl=pdl, sinks=sinks,
        kv_block_scales=None if ks is None else (ks, vs), skip_softmax_threshold_scale_factor=skip,
        uses_shared_paged_kv_idx=shared, causal=causal, lse=lse, logits_soft_cap=cap,
    )  # fmt: skip
    attend(Mode(*mode), *call)


@torch.library.register_fake(NAME)
def _fake(*args: Any) -> None:
    """Nothing to infer: every output is an argument."""


def _pair(value: Any) -> tuple[Any, Any]:
    """(k, v) of a tuple or a stacked tensor."""
    return (value[:, 0], value[:, -1]) if isinstance(value, torch.Tensor) else (value[0], value[1])


def _either(value: Any) -> tuple[float, torch.Tensor | None]:
    return (1.0, value) if isinstance(value, torch.Tensor) else (value, None)


def trace(mode: tuple[Any, ...], call: checks.Call) -> Any:
    """What `torch.compile` records for a public function: allocation, then the operator. mode: a `attention.Mode`."""
    if call.use_fp16_softmax or call.uses_spcompress:
        raise NotImplementedError("use_fp16_softmax, uses_spcompress: not supported, must be None or False")
    query = call.query
    k, v = _pair(call.kv_cache)
    scales = call.kv_cache_sf if call.kv_block_scales is None else call.kv_block_scales
    k_scales, v_scales = (None, None) if scales is None else _pair(scales)
    shape = (query.shape[0], query.shape[1], v.shape[-1] * (2 if v.dtype == torch.uint8 else 1))
    dtype, out = checks.output_dtype(call), call.out
    if out is None:
        if isinstance(dtype, str):
            out = fp4.empty(shape, query.device)
        else:
            out = torch.empty(shape, dtype=dtype, device=query.device)
    packed = isinstance(out, fp4.FP4Tensor)
    lse = call.lse
    if lse is None and call.return_lse:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device)
    torch.ops.cute_kernels.paged_attention(
        query, k, v, call.block_tables, call.seq_lens, call.cum_seq_lens_q, out.data if packed else out,
        out.scale if packed else None, lse, *_either(call.bmm1_scale), *_either(call.bmm2_scale), call.sinks,
        k_scales, v_scales, call.max_q_len, call.window_left, call.o_sf_scale,
        out.scale_start_index if packed else 0, call.kv_layout, call.enable_pdl,
        call.skip_softmax_threshold_scale_factor, call.uses_shared_paged_kv_idx, call.causal, call.logits_soft_cap,
        *mode,
    )  # fmt: skip
    if packed:
        out = fp4.FP4Tensor(out.data, out.scale, out.scale_start_index, shape)
    return (out, lse) if call.return_lse else out
