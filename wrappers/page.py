"""Write to paged KV caches, as FlashInfer's `page` does.

Plain torch operations, on CPU and CUDA: nothing waits for the device, and all functions can be captured in a CUDA
graph.

Request b's pages are kv_indices[kv_indptr[b]:kv_indptr[b + 1]]. Its keys fill them in order, with kv_last_page_len[b]
keys in the last page. Appended row i is key positions[i] of request batch_indices[i]:

    kv_len = get_seq_lens(kv_indptr, kv_last_page_len, page_size)  # includes the rows to append
    batch_indices, positions = get_batch_indices_positions(append_indptr, kv_len, nnz)
    append_paged_kv_cache(k, v, batch_indices, positions, cache, kv_indices, kv_indptr, kv_last_page_len)

All functions raise before anything is written: TypeError for a type or dtype; ValueError for a shape, stride, device or
number; an error that is both a KeyError and a ValueError for an unknown kv_layout; RuntimeError for a tensor that
requires grad, in grad mode.
"""

from typing import Any, NamedTuple

import torch

from .attention.call import pair
from .checks import INF, check_apart, check_integer, check_one_of, check_operand, check_shape, check_strided
from .fp4 import BLOCK, SCALE_TYPES, as_e4m3, nvfp4_quantize
from .plain import refuse_grad, traced
from .scalars import integer, scale_of

__all__ = [
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]
OFFSETS = (torch.int32, torch.int64)
E4M3 = torch.float8_e4m3fn
STORED = (torch.float16, torch.bfloat16, E4M3, torch.float8_e5m2, torch.uint8)  # dtypes of a cache
CACHE, CACHE_SF = "paged_kv_cache", "kv_cache_sf"


class AppendedRows(NamedTuple):
    """The request and position of each appended row, and the page lists, as the caller gives them."""

    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor


class CacheSlots(NamedTuple):
    """Destinations in the cache: row source[i] goes to entry[i] of page[i].

    A row without a destination is replaced by one that has one, which is then written more than once. any: bool (),
    whether at least one row has a destination; if none has, the old bytes are to be written.
    """

    source: torch.Tensor
    page: torch.Tensor
    entry: torch.Tensor
    any: torch.Tensor


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
    _apart(given, {"append_indptr": append_indptr, "seq_lens": seq_lens})
    if batch:
        row, starts = torch.arange(nnz, device=device), append_indptr.to(torch.int64)
        request = torch.searchsorted(starts[:-1], row, right=True) - 1  # the last one that starts at or before the row
        held = request.clamp(0, batch - 1)
        left = row - starts[1:][held]
        inside = (request >= 0) & (left < 0)
        request, position = torch.where(inside, held, -1), torch.where(inside, left + seq_lens[held], 0)
    else:
        request, position = torch.full((nnz,), -1, device=device), torch.zeros(nnz, device=device)
    return _stored(request, batch_indices), _stored(position, positions)


def _stored(found: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return found.to(torch.int32) if out is None else out.copy_(found)


def paged_kv(name: str, value: Any, layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as (pages, Hkv, P, D) views, as `attention.call.pair` does; a P of 1 may be missing."""
    lone = -3 if layout == "NHD" else -2
    if isinstance(value, torch.Tensor):
        value = value.unsqueeze(lone) if value.ndim == 4 and value.layout is torch.strided else value
    elif isinstance(value, (tuple, list)) and layout == "NHD" and all(map(_are_rows, value)):
        layout, value = "HND", [t.unsqueeze(2) for t in value]  # saves one of two operations
    elif isinstance(value, (tuple, list)):
        value = [t.unsqueeze(lone) if _are_rows(t) else t for t in value]
    return pair(name, value, layout)


def _are_rows(t: Any) -> bool:
    """Report whether t holds keys or values of pages with one row, without the dimension of P."""
    return isinstance(t, torch.Tensor) and t.ndim == 3 and t.layout is torch.strided


def _caches(name: str, value: Any, layout: Any, dtypes: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Return K and V by name, as (pages, P, Hkv, D) views, after a check."""
    k, v = paged_kv(name, value, layout)
    if name == CACHE_SF:
        k, v = as_e4m3(k), as_e4m3(v)
    for side, t in (("K", k), ("V", v)):
        check_one_of(f"{name} ({side}): dtype", check_strided(f"{name} ({side})", t, 4).dtype, dtypes)
        if t.device != device:
            raise ValueError(f"{name} ({side}): device {t.device}, must be that of append_key, {device}")
    if k.dtype != v.dtype:
        raise TypeError(f"{name}: K is {k.dtype} and V {v.dtype}, must be the same")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"{name}: K {tuple(k.shape)} and V {tuple(v.shape)} may differ in the first and last dimension only"
        )
    return {f"{name} (K)": k.transpose(1, 2), f"{name} (V)": v.transpose(1, 2)}


def _appended(append_key: Any, append_value: Any, caches: dict[str, torch.Tensor], packed: int) -> None:
    """Check that the rows fit the caches, an element of which holds `packed` values."""
    for (name, t), (cache_name, cache) in zip(
        (("append_key", append_key), ("append_value", append_value)), caches.items(), strict=True
    ):
        shape = (append_key.shape[0], cache.shape[2], cache.shape[3] * packed)
        check_shape(name, t, shape, f"rows, heads and head_dim of {cache_name}")
        if t.device != append_key.device:
            raise ValueError(f"{name}: device {t.device}, must be that of append_key, {append_key.device}")


def _apart(outputs: dict[str, torch.Tensor], inputs: dict[str, Any]) -> None:
    """Call `check_apart` unless the outputs have no memory of their own."""
    if not any(map(traced, outputs.values())):
        check_apart(outputs, inputs)


def _slots(rows: AppendedRows, nnz: int, pages: int, size: int, device: torch.device) -> CacheSlots | None:
    """Return the destinations of nnz rows in caches of `pages` pages of `size` keys; None if no row can have one."""
    for name, t in rows._asdict().items():
        check_operand(name, t, 1, OFFSETS, device, "that of append_key")
    check_shape("batch_indices", rows.batch_indices, (nnz,), "rows of append_key")
    check_shape("positions", rows.positions, (nnz,), "rows of append_key")
    batch = _offsets("kv_indptr", rows.kv_indptr).shape[0] - 1
    check_shape("kv_last_page_len", rows.kv_last_page_len, (batch,), "requests, one less than kv_indptr")
    entries = rows.kv_indices.shape[0]
    if not (nnz and batch and entries and pages):
        return None
    request, position = rows.batch_indices.to(torch.int64), rows.positions.to(torch.int64)
    fits = (request >= 0) & (request < batch) & (position >= 0)
    request = request.clamp(0, batch - 1)
    starts = rows.kv_indptr.to(torch.int64).clamp(0, entries)
    start, column = starts[:-1][request], position.div(size, rounding_mode="floor")
    fits &= column < starts[1:][request] - start
    page = rows.kv_indices[(start + column).clamp(0, entries - 1)].to(torch.int64)
    fits &= (page >= 0) & (page < pages)
    first = fits.to(torch.uint8).argmax()
    source = torch.where(fits, torch.arange(nnz, device=device), first)
    return CacheSlots(source, page.clamp(0, pages - 1)[source], position.remainder(size)[source], fits.any())


def _write(cache: torch.Tensor, rows: torch.Tensor, slots: CacheSlots) -> None:
    """Write rows (nnz, Hkv, D) to cache (pages, P, Hkv, D) of the same dtype."""
    if cache.element_size() == 1:  # torch indexes no fp8 on CPU
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    old = cache[slots.page[:1], slots.entry[:1]]
    cache.index_put_((slots.page, slots.entry), torch.where(slots.any, rows[slots.source], old))


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Write rows of K and V to a paged cache. The cache's page lists already count them.

    Args:
        append_key, append_value: (nnz, Hkv, D), of the cache's dtype, any strides. The caller converts rows for an fp8
            cache (upstream reinterprets the bytes of other dtypes as fp8): `(k / k_scale).to(torch.float8_e4m3fn)`.
        batch_indices, positions: int32 or int64 (nnz,), as `get_batch_indices_positions` returns them.
        paged_kv_cache: (k, v), each (pages, P, Hkv, D) "NHD" or (pages, Hkv, P, D) "HND"; or one tensor
            (pages, 2, ...). Any P; if P is 1, its dimension may be missing. Any strides, but elements may not overlap.
            K and V may differ in D. fp16, bf16, e4m3 or e5m2; or uint8 for packed NVFP4. A second call writes NVFP4's
            scale factors: its rows are factors (nnz, Hkv, D / 16), its cache is (k_scales, v_scales), both e4m3 or its
            bytes in uint8.
        kv_indices, kv_indptr: int32 or int64 (N,), (B + 1,). kv_last_page_len: int32 or int64 (B,), not read.

    A row is not written if its request is outside [0, B), if its position is negative or past its request's pages, or
    if its page is not in the cache. No value of any tensor makes the call access memory outside its tensors. If no row
    is written, one key of the cache is rewritten with its own bytes. If several rows have the same slot, one of them is
    written; K, V and each element choose independently.

    Raises before anything is written: TypeError for a dtype; ValueError for a shape, stride or device; an unknown
    kv_layout is both a KeyError and a ValueError. FlashInfer's function.

    >>> cache, k = torch.zeros(3, 2, 4, 1, 8).half(), torch.ones(2, 1, 8).half()  # 3 pages of 4 rows
    >>> pages, starts, last = torch.tensor([2, 0]), torch.tensor([0, 2]), torch.tensor([1])  # one request, 5 keys
    >>> append_paged_kv_cache(k, k, torch.tensor([0, 0]), torch.tensor([3, 4]), cache, pages, starts, last)
    >>> cache[..., 0, 0].nonzero().tolist()  # K and V of row 3 of page 2, and of row 0 of page 0
    [[0, 0, 0], [0, 1, 0], [2, 0, 3], [2, 1, 3]]
    """
    for name, t in (("append_key", append_key), ("append_value", append_value)):
        check_one_of(f"{name}: dtype", check_strided(name, t, 3).dtype, STORED)
    caches = _caches(CACHE, paged_kv_cache, kv_layout, STORED, append_key.device)
    k, v = caches.values()
    _appended(append_key, append_value, caches, 1)
    for name, t in (("append_key", append_key), ("append_value", append_value)):
        if t.dtype != k.dtype and not {t.dtype, k.dtype} <= {*SCALE_TYPES}:
            raise TypeError(f"{name}: dtype {t.dtype}, must be that of {CACHE}, {k.dtype}; convert it before the call")
    rows = AppendedRows(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    slots = _slots(rows, append_key.shape[0], min(k.shape[0], v.shape[0]), k.shape[1], append_key.device)
    given: dict[str, Any] = {"append_key": append_key, "append_value": append_value}
    refuse_grad(given | caches)
    _apart(caches, given | rows._asdict())
    if slots is not None:
        _write(k, append_key, slots)
        _write(v, append_value, slots)


def _inverse(name: str, scale: Any, device: torch.device) -> Any:
    """Return 1 / scale for a positive float or an fp32 tensor of one element."""
    if scale.__class__ is float and 0 < scale < INF:
        return 1.0 / scale
    number, tensor = scale_of(name, scale, device, "that of append_key", positive=True)
    return 1.0 / (number if tensor is None else tensor)


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Quantise rows of K and V to NVFP4 and write them to a paged cache.

    Rows that are already quantised go through `append_paged_kv_cache`. Arguments that are not listed, and errors, are
    as in that function.

    Args:
        append_key, append_value: fp16 or bf16 (nnz, Hkv, D), D a multiple of 16.
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
    for name, t in (("append_key", append_key), ("append_value", append_value)):
        check_one_of(f"{name}: dtype", check_strided(name, t, 3).dtype, (torch.float16, torch.bfloat16))
        if t.shape[2] % BLOCK:
            raise ValueError(f"{name}: shape {tuple(t.shape)}, the last dimension must be a multiple of {BLOCK}")
    device = append_key.device
    caches = _caches(CACHE, paged_kv_cache, kv_layout, (torch.uint8,), device)
    cache_sfs = _caches(CACHE_SF, kv_cache_sf, kv_layout, SCALE_TYPES, device)
    _appended(append_key, append_value, caches, 2)
    for (name, cache), (sf_name, sf) in zip(caches.items(), cache_sfs.items(), strict=True):
        shape = (*cache.shape[:3], cache.shape[3] * 2 // BLOCK)
        check_shape(sf_name, sf, shape, f"pages, P and Hkv of {name}, and one factor for {BLOCK} values")
    scales = _inverse("k_scale", k_scale, device), _inverse("v_scale", v_scale, device)
    k, v = caches.values()
    rows = AppendedRows(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    slots = _slots(rows, append_key.shape[0], min(k.shape[0], v.shape[0]), k.shape[1], device)
    given: dict[str, Any] = {"append_key": append_key, "append_value": append_value}
    refuse_grad(given)
    _apart(caches | cache_sfs, given | rows._asdict())
    if slots is None:
        return
    for values, scale, cache, cache_sf in zip(given.values(), scales, caches.values(), cache_sfs.values(), strict=True):
        data, sf = nvfp4_quantize(values, scale)
        _write(cache, data, slots)
        _write(cache_sf, sf, slots)


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
    check_operand("slot_mapping", slot_mapping, 1, OFFSETS, None)
    rows = slot_mapping.shape[0]
    for name, t in (("append_key", append_key), ("append_value", append_value)):
        if check_strided(name, t, 3).shape[0] < rows:
            raise ValueError(f"{name}: {t.shape[0]} rows, must be at least the {rows} of slot_mapping")
        if t.device != slot_mapping.device:
            raise ValueError(f"slot_mapping: device {slot_mapping.device}, must be that of {name}, {t.device}")
    caches = _caches(CACHE, paged_kv_cache, kv_layout, (torch.uint8,), append_key.device)
    pages = min(cache.shape[0] for cache in caches.values())
    index = torch.arange(pages, device=slot_mapping.device)  # one request owns all pages, in their order
    ends = torch.arange(2, device=slot_mapping.device) * pages
    nvfp4_quantize_append_paged_kv_cache(
        append_key[:rows], append_value[:rows], torch.where(slot_mapping < 0, -1, 0), slot_mapping, paged_kv_cache,
        kv_cache_sf, index, ends, ends[:1], k_scale, v_scale, kv_layout,
    )  # fmt: skip
