"""Attention of tokens that have chosen their keys from a paged cache of K and V, with any number of KV heads."""

from typing import Any

import torch

from ..attention.call import AttentionCall, slot_sequences
from ..attention.checks import SIGNATURES
from ..attention.op import serve
from ..attention.views import counts_of, pair
from ..fp4 import FP4Tensor
from ..host.checks import check_device, check_flag, check_shape, check_strided
from ..host.plain import traced
from ..host.scalars import real, split_scale

__all__ = ["sparse_paged_attention"]
NAME = "sparse_paged_attention"
SIGNATURES[NAME] = {
    "kv": "kv_cache", "k": "kv_cache (K)", "v": "kv_cache (V)", "page_table": "indices", "kv_lens": "counts",
    "max_q_len": "q", "scale": "bmm1_scale", "out_scale": "bmm2_scale", "soft_cap": "logits_soft_cap",
    "out_sf_scale": "o_sf_scale",
}  # fmt: skip


def sparse_paged_attention(
    q: torch.Tensor, kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], indices: torch.Tensor,
    counts: torch.Tensor | None = None, *, bmm1_scale: float | torch.Tensor | None = None,
    bmm2_scale: float | torch.Tensor = 1.0, kv_layout: str = "NHD", logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None, out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: torch.dtype | str | None = None, o_sf_scale: float | None = None, lse: torch.Tensor | None = None,
    return_lse: bool = False, batch_invariant: bool = False, enable_pdl: bool | None = None,
) -> Any:  # fmt: skip
    """Compute attention of tokens that have chosen their keys, by index, from a paged cache of K and V.

    The call is one launch. It plans nothing and copies nothing to the host, so that a captured graph serves other
    indices and counts.

    Args:
        q: (T, Hq, D) fp16, bf16 or e4m3, any token and head stride.
        kv_cache: (k, v), each (pages, P, Hkv, D) "NHD" or (pages, Hkv, P, D) "HND"; or one tensor (pages, 2, ...). Any
            page size P and page stride; Hq is a multiple of Hkv. The dtype is the query's; 16-bit queries also take
            e4m3, e5m2 and int8.
        indices: int32 (B, K), any K and row stride: the keys of T / B tokens in turn, so one row per token if B is T,
            and one per request if all requests have T / B tokens. Page p of the cache has the indices from p * P on, as
            `top_k_page_table_transform` and `select_slots` return them. All tokens of a row see the same keys. A number
            outside the cache, such as -1, is no key, wherever it is in the row; a key that comes twice counts twice.
        counts: int32 (B,): only the first so many indices of a row count, or None. Entries behind them are not read.
        kv_layout: "NHD" or "HND".
        bmm1_scale: factor on the logits, a float or an fp32 tensor of one element; None: D ** -0.5. bmm2_scale:
            likewise, on the output. The scales of a quantised K and V belong into these two. On CUDA, bmm1_scale must
            be positive.
        logits_soft_cap: c * tanh(s / c); None or 0: off. sinks: fp32 (Hq,), added to each head's softmax denominator;
            natural-log units, not scaled.
        out, out_dtype: the result tensor, or its dtype: fp16, bf16, e4m3 or "nvfp4" (an FP4Tensor), which needs its
            forward scale o_sf_scale. Default: a new tensor of the query's dtype.
        lse: fp32 (T, Hq), receives log2 of the softmax denominator, sink included. return_lse: return it, too.
        batch_invariant: the bits of a row do not depend on the other rows. It may be slower.
        enable_pdl: a hint.

    Returns out, or (out, lse). A token without keys gives 0, and -inf or the sink. An index that is no key costs as
    much time as a key: a row takes the time of its count. The kernel reads no memory for it, so that NaN elsewhere in
    the cache never reaches a result.

    Raises before any launch: ValueError for a rank, shape, stride or device; TypeError for a dtype;
    NotImplementedError if no kernel serves the call, and for an NVFP4 cache. No other library has this function.

    >>> q, k, v = torch.ones(2, 8, 64).half(), torch.zeros(3, 16, 2, 64).half(), torch.ones(3, 16, 2, 64).half()
    >>> out, lse = sparse_paged_attention(q, (k, v), torch.tensor([[47, -1, 0], [48, -1, -1]]).int(), return_lse=True)
    >>> out[:, 0, 0], lse[:, 0]
    (tensor([1., 0.], dtype=torch.float16), tensor([1., -inf]))
    """
    return serve(sparse_paged_call(
        q, kv_cache, indices, counts, bmm1_scale, bmm2_scale, kv_layout, logits_soft_cap, sinks, out, out_dtype,
        o_sf_scale, lse, return_lse, batch_invariant, enable_pdl,
    ))  # fmt: skip


def sparse_paged_call(
    q: Any, kv_cache: Any, indices: Any, counts: Any = None, bmm1_scale: Any = None, bmm2_scale: Any = 1.0,
    kv_layout: Any = "NHD", logits_soft_cap: Any = None, sinks: Any = None, out: Any = None, out_dtype: Any = None,
    o_sf_scale: Any = None, lse: Any = None, return_lse: Any = False, batch_invariant: Any = False,
    enable_pdl: Any = None,
) -> AttentionCall:  # fmt: skip
    """Return the call of `sparse_paged_attention`."""
    tokens, _, dim = check_strided("q", q, 3).shape
    k, v = pair("kv_cache", kv_cache, kv_layout)
    if isinstance(k, torch.Tensor) and k.dtype is torch.uint8:
        raise NotImplementedError(f"kv_cache: dtype {k.dtype}, not supported: NVFP4 caches have factors of blocks")
    if isinstance(v, torch.Tensor) and k.shape[:3] != v.shape[:3]:
        raise ValueError(f"kv_cache: K {tuple(k.shape)} and V {tuple(v.shape)} may differ in head_dim only")
    rows = check_strided("indices", indices, 2).shape[0]
    check_device("indices", indices, q.device, "that of q")
    if tokens % rows or not tokens if rows else tokens:
        raise ValueError(
            f"q: shape {tuple(q.shape)}, must have the same number of tokens, 1 or more, for each of the "
            f"{rows} rows of indices"
        )
    if counts is not None:
        check_shape("counts", check_strided("counts", counts, 1), (rows,), "rows of indices")
    check_flag("batch_invariant", batch_invariant)
    plain = not traced(q)
    number, tensor = (max(dim, 1) ** -0.5, None) if bmm1_scale is None else split_scale("bmm1_scale", bmm1_scale)
    out_number, out_tensor = split_scale("bmm2_scale", bmm2_scale)
    return AttentionCall(
        NAME, q, k, v, slot_sequences(indices, counts_of(indices, counts, 1, plain), plain),
        tokens // rows if rows else 1, number, out_number, causal=False, soft_cap=real(logits_soft_cap),
        split_kv="fixed" if batch_invariant else "auto", return_lse=return_lse, enable_pdl=enable_pdl,
        out_dtype=out_dtype, out_sf_scale=real(o_sf_scale), out=out, lse=lse, sinks=sinks, scale_tensor=tensor,
        out_scale_tensor=out_tensor,
    )  # fmt: skip
