"""FlashInfer's decode function of one request: one query token over K and V without pages."""

from typing import Any

import torch

from ..attention.call import AttentionCall, TableLayout, sequences_of
from ..attention.checks import HEAD_SCALES, SIGNATURES
from ..attention.op import serve
from ..attention.views import pair, without_table
from ..host.checks import check_flag, check_strided
from ..host.plain import traced
from ..host.scratch import constant, filled
from . import values

__all__ = ["single_decode_with_kv_cache"]
NAME = "single_decode_with_kv_cache"
LAYOUT = TableLayout("k")
SIGNATURES[NAME] = values.NAMES | {
    "kv": "k, v", "page_table": "k", "kv_lens": "k", "max_q_len": "q", "out_dtype": "o_dtype", "scales": "k, v",
}  # fmt: skip
HEAD_SCALES.add(NAME)


def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, return_lse: bool = False, *, o_dtype: torch.dtype | str | None = None,
) -> Any:  # fmt: skip
    """Compute attention of one query token, the last of a request, over its K and V.

    FlashInfer's function. K and V are read as pages of 64, 32, 16 or 8 rows, whichever divides n, so that CTAs share
    them; with another n they are read row by row.

    Args:
        q: (Hq, D) fp16, bf16, e4m3 or e5m2. k: (n, Hkv, D), v: (n, Hkv, Dvo) "NHD", or (Hkv, n, ...) "HND". The dtype
            of k and v is q's; 16-bit q also takes e4m3 and e5m2, e4m3 q the latter.
        use_tensor_cores: a hint.
        o_dtype: dtype of the output: fp16, bf16 or e4m3 (saturated). None: q's; required with e5m2 q.
        Other arguments are as in `single_prefill_with_kv_cache`.

    Returns out (Hq, Dvo), or (out, lse) with return_lse: lse is fp32 (Hq,), log2 of the softmax denominator. Raises as
    `single_prefill_with_kv_cache` does.

    >>> q, k, v = torch.randn(8, 64).half(), torch.randn(48, 2, 64).half(), torch.randn(48, 2, 64).half()
    >>> single_decode_with_kv_cache(q, k, v).shape
    torch.Size([8, 64])
    """
    call = single_decode_call(
        q, k, v, kv_layout, pos_encoding_mode, use_tensor_cores, q_scale, k_scale, v_scale, window_left,
        logits_soft_cap, sm_scale, rope_scale, rope_theta, return_lse, o_dtype,
    )  # fmt: skip
    return shaped(call, serve(call), q, None)


def single_decode_call(
    q: Any, k: Any, v: Any, kv_layout: Any, pos_encoding_mode: Any, use_tensor_cores: Any, q_scale: Any, k_scale: Any,
    v_scale: Any, window_left: Any, logits_soft_cap: Any, sm_scale: Any, rope_scale: Any, rope_theta: Any,
    return_lse: Any, o_dtype: Any,
) -> AttentionCall:  # fmt: skip
    """Return the call of `single_decode_with_kv_cache`."""
    values.check_name("kv_layout", kv_layout, ("NHD", "HND"))
    check_flag("use_tensor_cores", use_tensor_cores)
    check_strided("q", q, 2)
    k, v = (check_strided(name, t, 3).transpose(0, 1) if kv_layout == "HND" else check_strided(name, t, 3)
            for name, t in (("k", k), ("v", v)))  # fmt: skip
    m = values.modifiers_of(True, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)
    if m.rope is not None:
        values.check_rope(m.rope, values.TensorTypes(q.dtype, k.dtype, q.dtype))
    (heads, dim), device, plain = q.shape, q.device, not traced(q)
    k_pages, v_pages, table = without_table(k[None], v[None], None, 1, plain, ("k", "v"))
    keys = pair("k, v", (k_pages, v_pages), "NHD")
    requests = sequences_of(table, constant(filled, device, plain, 1, k.shape[0]), None, plain, LAYOUT)
    scale, scale_tensor, out_scale, out_scale_tensor = values.combine_scales(
        max(dim, 1) ** -0.5 if m.sm_scale is None else m.sm_scale,
        q_scale,
        k_scale,
        v_scale,
        device,
        (heads, k.shape[1]),
    )
    return AttentionCall(
        signature=NAME, q=q[None], k=keys[0], v=keys[1], requests=requests, max_q_len=1, scale=scale,
        out_scale=out_scale, window_left=m.window_left, soft_cap=m.soft_cap, return_lse=return_lse, rope=m.rope,
        out_dtype=None if o_dtype is None else values.dtype_of("o_dtype", o_dtype), scale_tensor=scale_tensor,
        out_scale_tensor=out_scale_tensor,
        alibi_slopes=values.alibi_slopes(heads, device) if m.mode == "ALIBI" else None,
    )  # fmt: skip


def bound_rows(call: AttentionCall, q: Any, out: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a query and an output, or None, as the call takes them. They replace those of a bound call."""
    return check_strided("q", q, 2)[None], None if out is None else check_strided("out", out, 2)[None]


def shaped(call: AttentionCall, found: Any, q: Any, out: Any) -> Any:
    """Return the function's result for that of its call. out: the output that was given, or None."""
    o, lse = found if call.return_lse else (found, None)
    o = o[0] if out is None else out
    return o if lse is None else (o, lse[0])
