"""Prefill attention over a paged KV cache: the public signature, and what serves a call of it."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.attention import dispatch

from . import checks, machine, ops
from .attention import CONTEXT, attend
from .checks import Call
from .fp4 import FP4Tensor

_is_compiling = torch.compiler.is_compiling


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor | None, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int,
    max_kv_len: int | None, bmm1_scale: float | torch.Tensor, bmm2_scale: float | torch.Tensor, batch_size: int,
    cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor | None, window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None, out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None, o_sf_vec_size: int | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: torch.Tensor | None = None,
    kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, uses_shared_paged_kv_idx: bool = True,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None, causal: bool = True,
    lse: torch.Tensor | None = None, return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None, use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None, logits_soft_cap: float | None = None,
) -> Any:  # fmt: skip
    """Attention of ragged queries over a paged KV cache that already holds the queries' own tokens.

    Args, upstream's order (FlashInfer):
        query: (T, Hq, D) fp16, bf16 or e4m3, any token and head stride; request r owns rows cum_seq_lens_q[r:r + 2].
        kv_cache: (k, v), each (pages, Hkv, P, D) "HND" or (pages, P, Hkv, D) "NHD"; or one (pages, 2, ...) or
            (pages, 1, ...) (K and V share storage). The query's dtype, e4m3, or uint8: packed NVFP4, last dim D / 2.
        block_tables: int32 (B, M), or (B, 2, M) (K, V) with uses_shared_paged_kv_idx=False; entries past a request's
            last page are not read.
        seq_lens: int32 or uint32 (B,), KV length with this step's tokens. cum_seq_lens_q: int32 (B + 1,).
        max_q_len: bound of query lengths; steers the schedule, never the result.
        bmm1_scale, bmm2_scale: factor on the logits (natural units, nothing implicit) and on the output; a float or
            a one-element fp32 tensor on the query's device, read by the kernel. On CUDA bmm1_scale must be positive.
        window_left: key j is kept where j >= position - window_left; negative is off. With or without causal.
        out, out_dtype: result tensor or its dtype (query's, fp16, bf16, "nvfp4"); o_sf_scale is NVFP4's forward scale.
        sinks: fp32 (Hq,), joins each head's softmax denominator, natural-log units, unscaled.
        kv_block_scales, kv_cache_sf: e4m3 (pages, Hkv, P, D / 16) in kv_layout, linear (`fp4.deinterleave_v_scales`).
        lse: fp32 (T, Hq), filled with log2 of the softmax denominator, sink included. logits_soft_cap: c * tanh(s / c).
        causal: position of query row i is i + kv_len - q_len; keys up to it are kept.

    Hints: workspace_buffer, cum_seq_lens_kv, max_kv_len, multi_ctas_kv_counter_buffer, enable_pdl (None: on).
    Returns out (new where None was given), or (out, lse) where return_lse. A row without keys gives 0 and -inf (or
    sink * log2 e). Rows of no request are undefined. CPU tensors run the fp32 reference.
    Raises before any launch: ValueError rank, shape, stride, alignment, device; TypeError dtype; NotImplementedError
    what no kernel does; an unknown kv_layout is a KeyError and a ValueError.
    """
    call = (
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
        batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left, out, out_dtype, o_sf_scale, o_sf_vec_size,
        kv_layout, enable_pdl, sinks, kv_block_scales, skip_softmax_threshold_scale_factor,
        uses_shared_paged_kv_idx, kv_cache_sf, causal, lse, return_lse, multi_ctas_kv_counter_buffer,
        use_fp16_softmax, uses_spcompress, logits_soft_cap)  # fmt: skip
    if _is_compiling():
        return ops.trace(CONTEXT, Call(*call))
    return attend(CONTEXT, *call)


@dataclass(frozen=True)
class Explanation:
    """What serves a call: `runs` (None: nothing), and for each kernel that does not, why."""

    runs: str | None
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"runs: {self.runs or 'nothing'}", *(f"refused: {name}: {why}" for name, why in self.refused)]
        return "\n".join(lines)


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Which kernel would serve the public function called with these arguments; raises as it does on bad ones."""
    bound = inspect.signature(trtllm_batch_context_with_kv_cache).bind(*args, **kwargs)
    bound.apply_defaults()
    checked = checks.validate(Call.of(bound.arguments))
    device = checked.problem.q.device
    facts = machine.current.facts(device)
    if facts is None:
        return Explanation("reference (torch, fp32)", tuple((op, f"device {device}") for op in dispatch.OPS))
    try:
        rows = dispatch.explain(checks.kernel_request(checked), facts[0])
    except NotImplementedError as error:
        return Explanation(None, tuple((op, str(error)) for op in dispatch.OPS))
    runs = next((f"{op} {spec.name}" for op, spec, reason in rows if reason is None), None)
    return Explanation(runs, tuple((op, reason) for op, _, reason in rows if reason is not None))
