"""Rows of latent attention, gathered from the pages of requests and dequantised."""

from typing import Any

import torch

from cute_kernels.records import BYTES, INDEX, RECORDS, ROWS

from ..host.checks import check_strided
from ..host.scalars import dequantisation_scale
from ..latent.gather import GATHER, GatherCall, serve
from ..latent.views import rows_view
from .append_latent import LatentCache, check_unscaled

__all__ = ["gather_latent"]


def gather_latent(
    cache: LatentCache, block_table: torch.Tensor, cu_seqlens: torch.Tensor, out: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Gather the rows of requests from a paged cache of latent attention, dequantised, to one tensor.

    Args:
        cache: a `LatentCache` whose rotated part is None.
        block_table: int32 or int64 (B, M), the pages of each request.
        cu_seqlens: int32 or int64 (B + 1,), the first row of each request in out, and the end of the last one.
        out: (S, W), any row stride. With record "rows" it has the cache's dtype and columns. Else it is fp16 or bf16,
            and W is 576 for "656" and "352", 512 for the other records with factors, and the columns of the cache for
            "e4m3". The rotated values of "656" and "584" are copied: out must have their dtype.
        seq_starts: int32 or int64 (B,), the position in its request of the first row of each; None: 0.

    A row without a page in the cache is left unwritten. No value of any tensor makes the call access memory outside its
    tensors. Values are rounded once, from fp32. Raises before anything is written: TypeError for a dtype; ValueError
    for a shape, stride, device or number; NotImplementedError for a rotated part with a cache of its own. No other
    library has this function.

    >>> cache, out = torch.zeros(3, 4, 656, dtype=torch.uint8), torch.ones(2, 576).bfloat16()
    >>> gather_latent(LatentCache(cache, "656"), torch.tensor([[2], [0]]), torch.tensor([0, 1, 2]), out)
    >>> out.any().item()
    False
    """
    serve(gather_call(cache, block_table, cu_seqlens, out, seq_starts))


def gather_call(cache: Any, block_table: Any, cu_seqlens: Any, out: Any, seq_starts: Any = None) -> GatherCall:
    """Return the call of `gather_latent`."""
    if not isinstance(cache, LatentCache):
        raise TypeError(f"cache: {type(cache).__name__}, must be a LatentCache")
    if not isinstance(cache.record, str) or cache.record == INDEX or cache.record not in RECORDS:
        allowed = ", ".join(name for name in RECORDS if name != INDEX)
        raise ValueError(f"cache.record: {cache.record!r}, must be one of {allowed}")
    if cache.rotated is not None:
        raise NotImplementedError("cache.rotated: given, not supported: gather it by a call of its own")
    view = rows_view("cache.cache", cache.cache)
    check_strided("out", out, 2)
    scale, scale_ptr = dequantisation_scale("cache.scale", cache.scale, view, "cache.cache", False)
    if cache.record != "e4m3":
        check_unscaled("cache.scale", scale, scale_ptr, f"with record {cache.record}")
    return GatherCall(
        GATHER, BYTES if cache.record == ROWS else cache.record, view, out, block_table, cu_seqlens, out.shape[0],
        seq_starts, scale=scale, scale_ptr=scale_ptr,
    )  # fmt: skip
