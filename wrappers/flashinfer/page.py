"""Write to paged KV caches, as FlashInfer's `page` does.

One kernel writes K and V of a call. Nothing waits for the device, and all functions can be captured in a CUDA graph.

Request b's pages are kv_indices[kv_indptr[b]:kv_indptr[b + 1]]. Its keys fill them in order, with kv_last_page_len[b]
keys in the last page. Appended row i is key positions[i] of request batch_indices[i]:

    kv_len = get_seq_lens(kv_indptr, kv_last_page_len, page_size)  # includes the rows to append
    batch_indices, positions = get_batch_indices_positions(append_indptr, kv_len, nnz)
    append_paged_kv_cache(k, v, batch_indices, positions, cache, kv_indices, kv_indptr, kv_last_page_len)

All functions raise before anything is written: TypeError for a type or dtype; ValueError for a shape, stride, device or
number; an error that is both a KeyError and a ValueError for an unknown kv_layout; RuntimeError for a tensor that
requires grad, in grad mode.
"""

from typing import Any

import torch

from ..attention.views import sides
from ..cache_write.call import PAGES, SLOTS, CacheWriteCall
from ..cache_write.checks import APPEND, NVFP4_APPEND, NVFP4_SLOTS, OFFSETS
from ..cache_write.op import serve
from ..host.checks import check_apart, check_integer, check_operand, check_shape
from ..host.plain import traced
from ..host.scalars import dequantisation_scale, integer

__all__ = [
    "append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens", "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]  # fmt: skip
CACHE, CACHE_SF = "paged_kv_cache", "kv_cache_sf"
Written = tuple[CacheWriteCall, Any, Any]  # a call, and its caches and scale factors as they were given


def _offsets(name: str, indptr: Any, device: torch.device | None = None, owner: str = "") -> torch.Tensor:
    check_operand(name, indptr, 1, OFFSETS, device, owner)
    if not indptr.shape[0]:
        raise ValueError(f"{name}: shape (0,), must have at least 1 element")
    return indptr


def _amount(name: str, value: Any, least: int) -> int:
    """Return the value as an int, after a check that it is at least `least` and fits in int32."""
    value = check_integer(name, integer(value), least)
    if value >= 1 << 31:
        raise ValueError(f"{name}: {value}, must be below {1 << 31}")
    return value


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the number of keys of each request, (B,), in kv_indptr's dtype.

    A request has (pages - 1) * page_size + kv_last_page_len keys, with kv_last_page_len clamped to [0, page_size], or 0
    keys if it has no pages.

    kv_indptr: int32 or int64 (B + 1,), offsets of pages. kv_last_page_len: int32 or int64 (B,), on the same device.
    Raises TypeError for a dtype, ValueError for a shape, device or number. FlashInfer's function.

    >>> get_seq_lens(torch.tensor([0, 3, 3, 4]), torch.tensor([2, 5, 16]), 16)
    tensor([34,  0, 16])
    """
    _offsets("kv_indptr", kv_indptr)
    check_operand("kv_last_page_len", kv_last_page_len, 1, OFFSETS, kv_indptr.device, "that of kv_indptr")
    check_shape("kv_last_page_len", kv_last_page_len, (kv_indptr.shape[0] - 1,), "requests, one less than kv_indptr")
    size = _amount("page_size", page_size, 1)
    pages = kv_indptr.diff()
    last = kv_last_page_len.to(kv_indptr.dtype).clamp(0, size)
    return torch.where(pages > 0, (pages - 1) * size + last, 0)


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int, batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the request and the position of each of nnz appended rows: int32 (nnz,) each.

    Rows append_indptr[b]:append_indptr[b + 1] are the last keys of request b. Rows of no request get -1 and 0.

    append_indptr: int32 or int64 (B + 1,), rising. seq_lens: int32 or int64 (B,), keys of each request including these
    rows, on the same device. batch_indices, positions: tensors to write and return; None: new ones. Raises before
    anything is written: TypeError for a dtype, ValueError for a shape, device or number. FlashInfer's function.

    >>> get_batch_indices_positions(torch.tensor([0, 2, 3]), torch.tensor([5, 1]), 4)[1].tolist()
    [3, 4, 0, 0]
    """
    _offsets("append_indptr", append_indptr)
    device, batch = append_indptr.device, append_indptr.shape[0] - 1
    check_operand("seq_lens", seq_lens, 1, OFFSETS, device, "that of append_indptr")
    check_shape("seq_lens", seq_lens, (batch,), "requests, one less than append_indptr")
    nnz = _amount("nnz", nnz, 0)
    outputs = {"batch_indices": batch_indices, "positions": positions}
    for name, out in outputs.items():
        if out is not None:
            check_operand(name, out, 1, (torch.int32,), device, "that of append_indptr")
            check_shape(name, out, (nnz,), "nnz")
    given = {name: t for name, t in outputs.items() if t is not None}
    if not any(map(traced, given.values())):
        check_apart(given, {"append_indptr": append_indptr, "seq_lens": seq_lens})
    if batch:
        row, starts = torch.arange(nnz, device=device), append_indptr.to(torch.int64)
        # The last request that starts at or before the row. The clamp changes no result; it makes a tensor that is no
        # view, see `host.segments.segments_of`.
        request = torch.searchsorted(starts[:-1].clamp(min=0), row, right=True) - 1
        held = request.clamp(0, batch - 1)
        left = row - starts[1:][held]
        inside = (request >= 0) & (left < 0)
        request, position = torch.where(inside, held, -1), torch.where(inside, left + seq_lens[held], 0)
    else:
        request, position = torch.full((nnz,), -1, device=device), torch.zeros(nnz, device=device)
    return _stored(request, batch_indices), _stored(position, positions)


def _stored(found: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return found.to(torch.int32) if out is None else out.copy_(found)


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Write rows of K and V to a paged cache. The cache's page lists already count them.

    Args:
        append_key, append_value: (nnz, Hkv, D), of the cache's dtype, any strides, the last 1, such as views of one
            packed tensor. The caller converts rows for an fp8 cache (upstream reinterprets the bytes of other dtypes
            as fp8): `(k / k_scale).to(torch.float8_e4m3fn)`.
        batch_indices, positions: int32 or int64 (nnz,), as `get_batch_indices_positions` returns them.
        paged_kv_cache: (k, v), each (pages, P, Hkv, D) "NHD" or (pages, Hkv, P, D) "HND"; or one tensor
            (pages, 2, ...). Any P; if P is 1, its dimension may be missing. Any strides, the last 1, but elements may
            not overlap. K and V may differ in D. fp16, bf16, e4m3 or e5m2; or uint8 for packed NVFP4. A second call
            writes NVFP4's scale factors: its rows are factors (nnz, Hkv, D / 16), its cache is (k_scales, v_scales),
            both e4m3 or its bytes in uint8.
        kv_indices, kv_indptr: int32 or int64 (N,), (B + 1,). kv_last_page_len: int32 or int64 (B,), not read.

    A row is not written if its request is outside [0, B), if its position is negative or past its request's pages, or
    if its page is not in the cache; other rows are written whole. No value of any tensor makes the call access memory
    outside its tensors. If several rows have the same slot, each of its elements is that of one of them; K, V and each
    element choose independently.

    Raises before anything is written: TypeError for a dtype; ValueError for a shape, stride or device; an unknown
    kv_layout is both a KeyError and a ValueError. FlashInfer's function.

    >>> cache, k = torch.zeros(3, 2, 4, 1, 8).half(), torch.ones(2, 1, 8).half()  # 3 pages of 4 rows
    >>> pages, starts, last = torch.tensor([2, 0]), torch.tensor([0, 2]), torch.tensor([1])  # one request, 5 keys
    >>> append_paged_kv_cache(k, k, torch.tensor([0, 0]), torch.tensor([3, 4]), cache, pages, starts, last)
    >>> cache[..., 0, 0].nonzero().tolist()  # K and V of row 3 of page 2, and of row 0 of page 0
    [[0, 0, 0], [0, 1, 0], [2, 0, 3], [2, 1, 3]]
    """
    call, kv, sf = append_paged_call(
        append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
        kv_layout,
    )  # fmt: skip
    serve(call, kv, sf)


def append_paged_call(
    append_key: Any, append_value: Any, batch_indices: Any, positions: Any, paged_kv_cache: Any, kv_indices: Any,
    kv_indptr: Any, kv_last_page_len: Any, kv_layout: Any,
) -> Written:  # fmt: skip
    """Return the call of `append_paged_kv_cache`."""
    k, v = sides(CACHE, paged_kv_cache, kv_layout)
    call = CacheWriteCall(
        APPEND, append_key, append_value, k, v, kv_layout == "NHD", PAGES, None, batch_indices, positions, None,
        kv_indices, kv_indptr, kv_last_page_len,
    )  # fmt: skip
    return call, paged_kv_cache, None


def _nvfp4(
    call: CacheWriteCall, cache: Any, cache_sf: Any, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor,
    kv_layout: Any,
) -> Written:  # fmt: skip
    """Complete a call that quantises its rows. k_scale, v_scale: global dequantisation scales."""
    (k_cache, v_cache), (k_sf, v_sf) = sides(CACHE, cache, kv_layout), sides(CACHE_SF, cache_sf, kv_layout)
    k_factor, k_ptr = dequantisation_scale("k_scale", k_scale, call.k, "append_key", True)
    v_factor, v_ptr = dequantisation_scale("v_scale", v_scale, call.k, "append_key", True)
    call = call._replace(
        k_cache=k_cache, v_cache=v_cache, nhd=kv_layout == "NHD", k_sf=k_sf, v_sf=v_sf, k_scale=k_factor,
        v_scale=v_factor, k_scale_ptr=k_ptr, v_scale_ptr=v_ptr,
    )  # fmt: skip
    return call, cache, cache_sf


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Quantise rows of K and V to NVFP4 and write them to a paged cache.

    Rows that are already quantised go through that function: arguments that are not listed, and errors, are as in
    `append_paged_kv_cache`.

    Args:
        append_key, append_value: both fp16 or both bf16 (nnz, Hkv, D), D a multiple of 16.
        paged_kv_cache: uint8, last dimension D / 2. kv_cache_sf: e4m3, or its bytes in uint8, in the same layout, last
            dimension D / 16, linear.
        k_scale, v_scale: global dequantisation scales: value = code * sf * scale. A positive float, or an fp32
            tensor of one element: on the host it counts as a float, on CUDA its value is not read. `nvfp4_quantize`
            receives 1 / scale.

    >>> codes, sf = (torch.zeros(1, 2, 4, 1, n, dtype=torch.uint8) for n in (8, 1))  # a page of 4 rows
    >>> k, zero, one = torch.ones(1, 1, 16).half(), torch.tensor([0]), torch.tensor([1])
    >>> sf = sf.view(torch.float8_e4m3fn)
    >>> nvfp4_quantize_append_paged_kv_cache(
    ...     k, k, zero, zero, codes, sf, zero, torch.tensor([0, 1]), one, 1.0, 1.0
    ... )
    >>> nvfp4_dequantize(codes, sf)[0, 0, 0, 0, :2]
    tensor([1.0312, 1.0312])
    """
    call, kv, sf = nvfp4_append_call(
        append_key, append_value, batch_indices, positions, paged_kv_cache, kv_cache_sf, kv_indices, kv_indptr,
        kv_last_page_len, k_scale, v_scale, kv_layout,
    )  # fmt: skip
    serve(call, kv, sf)


def nvfp4_append_call(
    append_key: Any, append_value: Any, batch_indices: Any, positions: Any, paged_kv_cache: Any, kv_cache_sf: Any,
    kv_indices: Any, kv_indptr: Any, kv_last_page_len: Any, k_scale: Any, v_scale: Any, kv_layout: Any,
) -> Written:  # fmt: skip
    """Return the call of `nvfp4_quantize_append_paged_kv_cache`."""
    call = CacheWriteCall(
        NVFP4_APPEND, append_key, append_value, None, None, True, PAGES, None, batch_indices, positions, None,
        kv_indices, kv_indptr, kv_last_page_len,
    )  # fmt: skip
    return _nvfp4(call, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor, append_value: torch.Tensor, slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor], k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Quantise rows of K and V to NVFP4 and write them to given slots of a paged cache.

    slot_mapping: int32 or int64 (n,), page * P + row for each appended row. Rows with a negative slot, or one past the
    cache, are not written. append_key and append_value may have more than n rows; the rest is ignored. The other
    arguments, and errors, are as in `nvfp4_quantize_append_paged_kv_cache`. FlashInfer's function.

    >>> codes, sf = (torch.zeros(2, 2, 4, 1, n, dtype=torch.uint8) for n in (8, 1))  # 2 pages of 4 rows
    >>> k, sf = torch.ones(2, 1, 16).half(), sf.view(torch.float8_e4m3fn)
    >>> nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(k, k, torch.tensor([6, -1]), codes, sf, 1.0, 1.0)
    >>> codes.any(-1).nonzero().tolist()  # row 2 of page 1, K and V
    [[1, 0, 2, 0], [1, 1, 2, 0]]
    """
    call, kv, sf = nvfp4_slots_call(
        append_key, append_value, slot_mapping, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout
    )  # fmt: skip
    serve(call, kv, sf)


def nvfp4_slots_call(
    append_key: Any, append_value: Any, slot_mapping: Any, paged_kv_cache: Any, kv_cache_sf: Any, k_scale: Any,
    v_scale: Any, kv_layout: Any,
) -> Written:  # fmt: skip
    """Return the call of `nvfp4_quantize_append_paged_kv_cache_with_slot_mapping`."""
    call = CacheWriteCall(NVFP4_SLOTS, append_key, append_value, None, None, True, SLOTS, slot_mapping)
    return _nvfp4(call, paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout)
