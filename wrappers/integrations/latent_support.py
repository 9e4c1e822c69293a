"""Functions that the integrations of latent attention (MLA) share."""

import os
from typing import Any

import torch

from cute_kernels.attention.spec import tokens_of_union
from cute_kernels.records import RECORDS

from ..attention.call import AttentionCall, SequenceBatch
from ..attention.views import columns_and_rope
from ..deep_gemm.api import fp8_paged_mqa_logits
from ..flash_mla.api import NAME, SPARSE_NAME, flash_mla_with_kvcache
from ..own.explanation import explain
from .support import E4M3, reason_of

COLUMNS, ROTATED = 512, 64  # of a row's latent and of its rotated part
PACKED = "656"  # the record that DeepSeek V3.2's caches have
# Prompts: query tokens of a batch per request from which on neighbouring tokens share the keys that they have chosen,
# and tokens that the longest request must exceed, more than a decode with drafts has
SHARING_MEAN = SHARING_LONGEST = 8
SHARED_RECORDS = "", "e4m3", PACKED  # of caches over which kernels with shared keys are shipped


def latent_call(
    q: torch.Tensor, q_rope: torch.Tensor | None, cache: torch.Tensor, requests: SequenceBatch, longest: int,
    scale: float, out_scale: float = 1.0, **options: Any,
) -> AttentionCall:  # fmt: skip
    """Return a call of attention over a paged cache of latent attention.

    q: (T, H, 512). q_rope: (T, H, R), or None; both may lie anywhere. cache: (pages, P, 1, W): rows of q's dtype or of
    e4m3, or packed records of 656 bytes. requests: with a table, causal, or with slots. options: fields of the call.
    """
    pages, record, k_rope = cache.transpose(1, 2), "", None
    if cache.shape[3] == RECORDS[PACKED].row and cache.dtype.itemsize == 1:
        k, record = pages.view(torch.uint8), PACKED
    else:
        k, k_rope = columns_and_rope(pages, q.shape[2])
        record = "e4m3" if cache.dtype is E4M3 else ""
    chosen = requests.form == "slots"
    return AttentionCall(
        SPARSE_NAME if chosen else NAME, q, k, k, requests, longest, scale, out_scale, causal=not chosen,
        out_dtype=q.dtype, shares_v=True, q_rope=q_rope, k_rope=k_rope, record=record, **options,
    )  # fmt: skip


def of_prompts(tokens: int, requests: int, longest: int) -> bool:
    """Return whether neighbouring tokens of a batch are mostly of one prompt, and so choose mostly the same keys.

    longest: at least the most tokens of a request. A batch of decodes, with or without drafts, has no such tokens.
    """
    return longest > SHARING_LONGEST and tokens >= SHARING_MEAN * requests


def asked_for(name: str, default: bool = False) -> bool:
    """Return whether the user has set an environment variable to 1. Raises ValueError unless it is 0, 1 or not set."""
    found = os.environ.get(name) or str(int(default))
    if found not in ("0", "1"):
        raise ValueError(f"{name}: {found!r}, must be 0 or 1")
    return found == "1"


def can_share_keys(heads: int, record: str) -> bool:
    """Return whether the user asks for shared keys (CUTE_KERNELS_SHARE_KEYS), and a shipped kernel lets tokens of
    `heads` query heads share those of a cache of rows of `record`, which is "" for 16 bits."""
    return asked_for("CUTE_KERNELS_SHARE_KEYS") and tokens_of_union(heads) > 1 and record in SHARED_RECORDS


def latent_refusal(
    arch: str, dtype: torch.dtype, record: str, rotated: int = ROTATED, sparse: bool = False
) -> str | None:
    """Return why no kernel computes latent attention over such a cache, or the logits of its indexer, or None.

    dtype: the model's. record: of the cache's rows, "" for 16 bits. rotated: columns of the rotated part of a row.
    sparse: tokens choose their keys, by an indexer. The reason is that of `explain` for a small call.
    """
    q = torch.zeros(1, 1, 16, COLUMNS + rotated, device="cpu").to(dtype)
    width = RECORDS[record].row if record else 0  # 0 for rows of any width
    pages = torch.zeros(1, 64, 1, width or q.shape[3], device="cpu").to(torch.uint8 if record else dtype)
    ints = [torch.zeros(shape, dtype=torch.int32, device="cpu") for shape in ((1, 1), (1,), (1, 1, 1))]
    given: dict[str, Any] = {"is_fp8_kvcache": bool(record), "indices": ints[2] if sparse else None, "arch": arch}
    try:
        found = [explain(q, pages, *ints[:2], COLUMNS, function=flash_mla_with_kvcache, **given)]
        if sparse:
            codes, keys = torch.zeros(1, 1, 64, 128, device="cpu").to(E4M3), torch.zeros(1, 64, 1, 132, device="cpu")
            weights = torch.zeros(1, 64, dtype=torch.float32, device="cpu")
            index = codes, keys.to(torch.uint8), weights, ints[1], ints[0], None, 64
            found.append(explain(*index, function=fp8_paged_mqa_logits, arch=arch))
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)
    return reason_of(arch, *found)
