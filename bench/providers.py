"""Providers: the libraries that the prefill benchmark measures. cudnn and flash-attn-4 read contiguous K and V.

`PROVIDERS[name](inputs)` returns {variant: (call, rows)}: `call()` runs the work once, and `rows(result)` views its
result as (tokens, heads, head_dim). The best variant of a provider counts. A provider that raises is not measured.
"""

from collections.abc import Callable
from typing import Any

import torch

from .workload import Inputs, contiguous, csr, pages, shape_of, unpaged

Variant = tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]


def ours(inputs: Inputs) -> dict[str, Variant]:
    """Return the call of the public function on the pages. Its output holds NaN at first."""
    from wrappers import trtllm_batch_context_with_kv_cache

    return {"": (lambda: trtllm_batch_context_with_kv_cache(**inputs), lambda o: o)}


def cudnn(inputs: Inputs) -> dict[str, Variant]:
    """Return calls of torch SDPA with the cuDNN backend: heads or tokens outermost, K and V grouped or expanded. Raises
    ValueError for a window."""
    from torch.nn.functional import scaled_dot_product_attention

    shape, scale = shape_of(inputs), float(inputs["bmm1_scale"])
    if shape.window >= 0:
        raise ValueError(f"window {shape.window}: torch has none")
    q, k, v = (t.transpose(1, 2) for t in contiguous(inputs))  # (b, h, s, d); tokens outermost in memory
    # set once for the process: a context manager around each call would count as host time of the peer
    torch.backends.cuda.enable_cudnn_sdp(True)
    for disable in ("flash", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{disable}_sdp")(False)
    group = shape.heads_q // shape.heads_kv

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> Callable[[], torch.Tensor]:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=shape.causal, scale=scale, enable_gqa=grouped)

    heads_first = [t.contiguous() for t in (q, k, v)]
    calls = {"bhsd": call(heads_first[0], heads_first[1], heads_first[2], group > 1), "bshd": call(q, k, v, group > 1)}
    if group > 1:
        expanded = [t.repeat_interleave(group, dim=1) for t in heads_first[1:]]
        calls["expanded"] = call(heads_first[0], expanded[0], expanded[1], False)
    return {name: (run, lambda o: o.transpose(1, 2).flatten(0, 1)) for name, run in calls.items()}


def flash_attn_4(inputs: Inputs) -> dict[str, Variant]:
    """Return the call of flash_attn.cute on contiguous (b, s, h, d), or of its varlen function if the requests
    differ."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    shape = shape_of(inputs)
    how: dict[str, Any] = {"softmax_scale": float(inputs["bmm1_scale"]), "causal": shape.causal}
    if shape.window >= 0:
        how["window_size"] = (shape.window, 0)

    def rows(result: Any) -> torch.Tensor:
        return (result[0] if isinstance(result, tuple) else result).flatten(0, -3)

    if shape.equal:
        q, k, v = contiguous(inputs)
        return {"": (lambda: flash_attn_func(q, k, v, **how), rows)}
    q, (k, v) = inputs["query"], unpaged(inputs)
    how |= {"cu_seqlens_q": inputs["cum_seq_lens_q"], "cu_seqlens_k": inputs["cum_seq_lens_kv"]}
    how |= {"max_seqlen_q": max(shape.q_lens), "max_seqlen_k": max(shape.kv_lens)}
    return {"": (lambda: flash_attn_varlen_func(q, k, v, **how), rows)}


def torch_sdpa(inputs: Inputs) -> dict[str, Variant]:
    """Return the call of torch SDPA with its memory-efficient kernel, or what it has else, on expanded K and V. Raises
    ValueError for a head_dim that other peers have."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    shape, scale = shape_of(inputs), float(inputs["bmm1_scale"])
    if shape.dim_qk <= 256:
        raise ValueError(f"head_dim {shape.dim_qk}: measured above 256 only")
    q, k, v = (t.transpose(1, 2).contiguous() for t in contiguous(inputs))
    k, v = (t.repeat_interleave(shape.heads_q // shape.heads_kv, dim=1) for t in (k, v))

    def run() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, scale=scale)

    return {"": (run, lambda o: o.transpose(1, 2).flatten(0, 1))}


def flashinfer(inputs: Inputs) -> dict[str, Variant]:
    """Return the call of flashinfer's fa3 prefill on the same pages. The plan is outside the timed call."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    shape, cache, query = shape_of(inputs), pages(inputs), inputs["query"]
    space = torch.empty(256 << 20, dtype=torch.uint8, device=query.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, kv_layout="HND", backend="fa3")
    wrapper.plan(
        *csr(inputs),
        shape.heads_q,
        shape.heads_kv,
        shape.dim_qk,
        cache[0].shape[2],
        head_dim_vo=shape.dim_vo,
        causal=shape.causal,
        window_left=shape.window,
        sm_scale=float(inputs["bmm1_scale"]),
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
    )
    return {"": (lambda: wrapper.run(query, cache), lambda o: o)}


PROVIDERS: dict[str, Callable[[Inputs], dict[str, Variant]]] = {
    "ours": ours,
    "cudnn": cudnn,
    "flash-attn-4": flash_attn_4,
    "flashinfer": flashinfer,
    "torch": torch_sdpa,
}
