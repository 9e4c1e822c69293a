"""This package's top-k in SGLang's sparse indexers (DSA, DeepSeek-V4): exact, ascending, bitwise equal in every run.

    SGLANG_PLUGINS=cute_kernels,cute_kernels_topk python -m sglang.launch_server ...

`replace` replaces `topk_func` and `topk_transform` of `DSATopKBackend`, whatever `--dsa-topk-backend` says, and the
kernels of DeepSeek-V4's indexer, which the default backend `sgl-kernel` calls, by `paged`.

Written for SGLang 0.5.23. Tested on the CPU reference against SGLang's own files; not run inside a server.
"""

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod, _build_flashinfer_paged_args
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..flashinfer.topk import top_k_page_table_transform, top_k_ragged_transform

BACKEND = "sglang.srt.layers.attention.dsa.dsa_topk_backend.DSATopKBackend"
KERNELS = "sglang.kernels.ops.attention.dsv4.topk"


def topk_func(
    self: Any, score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the indices of each row's window, int32 (rows, topk).

    The window has lengths[i] scores from row_starts[i] (default 0) on, and indices count from there.
    """
    none = torch.zeros_like(lengths, dtype=torch.int32)
    return top_k_ragged_transform(score, none, _int32(lengths), topk, row_starts=_int32(row_starts))


def topk_transform(
    self: Any, logits: torch.Tensor, lengths: torch.Tensor, topk: int, topk_transform_method: Any,
    attn_metadata: Any, cu_seqlens_q_topk: torch.Tensor | None = None,
    topk_indices_offset: torch.Tensor | None = None, row_starts: torch.Tensor | None = None,
    batch_idx_list: Any = None, force_unfused_topk: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return `topk_func`'s indices as slots of the KV pool (PAGED), or of the batch's flattened keys (RAGGED).

    The page table is the one of single slots, or of pages if SGLang has made no other.
    """
    if not envs.SGLANG_DSA_FUSE_TOPK.get() or force_unfused_topk:
        return topk_func(self, logits, lengths, topk, row_starts)
    lengths, starts = _int32(lengths), _int32(row_starts)
    if topk_transform_method == TopkTransformMethod.RAGGED:
        if topk_indices_offset is None:
            raise ValueError("topk_indices_offset: None, required if topk_transform_method is RAGGED")
        return top_k_ragged_transform(logits, _int32(topk_indices_offset), lengths, topk, row_starts=starts)
    if attn_metadata.page_table_1 is None:  # decodes have one row per request
        table, size = attn_metadata.real_page_table, attn_metadata.page_size
        return top_k_page_table_transform(logits, table, lengths, topk, page_size=size)
    rows, table_starts = _build_flashinfer_paged_args(
        attn_metadata, starts, cu_seqlens_q_topk, batch_idx_list, logits.device, logits.shape[0]
    )
    return top_k_page_table_transform(
        logits, attn_metadata.page_table_1, lengths, topk, row_to_batch=_int32(rows), row_starts=starts,
        page_table_row_starts=_int32(table_starts),
    )  # fmt: skip


def paged(
    scores: torch.Tensor, seq_lens: torch.Tensor, page_tables: torch.Tensor | None, out_page_indices: torch.Tensor,
    page_size: int, out_raw_indices: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write the slots of the k largest of each row's first seq_lens[i] scores.

    out_page_indices: int32 (rows, k), receives the slots, or without page_tables the indices. out_raw_indices: receives
    the indices.
    """
    lengths, k = _int32(seq_lens).reshape(-1), out_page_indices.shape[1]
    if page_tables is None:
        if out_raw_indices is not None:
            raise ValueError("out_raw_indices: given, must be None without page_tables")
        out_page_indices.copy_(top_k_ragged_transform(scores, torch.zeros_like(lengths), lengths, k))
        return
    top_k_page_table_transform(
        scores, page_tables, lengths, k, page_size=page_size, out=out_page_indices, out_raw_indices=out_raw_indices
    )


def paged_v2(
    scores: torch.Tensor, seq_lens: torch.Tensor, page_tables: torch.Tensor | None, out_page_indices: torch.Tensor,
    page_size: int, metadata: Any, out_raw_indices: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Call `paged`, which needs no plan."""
    paged(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def _int32(t: Any) -> Any:
    return t.to(torch.int32) if isinstance(t, torch.Tensor) else t


def replace() -> None:
    """Register hooks, which SGLang applies after all plugins are loaded."""
    for target, function in (
        (f"{BACKEND}.topk_func", topk_func),
        (f"{BACKEND}.topk_transform", topk_transform),
        (f"{KERNELS}.topk_transform_paged", paged),
        (f"{KERNELS}.topk_transform_paged_v2", paged_v2),
    ):
        HookRegistry.register(target, function, HookType.REPLACE)
