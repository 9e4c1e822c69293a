"""FlashInfer's module `attn_scores`: logits of an indexer. Its function has other arguments than DeepGEMM's function of
the same name."""

from typing import Any

import torch

from ..host.checks import check_integer, check_one_of, check_strided
from ..host.scalars import integer
from ..indexer.logits import E4M3, PAGED_ALL, LogitsCall, check_out_dtype, serve
from ..latent.views import rows_view

__all__ = ["fp8_paged_mqa_logits"]

BYTES = (torch.uint8, torch.int8, E4M3)


def fp8_paged_mqa_logits(
    q: torch.Tensor, kv_fused: torch.Tensor, weights: torch.Tensor, context_lens: torch.Tensor,
    block_table: torch.Tensor, max_context_len: int, *, output_dtype: torch.dtype = torch.float32,
    epi_dtype: torch.dtype = torch.float32, acc_dtype: torch.dtype = torch.float32, num_epi_subtiles: int = 1,
    schedule_meta: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return how well each key of its request suits each query token: logits over a paged cache, without a causal mask.

    The formula and the cache are those of `wrappers.fp8_paged_mqa_logits`, which is DeepGEMM's.

    Args, upstream's order (FlashInfer):
        q: float8_e4m3fn (B, next_n, H, D). kv_fused: uint8 (pages, P, 1, D + 4). weights: fp32 (B * next_n, H).
        context_lens: int32 (B,): all tokens of a request see so many keys. Columns behind them are not written.
        block_table: int32 (B, M); only the entries that the keys need are read. max_context_len: columns.
        output_dtype: float32 or bfloat16. out: receives the logits, (B * next_n, max_context_len), or None.

    Hints: epi_dtype, acc_dtype, num_epi_subtiles, schedule_meta. Sums are in fp32. Returns the logits. Raises as
    DeepGEMM's function does.

    >>> cache, q = torch.zeros(4, 2, 1, 36, dtype=torch.uint8), torch.ones(1, 2, 8, 32).to(torch.float8_e4m3fn)
    >>> table, lens = torch.tensor([[3, 1]]).int(), torch.tensor([4]).int()
    >>> fp8_paged_mqa_logits(q, cache, torch.ones(2, 8), lens, table, 4)
    tensor([[0., 0., 0., 0.],
            [0., 0., 0., 0.]])
    """
    return serve(paged_call(
        q, kv_fused, weights, context_lens, block_table, max_context_len, output_dtype, epi_dtype, acc_dtype,
        num_epi_subtiles, schedule_meta, out,
    ))  # fmt: skip


def paged_call(
    q: Any, kv_fused: Any, weights: Any, context_lens: Any, block_table: Any, max_context_len: Any, output_dtype: Any,
    epi_dtype: Any, acc_dtype: Any, num_epi_subtiles: Any, schedule_meta: Any, out: Any,
) -> LogitsCall:  # fmt: skip
    """Return the call of `fp8_paged_mqa_logits`."""
    check_strided("q", q, 4)
    view = rows_view("kv_fused", kv_fused)
    check_one_of("kv_fused: dtype", view.dtype, BYTES)
    for name, hint in (("epi_dtype", epi_dtype), ("acc_dtype", acc_dtype)):
        if not isinstance(hint, torch.dtype):
            raise TypeError(f"{name}: {hint!r}, must be a torch.dtype")
    check_integer("num_epi_subtiles", integer(num_epi_subtiles), 1)
    if schedule_meta is not None:
        check_strided("schedule_meta", schedule_meta)
    width = check_integer("max_context_len", integer(max_context_len), 0)
    codes = view if view.dtype is torch.uint8 else view.view(torch.uint8)
    dtype = check_out_dtype("output_dtype", output_dtype)
    return LogitsCall(
        PAGED_ALL, q.flatten(0, 1), codes, weights, context_lens, width, dtype, table=block_table, out=out,
        next_n=max(q.shape[1], 1), causal=False,
    )  # fmt: skip
