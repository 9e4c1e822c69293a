"""vLLM's operators that gather rows from the caches of latent attention (MLA) and of its indexer.

Each is one launch of the kernel behind `gather_latent`, and its docstring says what all of them promise. A row without
a page in the cache is left unwritten.
"""

from typing import Any

import torch

from cute_kernels.records import BYTES, INDEX

from ..host.checks import check_integer, check_operand, check_strided
from ..host.plain import traced
from ..host.scalars import dequantisation_scale, integer
from ..latent.gather import COPY, DEQUANT, INDEX_GATHER, UPCONVERT, UPCONVERT_NVFP4, GatherCall, serve
from ..latent.views import rows_view
from .latent import record_of


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor, dst: torch.Tensor, block_table: torch.Tensor, cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor, num_tokens: int, kv_cache_dtype: str, scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Gather rows of requests from a paged cache to one tensor; fp8 and packed rows are dequantised.

    Args:
        src_cache: (pages, P, W) of any dtype; for fp8 bytes (pages, P, W), for fp8_ds_mla (pages, P, 656), for
            nvfp4_ds_mla (pages, P, 352). Any P and page stride.
        dst: (S, W) of the cache's dtype; (S, W) fp16 or bf16 for fp8, (S, 576) for the packed records.
        block_table: int32 or int64 (B, M). cu_seq_lens: int32 or int64 (B + 1,), the first row of each request in dst.
        token_to_seq: int32 or int64 (num_tokens,), the request of each row; it follows from cu_seq_lens, which is read.
        num_tokens: rows of dst that may be written; a tensor without dimensions is read, for which the host waits.
        scale: fp32, one element: fp8 values are multiplied by it.
        kv_cache_dtype: "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla".
        seq_starts: int32 or int64 (B,), the position in its request of the first row of each; None: 0.

    Raises before anything is written: TypeError for a dtype; ValueError for a shape, stride, device or number; an
    unknown kv_cache_dtype is both a KeyError and a ValueError. vLLM's operator.

    >>> cache = torch.arange(6.0).view(3, 2, 1).half()  # 3 pages of 2 rows
    >>> dst, pages, none = torch.zeros(3, 1).half(), torch.tensor([[2, 0]]), torch.zeros(3).long()
    >>> one = torch.ones(1)
    >>> gather_and_maybe_dequant_cache(cache, dst, pages, torch.tensor([0, 3]), none, 3, "auto", one)
    >>> dst.flatten().tolist()
    [4.0, 5.0, 0.0]
    """
    serve(dequant_call(
        src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale, seq_starts
    ))  # fmt: skip


def dequant_call(
    src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, token_to_seq: Any, num_tokens: Any,
    kv_cache_dtype: Any, scale: Any, seq_starts: Any = None,
) -> GatherCall:  # fmt: skip
    """Return the call of `gather_and_maybe_dequant_cache`."""
    record, view = record_of(kv_cache_dtype), rows_view("src_cache", src_cache)
    check_operand("token_to_seq", token_to_seq, 1, (torch.int32, torch.int64), view.device, "that of src_cache")
    number, tensor = dequantisation_scale("scale", scale, view, "src_cache", False)
    if isinstance(num_tokens, torch.Tensor) and not (num_tokens.ndim or num_tokens.is_meta or traced(num_tokens)):
        num_tokens = num_tokens.item()  # torch's operators take these for numbers; a float or bool is refused below
    return GatherCall(
        DEQUANT, BYTES if record == "rows" else record, view, dst, block_table, cu_seq_lens,
        check_integer("num_tokens", integer(num_tokens), 0), seq_starts, scale=number, scale_ptr=tensor,
    )  # fmt: skip


def cp_gather_cache(
    src_cache: torch.Tensor, dst: torch.Tensor, block_table: torch.Tensor, cu_seq_lens: torch.Tensor, batch_size: int,
    seq_starts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Gather rows of requests from a paged cache to one tensor, as they are.

    src_cache: (pages, P, W) of any dtype, any page stride. dst: (S, W) of this dtype. batch_size: B; the other
    arguments, and errors, are as in `gather_and_maybe_dequant_cache`. vLLM's operator.

    >>> cache = torch.arange(6.0).view(3, 2, 1).half()  # 3 pages of 2 rows
    >>> dst, start = torch.zeros(2, 1).half(), torch.tensor([1])
    >>> cp_gather_cache(cache, dst, torch.tensor([[2, 0]]), torch.tensor([0, 2]), 1, start)
    >>> dst.flatten().tolist()
    [5.0, 0.0]
    """
    serve(copy_call(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts))


def copy_call(
    src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, batch_size: Any, seq_starts: Any = None
) -> GatherCall:
    """Return the call of `cp_gather_cache`."""
    check_strided("dst", dst, 2)
    table, starts, firsts = _requests(block_table, "cu_seq_lens", cu_seq_lens, 1, batch_size, seq_starts)
    return GatherCall(COPY, BYTES, rows_view("src_cache", src_cache), dst, table, starts, dst.shape[0], firsts)


def _requests(table: Any, name: str, starts: Any, more: int, batch_size: Any, firsts: Any) -> tuple[Any, Any, Any]:
    """Return the tensors of the first `batch_size` requests. more: elements of `starts` behind them."""
    size = check_integer("batch_size", integer(batch_size), 0)
    check_strided("block_table", table, 2)
    check_strided(name, starts, 1)
    if table.shape[0] < size or starts.shape[0] < size + more:
        least = f"{size} rows of block_table and {size + more} elements of {name}"
        raise ValueError(f"batch_size: {size}, needs {least}; there are {table.shape[0]} and {starts.shape[0]}")
    if firsts is not None:
        firsts = check_strided("seq_starts", firsts, 1)[:size]
    return table[:size], starts[: size + more], firsts


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: torch.Tensor, dst: torch.Tensor, block_table: torch.Tensor, workspace_starts: torch.Tensor,
    batch_size: int, seq_starts: torch.Tensor | None = None, host_cache: torch.Tensor | None = None,
    host_row_ids: torch.Tensor | None = None, device_row_ids: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Gather rows of requests from a cache of 656 bytes per token, dequantised.

    Args:
        src_cache: bytes (pages, P, 656), any P and page stride. dst: bf16 or fp16 (S, 576), of the dtype of the rotated
            values; all of its rows belong to requests.
        block_table: int32 or int64 (B, M). workspace_starts: int32 or int64 (B,), the first row of each request in dst.
        batch_size: B; only so many requests are read.
        seq_starts: int32 or int64 (B,), the position in its request of that row; None: 0.
        host_cache, host_row_ids, device_row_ids: must be None; others raise NotImplementedError.

    Errors are as in `gather_and_maybe_dequant_cache`. vLLM's operator.

    >>> cache, dst = torch.zeros(3, 4, 656, dtype=torch.uint8), torch.ones(2, 576).bfloat16()
    >>> cp_gather_and_upconvert_fp8_kv_cache(cache, dst, torch.tensor([[2], [0]]), torch.tensor([0, 1]), 2)
    >>> dst.any().item()
    False
    """
    serve(upconvert_call(
        src_cache, dst, block_table, workspace_starts, batch_size, seq_starts, host_cache, host_row_ids, device_row_ids
    ))  # fmt: skip


def upconvert_call(
    src_cache: Any, dst: Any, block_table: Any, workspace_starts: Any, batch_size: Any, seq_starts: Any = None,
    host_cache: Any = None, host_row_ids: Any = None, device_row_ids: Any = None,
) -> GatherCall:  # fmt: skip
    """Return the call of `cp_gather_and_upconvert_fp8_kv_cache`."""
    for name, t in (("host_cache", host_cache), ("host_row_ids", host_row_ids), ("device_row_ids", device_row_ids)):
        if t is not None:
            shown = type(t).__name__ if isinstance(t, torch.Tensor) else repr(t)
            raise NotImplementedError(f"{name}: {shown}, not supported, must be None")
    return _upconvert(UPCONVERT, "656", src_cache, dst, block_table, workspace_starts, batch_size, seq_starts)


def _upconvert(
    function: str, record: str, src_cache: Any, dst: Any, block_table: Any, workspace_starts: Any, batch_size: Any,
    seq_starts: Any,
) -> GatherCall:  # fmt: skip
    check_strided("dst", dst, 2)
    table, starts, firsts = _requests(block_table, "workspace_starts", workspace_starts, 0, batch_size, seq_starts)
    return GatherCall(function, record, rows_view("src_cache", src_cache), dst, table, starts, dst.shape[0], firsts)


def cp_gather_and_upconvert_nvfp4_kv_cache(
    src_cache: torch.Tensor, dst: torch.Tensor, block_table: torch.Tensor, workspace_starts: torch.Tensor,
    batch_size: int,
) -> None:  # fmt: skip
    """Gather rows of requests from a cache of 352 bytes per token, dequantised.

    src_cache: bytes (pages, P, 352). dst: bf16 or fp16 (S, 576). block_table, workspace_starts, batch_size, and errors
    are as in `cp_gather_and_upconvert_fp8_kv_cache`. vLLM's operator, which has it for Blackwell alone.

    >>> cache, dst = torch.zeros(3, 4, 352, dtype=torch.uint8), torch.ones(2, 576).bfloat16()
    >>> cp_gather_and_upconvert_nvfp4_kv_cache(cache, dst, torch.tensor([[2], [0]]), torch.tensor([0, 1]), 2)
    >>> dst.any().item()
    False
    """
    serve(upconvert_nvfp4_call(src_cache, dst, block_table, workspace_starts, batch_size))


def upconvert_nvfp4_call(
    src_cache: Any, dst: Any, block_table: Any, workspace_starts: Any, batch_size: Any
) -> GatherCall:
    """Return the call of `cp_gather_and_upconvert_nvfp4_kv_cache`."""
    return _upconvert(UPCONVERT_NVFP4, "352", src_cache, dst, block_table, workspace_starts, batch_size, None)


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor, dst_k: torch.Tensor, dst_scale: torch.Tensor, block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:  # fmt: skip
    """Gather keys of an indexer, and their scales, from a paged cache.

    Args:
        kv_cache: bytes (pages, P, 132): a page has P rows of 128 e4m3 values, then P fp32 scales. Any page stride.
        dst_k: (S, 128) e4m3, uint8 or int8. dst_scale: (S, 4) uint8, or fp32 (S,) or (S, 1).
        block_table: int32 or int64 (B, M). cu_seq_lens: int32 or int64 (B + 1,), the first row of each request in
            dst_k.

    Errors are as in `gather_and_maybe_dequant_cache`. vLLM's operator.

    >>> cache = torch.zeros(2, 64, 132, dtype=torch.uint8)
    >>> dst_k, dst_scale = torch.ones(3, 128, dtype=torch.uint8), torch.ones(3)
    >>> cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, torch.tensor([[1]]), torch.tensor([0, 2]))
    >>> dst_scale.tolist()
    [0.0, 0.0, 1.0]
    """
    serve(index_gather_call(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens))


def index_gather_call(kv_cache: Any, dst_k: Any, dst_scale: Any, block_table: Any, cu_seq_lens: Any) -> GatherCall:
    """Return the call of `cp_gather_indexer_k_quant_cache`."""
    check_strided("dst_k", dst_k, 2)
    check_strided("dst_scale", dst_scale)
    scales = dst_scale
    if scales.dtype == torch.float32:
        if scales.ndim == 1:
            scales = scales.unsqueeze(1)
        check_strided("dst_scale", scales, 2)
        if scales.shape[1] != 1:
            raise ValueError(f"dst_scale: shape {tuple(dst_scale.shape)}, must have one scale per row")
        scales = scales.as_strided(scales.shape, (scales.stride(0), 1)).view(torch.uint8)
    view = rows_view("kv_cache", kv_cache)
    return GatherCall(INDEX_GATHER, INDEX, view, dst_k, block_table, cu_seq_lens, dst_k.shape[0], scales=scales)
