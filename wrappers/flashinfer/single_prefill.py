"""One request: its last tokens are the queries, over K and V without pages."""

from typing import Any

import torch

from ..attention.call import AttentionCall, ragged_sequences
from ..attention.checks import HEAD_SCALES, SIGNATURES
from ..attention.op import serve
from ..attention.views import rows_of
from ..host.checks import check_strided
from ..host.plain import traced
from . import values
from .quantization import packbits
from .wrapper_classes.ragged import scales_of

SINGLE = "single_prefill_with_kv_cache"
SIGNATURES[SINGLE] = values.NAMES | {
    "kv": "k, v", "page_table": "k", "kv_lens": "k", "kv_starts": "k", "cu_seqlens_q": "q", "max_q_len": "q",
    "out_dtype": "o_dtype",
}  # fmt: skip
HEAD_SCALES.add(SINGLE)


def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
    window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, return_lse: bool = False, backend: str = "auto", *,
    use_fp16_qk_reduction: bool | None = None, o_dtype: torch.dtype | str | None = None,
    q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, scale_q: float | torch.Tensor | None = None,
    scale_k: float | torch.Tensor | None = None, scale_v: float | torch.Tensor | None = None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Any:  # fmt: skip
    """Compute attention of one request's queries over its K and V, which include the queries' own tokens.

    FlashInfer's function. Positional arguments are those of its version 0.2; names that were added later are keywords.

    Args:
        q: (m, Hq, D) fp16, bf16, e4m3 or e5m2. k: (n, Hkv, D), v: (n, Hkv, Dvo) "NHD", or (Hkv, n, ...) "HND". The
            dtype of k and v is q's; 16-bit q also takes e4m3, e5m2 and uint8 (packed NVFP4, last dimension D / 2), e4m3
            q the latter two. Any strides with 1 as the last, so slices of packed QKV are accepted.
        kv_layout: "NHD" or "HND", the order of the dimensions of k and v.
        custom_mask: bool (m, n) or (m * n,); True: the key is seen. Replaces causal, but not window_left.
        packed_custom_mask: uint8 (ceil(m * n / 8),), the same in bits, lowest first (`packbits(..., "little")`);
            custom_mask is then ignored.
        causal: row i sees keys up to i + n - m; requires n >= m.
        pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta: as in
            `BatchPrefillWithPagedKVCacheWrapper.plan`.
        q_scale, k_scale, v_scale (or scale_q, scale_k, scale_v): as in `BatchPrefillWithPagedKVCacheWrapper.run`: a
            float, or an fp32 tensor of one element or of one per head.
        kv_cache_sf: as in `BatchPrefillWithRaggedKVCacheWrapper.run`.
        o_dtype: dtype of the output: fp16, bf16 or e4m3 (saturated). None: q's; required with e5m2 q.

    Hints: allow_fp16_qk_reduction (or use_fp16_qk_reduction), backend ("auto", "fa2", "fa3", ...).

    Returns out (m, Hq, Dvo), or (out, lse) with return_lse: lse is fp32 (m, Hq), log2 of the softmax denominator. A row
    without keys gives 0 and -inf. Can be captured.

    Raises before any launch: ValueError for a shape, stride, device or mask size; TypeError for a dtype; UnknownName,
    which is both a KeyError and a ValueError, for an unknown name; NotImplementedError if no kernel serves the call.

    >>> q, k, v = torch.randn(5, 8, 64).half(), torch.randn(37, 2, 64).half(), torch.randn(37, 2, 64).half()
    >>> single_prefill_with_kv_cache(q, k, v, causal=True).shape
    torch.Size([5, 8, 64])
    >>> q, k, v = (t.to(torch.float8_e5m2) for t in (q, k, v))  # with a scale for each head
    >>> ones = torch.ones(8), torch.ones(2), torch.ones(2)
    >>> single_prefill_with_kv_cache(q, k, v, q_scale=ones[0], k_scale=ones[1], o_dtype=torch.bfloat16).dtype
    torch.bfloat16
    """
    return serve(single_prefill_call(
        q, k, v, custom_mask, packed_custom_mask, causal, kv_layout, pos_encoding_mode, sm_scale, window_left,
        logits_soft_cap, rope_scale, rope_theta, return_lse, backend, o_dtype, q_scale, k_scale, v_scale, scale_q,
        scale_k, scale_v, kv_cache_sf,
    ))  # fmt: skip


def single_prefill_call(
    q: Any, k: Any, v: Any, custom_mask: Any, packed_custom_mask: Any, causal: Any, kv_layout: Any,
    pos_encoding_mode: Any, sm_scale: Any, window_left: Any, logits_soft_cap: Any, rope_scale: Any, rope_theta: Any,
    return_lse: Any, backend: Any, o_dtype: Any, q_scale: Any, k_scale: Any, v_scale: Any, scale_q: Any, scale_k: Any,
    scale_v: Any, kv_cache_sf: Any,
) -> AttentionCall:  # fmt: skip
    """Return the call of `single_prefill_with_kv_cache`."""
    values.check_name("kv_layout", kv_layout, ("NHD", "HND"))
    values.check_name("backend", backend, values.BACKENDS)
    check_strided("q", q, 3)
    k, v = rows_of("k", k, kv_layout), rows_of("v", v, kv_layout)
    m = values.modifiers_of(causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)
    (rows, heads, dim), keys, device = q.shape, k.shape[2], q.device
    if m.rope is not None:
        values.check_rope(m.rope, values.TensorTypes(q.dtype, k.dtype, q.dtype))
    mask, bits, starts = values.mask_of(custom_mask, packed_custom_mask, device, shape=(rows, keys)), None, None
    if mask is not None:
        size = (rows * keys + 7) // 8
        mask.check(rows * keys, size)
        given = mask.given.to(device)
        bits, starts = given if mask.packed else packbits(given, "little"), values.bounds(size, device)
    elif causal and rows > keys:
        raise ValueError(f"q: {rows} rows, must be at most the {keys} rows of k if causal is True")
    scale, scale_tensor, out_scale, out_scale_tensor = values.combine_scales(
        dim**-0.5 if m.sm_scale is None else m.sm_scale, values.either("q_scale", q_scale, "scale_q", scale_q),
        values.either("k_scale", k_scale, "scale_k", scale_k), values.either("v_scale", v_scale, "scale_v", scale_v),
        device, (heads, k.shape[1]),
    )  # fmt: skip
    k_scales, v_scales = (None, None) if kv_cache_sf is None else scales_of(kv_cache_sf, kv_layout)
    own = values.bounds(rows, device)
    requests = ragged_sequences(own, own if rows == keys else values.bounds(keys, device), not traced(q))
    return AttentionCall(
        signature=SINGLE, q=q, k=k, v=v, requests=requests, max_q_len=rows, scale=scale, out_scale=out_scale,
        causal=causal, window_left=m.window_left, soft_cap=m.soft_cap, return_lse=return_lse,
        out_dtype=None if o_dtype is None else values.dtype_of("o_dtype", o_dtype), rope=m.rope,
        scale_tensor=scale_tensor, out_scale_tensor=out_scale_tensor, k_scales=k_scales, v_scales=v_scales,
        custom_mask=bits, mask_starts=starts,
        alibi_slopes=values.alibi_slopes(heads, device) if m.mode == "ALIBI" else None,
    )  # fmt: skip


def single_prefill_with_kv_cache_return_lse(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse): `single_prefill_with_kv_cache` with return_lse=True; args and kwargs are its other arguments.

    >>> q = torch.randn(5, 8, 64).half()
    >>> single_prefill_with_kv_cache_return_lse(q, q, q)[1].shape
    torch.Size([5, 8])
    """
    kwargs["return_lse"] = True
    return single_prefill_with_kv_cache(*args, **kwargs)
