"""Q and K of an attention call, rotated to new tensors, in plain torch: what a kernel with `gather` does."""

from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write.args import CacheWriteArgs, pack
from cute_kernels.cache_write.spec import CacheWriteSpec

from .cache_write import rotation, transformed


class EntryTable(NamedTuple):
    """The entries of all requests, one after another: request (-1: none), number in it, and page of each."""

    request: torch.Tensor
    column: torch.Tensor
    page: torch.Tensor


def gather_rows(spec: CacheWriteSpec, *flat: Any) -> None:
    """Do what a kernel of `spec` does with its arguments, in the order of `args.fields`."""
    a = pack(spec, flat)
    if a.q.is_meta:  # there are no values
        return
    if not a.nhd:
        a = a._replace(k_cache=a.k_cache.transpose(1, 2))  # (pages, P, H, D)
    size = a.k_cache.shape[1]
    entries = entry_table(a, len(a.k) // size)
    counts = key_counts(a, size, len(a.k) // size)
    token = torch.arange(len(a.q), device=a.q.device)
    request = owners(a.cu_seqlens, token)
    ends = a.cu_seqlens.long().clamp(max=len(a.q))[1:]
    position = (counts[request] - ends[request] + token).masked_fill(request < 0, 0)
    a.q_out.copy_(transformed(a.q, a.q_weight, rotation(a, position), a))
    inside = (entries.page >= 0) & (entries.page < len(a.k_cache))
    if a.tables.shape[2]:
        number = torch.arange(len(inside), device=a.k.device).where(inside, -1)
        a.tables_out[:, 0].copy_(number.view(a.tables_out[:, 0].shape))
        a.tables_out[:, 1].copy_(a.tables[:, 1])
    if len(a.k_cache):
        write_keys(a, entries, inside, counts)


def write_keys(a: CacheWriteArgs, entries: EntryTable, inside: torch.Tensor, counts: torch.Tensor) -> None:
    """Write the rows of K that requests have. inside: whether the cache has the page of an entry."""
    size = a.k_cache.shape[1]
    position = entries.column[:, None] * size + torch.arange(size, device=a.k.device)
    known = (inside & (entries.request >= 0))[:, None] & (position < counts[entries.request][:, None])
    number, row = known.nonzero(as_tuple=True)
    found = a.k_cache[entries.page[number], row]
    a.k[number * size + row] = transformed(found, a.k_weight, rotation(a, position[number, row]), a).to(a.k.dtype)


def owners(offsets: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the request with offsets[b] <= x < offsets[b + 1] of each x, -1 for none, by bisection as the kernel."""
    low, high = torch.zeros_like(x), torch.full_like(x, len(offsets) - 1)
    for _ in range(len(offsets).bit_length()):
        middle, apart = (low + high) >> 1, high - low > 1
        begins = offsets[middle] <= x
        low, high = middle.where(apart & begins, low), middle.where(apart & ~begins, high)
    return low.where((offsets[low] <= x) & (x < offsets[low + 1]), -1)


def entry_table(a: CacheWriteArgs, count: int) -> EntryTable:
    number, columns = torch.arange(count, device=a.k.device), a.tables.shape[2]
    page = a.tables[:, 0].reshape(-1).long() if columns else number
    if not len(a.kv_indptr):
        request = number.div(columns, rounding_mode="floor") if columns else number
        return EntryTable(request, number - request * columns, page)
    request = owners(a.kv_indptr, number)
    column = number - a.kv_indptr.long().clamp(min=0)[request]
    return EntryTable(request, column.masked_fill(request < 0, 0), page)


def key_counts(a: CacheWriteArgs, size: int, entries: int) -> torch.Tensor:
    """Return the number of keys of each request, clamped as attention kernels clamp it."""
    if len(a.kv_indptr):
        pages = a.kv_indptr.long().clamp(0, entries).diff()
        last = a.kv_lens.long().clamp(0, size) if len(a.kv_lens) else size
        found = ((pages - 1) * size + last).masked_fill(pages <= 0, 0)
    else:
        found = a.kv_lens.long().clamp(0, a.tables.shape[2] * size)
    return found if len(a.k_cache) else torch.zeros_like(found)
