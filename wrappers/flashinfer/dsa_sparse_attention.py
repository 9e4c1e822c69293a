"""FlashInfer's module `dsa_sparse_attention`: attention of prompts over chosen rows of latent attention, with queries
and keys of two tensors each. Upstream's functions also have gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cute_kernels.attention.spec import LSE_NATURAL, LSE_OF_KEYS

from ..attention.call import AttentionCall, slot_sequences
from ..attention.checks import SIGNATURES
from ..attention.op import serve
from ..attention.views import counts_of
from ..host.checks import (
    UnknownName,
    check_device,
    check_flag,
    check_integer,
    check_operand,
    check_shape,
    check_strided,
)
from ..host.plain import traced
from ..host.scalars import integer, real
from ..host.segments import check_boundaries, rows_of_documents

__all__ = ["dsa_sparse_attention", "dsa_sparse_attention_varlen"]

NAME = "dsa_sparse_attention"
VARLEN_NAME = "dsa_sparse_attention_varlen"
BACKEND = "cake"  # the one name that upstream's functions take
SIGNATURES[NAME] = {
    **dict.fromkeys(("kv", "k", "v", "shares_v"), "kv_latent"), "q": "q_latent", "max_q_len": "q_latent",
    "page_table": "indices", "kv_lens": "topk_length", "scale": "softmax_scale",
}  # fmt: skip
SIGNATURES[VARLEN_NAME] = SIGNATURES[NAME] | {"page_table": "gather_kv_indices"}


def dsa_sparse_attention(
    q_latent: torch.Tensor, q_rope: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor,
    indices: torch.Tensor, *, topk_length: torch.Tensor | None = None, softmax_scale: float | None = None,
    return_lse: bool = False, key_passes: int | None = None, dkv_acc: Any = None, dkv_dst_map: Any = None,
    backend: str = BACKEND,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute attention of tokens that have chosen their keys, for prompts. A row of keys lies in two tensors.

    out = softmax(softmax_scale (q_latent kv_latent^T + q_rope k_rope^T)) kv_latent over the chosen keys.

    Args:
        q_latent: fp16 or bf16 (T, H, 512), any H, the last stride 1, such as columns of (T, H, 576).
        q_rope: (T, H, 64), likewise.
        kv_latent: (S, 512) of q_latent's dtype, any row stride: keys, and values. k_rope: (S, 64).
        indices: int32 (T, K), any K and row stride: the rows that a token sees. A number outside [0, S) is no key,
            wherever it is, and a row that comes twice counts twice.
        topk_length: int32 (T,), only the first so many of each token count, or None; entries behind them are not read.
        softmax_scale: factor on the logits, None for 576**-0.5. return_lse: return the LSE too.

    Hints: key_passes, of upstream's backward. Rejected: dkv_acc, dkv_dst_map; they receive gradients, and this function
    has none. backend: "cake", upstream's only one.

    Returns out (T, H, 512), or (out, lse), fp32 (T, H) in natural units. A token without keys has 0 and -inf. The
    bits of a token's result depend on the token alone. Raises before anything is launched, NotImplementedError for
    what is not served. FlashInfer's function.

    >>> q, kv = torch.ones(1, 16, 576).half(), torch.ones(9, 576).half()
    >>> out, lse = dsa_sparse_attention(
    ...     q[..., :512], q[..., 512:], kv[:, :512], kv[:, 512:], torch.tensor([[3, -1, 8, 9]]).int(),
    ...     softmax_scale=576**-1, return_lse=True)
    >>> out.shape, lse[0, 0]
    (torch.Size([1, 16, 512]), tensor(1.6931))
    """
    return serve(flat_call(
        q_latent, q_rope, kv_latent, k_rope, indices, topk_length, softmax_scale, return_lse, key_passes, dkv_acc,
        dkv_dst_map, backend,
    ))  # fmt: skip


def dsa_sparse_attention_varlen(
    q_latent: torch.Tensor, q_rope: torch.Tensor, kv_latent: torch.Tensor, k_rope: torch.Tensor,
    gather_kv_indices: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, *, causal: bool = False,
    topk_length: torch.Tensor | None = None, softmax_scale: float | None = None, return_lse: bool = False,
    key_passes: int | None = None, dkv_acc: Any = None, dkv_dst_map: Any = None, backend: str = BACKEND,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute attention of tokens of several documents that have chosen their keys, by positions in their document.

    Args:
        q_latent, q_rope, kv_latent, k_rope, topk_length, softmax_scale, return_lse, backend: as those of
            `dsa_sparse_attention`.
        gather_kv_indices: int32 (T, K): positions in the token's document. One outside the document is no key.
        cu_seqlens_q, cu_seqlens_k: int32 (N + 1,): where the queries and the keys of each of N documents begin and end.
            A token outside all documents has no keys.
        causal: a token sees no key behind its own; the queries of a document are the tail of its keys.

    Rejected: dkv_acc, dkv_dst_map. Hints: max_seqlen_q, max_seqlen_k, key_passes. Returns and raises as
    `dsa_sparse_attention` does; torch operations that make rows of positions run before the last checks. FlashInfer's
    function.

    >>> q, kv, ends = torch.ones(4, 2, 576).half(), torch.ones(9, 576).half(), torch.tensor([0, 1, 4]).int()
    >>> out = dsa_sparse_attention_varlen(
    ...     q[..., :512], q[..., 512:], kv[:, :512], kv[:, 512:], torch.zeros(4, 1).int(), ends, ends)
    >>> out.shape
    torch.Size([4, 2, 512])
    """
    return serve(varlen_call(
        q_latent, q_rope, kv_latent, k_rope, gather_kv_indices, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, causal, topk_length, softmax_scale, return_lse, key_passes, dkv_acc, dkv_dst_map, backend,
    ))  # fmt: skip


def varlen_call(
    q_latent: Any, q_rope: Any, kv_latent: Any, k_rope: Any, gather_kv_indices: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, max_seqlen_q: Any = None, max_seqlen_k: Any = None, causal: Any = False,
    topk_length: Any = None, softmax_scale: Any = None, return_lse: Any = False, key_passes: Any = None,
    dkv_acc: Any = None, dkv_dst_map: Any = None, backend: Any = BACKEND,
) -> AttentionCall:  # fmt: skip
    """Return the call of `dsa_sparse_attention_varlen`."""
    check_strided("q_latent", q_latent, 3)
    check_operand("gather_kv_indices", gather_kv_indices, 2, (torch.int32,), q_latent.device, "that of q_latent")
    check_boundaries(cu_seqlens_q, cu_seqlens_k, q_latent.device, "that of q_latent")
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if bound is not None:
            check_integer(name, integer(bound), 0)
    check_flag("causal", causal)
    rows_of = partial(rows_of_documents, starts_q=cu_seqlens_q, starts_k=cu_seqlens_k, causal=causal)
    return _call(
        VARLEN_NAME, q_latent, q_rope, kv_latent, k_rope, gather_kv_indices, topk_length, softmax_scale, return_lse,
        key_passes, dkv_acc, dkv_dst_map, backend, rows_of,
    )  # fmt: skip


def flat_call(
    q_latent: Any, q_rope: Any, kv_latent: Any, k_rope: Any, indices: Any, topk_length: Any = None,
    softmax_scale: Any = None, return_lse: Any = False, key_passes: Any = None, dkv_acc: Any = None,
    dkv_dst_map: Any = None, backend: Any = BACKEND,
) -> AttentionCall:  # fmt: skip
    """Return the call of `dsa_sparse_attention`."""
    return _call(
        NAME, q_latent, q_rope, kv_latent, k_rope, indices, topk_length, softmax_scale, return_lse, key_passes,
        dkv_acc, dkv_dst_map, backend,
    )  # fmt: skip


def _call(
    name: str, q_latent: Any, q_rope: Any, kv_latent: Any, k_rope: Any, indices: Any, topk_length: Any,
    softmax_scale: Any, return_lse: Any, key_passes: Any, dkv_acc: Any, dkv_dst_map: Any, backend: Any,
    rows_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> AttentionCall:  # fmt: skip
    """Return the call of either function. rows_of: makes rows of indices that are something else."""
    if backend != BACKEND:
        raise UnknownName(f"backend: {backend!r}, must be {BACKEND!r}")
    if key_passes is not None:
        check_integer("key_passes", integer(key_passes), 1)
    for argument, given in (("dkv_acc", dkv_acc), ("dkv_dst_map", dkv_dst_map)):
        if given is not None:
            shown = "Tensor" if isinstance(given, torch.Tensor) else repr(given)
            raise NotImplementedError(f"{argument}: {shown}, not supported, must be None: there is no backward")
    tokens, heads, columns = check_strided("q_latent", q_latent, 3).shape
    rows, rotated = len(check_strided("kv_latent", kv_latent, 2)), check_strided("k_rope", k_rope, 2).shape[1]
    check_shape("kv_latent", kv_latent, (rows, columns), "rows, columns of q_latent")
    check_shape("k_rope", k_rope, (rows, rotated), "rows of kv_latent, columns")
    check_shape("q_rope", check_strided("q_rope", q_rope, 3), (tokens, heads, rotated), "q_latent's, columns of k_rope")
    given = SIGNATURES[name]["page_table"]
    check_shape(given, check_strided(given, indices, 2), (tokens, indices.shape[1]), "tokens of q_latent, keys")
    check_device(given, indices, q_latent.device, "that of q_latent")
    if topk_length is not None:
        check_shape("topk_length", check_strided("topk_length", topk_length, 1), (tokens,), "tokens of q_latent")
    check_flag("return_lse", return_lse)
    if rows_of is not None:
        indices = rows_of(indices)
    plain, keys = not traced(q_latent), kv_latent[None, None]
    scale = (columns + rotated) ** -0.5 if softmax_scale is None else real(softmax_scale)
    return AttentionCall(
        name, q_latent, keys, keys, slot_sequences(indices, counts_of(indices, topk_length, 1, plain), plain), 1, scale,
        causal=False, split_kv="never", return_lse=return_lse, shares_v=True,
        lse_form=LSE_NATURAL | LSE_OF_KEYS, out_dtype=q_latent.dtype, q_rope=q_rope, k_rope=k_rope[None, None],
    )  # fmt: skip
