"""This package's top-k in vLLM's sparse indexer: exact, in ascending order, bitwise equal in every run.

    VLLM_PLUGINS=cute_kernels_topk vllm serve MODEL

`replace` replaces the per-row functions of `vllm._custom_ops`, which the indexer's prefill calls, and
`SparseIndexerTopk.forward` by `decode`, whatever `sparse_indexer_topk_backend` says.

Written for vLLM 0.33. Tested on the CPU reference against vLLM's own files; not run inside a server.
"""

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk

from ..vllm.topk import top_k_per_row_decode, top_k_per_row_prefill


def decode(
    self: Any, logits: torch.Tensor, seq_lens: torch.Tensor, next_n: int, topk_indices: torch.Tensor,
    topk_tokens: int, max_seq_len: int,
) -> None:  # fmt: skip
    """Select as `SparseIndexerTopk.forward` does.

    logits: (rows, keys). seq_lens: int32 (requests, next_n), the end of each row, or (requests, 1), the end of a
    request's last row. topk_indices: int32 (rows, topk_tokens), any row stride, is written.
    """
    if seq_lens.numel() != logits.shape[0]:
        seq_lens = seq_lens.reshape(-1)
    top_k_per_row_decode(
        logits, next_n, seq_lens, topk_indices, logits.shape[0], logits.stride(0), logits.stride(1), topk_tokens
    )


def replace() -> None:
    """Replace vLLM's functions; may be called again."""
    ops.top_k_per_row_prefill = top_k_per_row_prefill
    ops.top_k_per_row_decode = top_k_per_row_decode
    SparseIndexerTopk.forward = decode
