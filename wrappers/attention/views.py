"""Views of a caller's K and V in the forms that an `AttentionCall` has: pages of all requests, or rows."""

from typing import Any

import torch

from ..host.checks import UnknownName, check_operand, check_shape, check_strided
from ..host.plain import traced
from ..host.scratch import constant, filled, pages_in_order, steps

_Tensor, _strided = torch.Tensor, torch.strided
VIEWED_PAGES = 64, 32, 16, 8  # page sizes that TMA fetches, for reading a cache without a table


def pair(name: str, value: Any, layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as (pages, Hkv, P, D) views.

    value: (k, v), each (pages, Hkv, P, D) "HND" or (pages, P, Hkv, D) "NHD"; or one tensor (pages, 1 or 2, ...) of
    both.
    """
    if layout != "HND" and layout != "NHD":
        raise UnknownName(f"kv_layout: {layout!r}, must be 'HND' or 'NHD'")
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{name}: a tuple of {len(value)}, must be (k, v)")
        k, v = value
        if layout == "NHD" and not (isinstance(k, _Tensor) and isinstance(v, _Tensor) and k.dim() == v.dim() == 4):
            check_strided(f"{name} (K)", k, 4)
            check_strided(f"{name} (V)", v, 4)
        return (k, v) if layout == "HND" else (k.transpose(1, 2), v.transpose(1, 2))
    shape = value.shape if isinstance(value, _Tensor) else ()
    if len(shape) != 5 or shape[1] not in (1, 2) or value.layout is not _strided:
        check_strided(name, value, 5)
        raise ValueError(f"{name}: shape {tuple(value.shape)}, the second dimension must be 1 or 2")
    value = value.transpose(2, 3) if layout == "NHD" else value
    if shape[1] == 1:
        k = value.select(1, 0)
        return k, k
    k, v = value.unbind(1)
    return k, v


def scale_pair(name: str, value: Any, layout: Any, views: Any = pair) -> tuple[Any, Any]:
    """Return scale factors of K and V as `views` returns K and V, (pages, Hkv, P, D / 16) or, of rows, (pages, Hkv, P).

    value: (k, v) or one tensor, in the form and the layout of the cache; None: (None, None).
    """
    if value is None:
        return None, None
    stacked, both = isinstance(value, _Tensor), isinstance(value, (tuple, list))
    first = value if stacked else value[0] if both and len(value) else None
    if not isinstance(first, _Tensor) or first.dtype is not torch.float32 or first.ndim > 3 + stacked:
        return views(name, value, layout)
    value = value.unsqueeze(-1) if stacked else [t.unsqueeze(-1) if isinstance(t, _Tensor) else t for t in value]
    k, v = views(name, value, layout)
    return k.squeeze(-1), v.squeeze(-1)


def paged_kv(name: str, value: Any, layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as (pages, Hkv, P, D) views, as `pair` does; a P of 1 may be missing."""
    lone = -3 if layout == "NHD" else -2
    if isinstance(value, torch.Tensor):
        value = value.unsqueeze(lone) if value.ndim == 4 and value.layout is torch.strided else value
    elif isinstance(value, (tuple, list)) and layout == "NHD" and all(map(_are_rows, value)):
        layout, value = "HND", [t.unsqueeze(2) for t in value]  # saves one of two operations
    elif isinstance(value, (tuple, list)):
        value = [t.unsqueeze(lone) if _are_rows(t) else t for t in value]
    return pair(name, value, layout)


def sides(name: str, value: Any, layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a cache in its layout; a P of 1 may be missing. One torch operation, or none for (k, v)."""
    if layout in ("NHD", "HND"):
        if value.__class__ is tuple and len(value) == 2:
            k, v = value
            if k.__class__ is torch.Tensor and v.__class__ is torch.Tensor and k.dim() == v.dim() == 4:
                return k, v
        elif value.__class__ is torch.Tensor and value.dim() == 5 and value.shape[1] == 2:
            k, v = value.unbind(1)
            return k, v
    k, v = paged_kv(name, value, layout)
    return (k.transpose(1, 2), v.transpose(1, 2)) if layout == "NHD" else (k, v)


def scale_sides(name: str, value: Any, layout: Any) -> tuple[Any, Any]:
    """Return scale factors of K and V as `sides` returns K and V; those of rows lack the last dimension."""
    return scale_pair(name, value, layout, sides)


def _are_rows(t: Any) -> bool:
    """Report whether t holds keys or values of pages with one row, without the dimension of P."""
    return isinstance(t, torch.Tensor) and t.ndim == 3 and t.layout is torch.strided


def rows_of(name: str, t: Any, layout: str) -> torch.Tensor:
    """Return rows of K or V in the form of an `AttentionCall`: (1, Hkv, rows, D).

    t: (rows, Hkv, D) "NHD" or (Hkv, rows, D) "HND".
    """
    check_strided(name, t, 3)
    if layout == "HND":
        return t.unsqueeze(0)
    if traced(t):
        return t.transpose(0, 1).unsqueeze(0)
    (rows, heads, dim), (row, head, one) = t.shape, t.stride()
    return t.as_strided((1, heads, rows, dim), (heads * head, head, row, one))  # one operation saves 0.5 us


def columns_and_rope(t: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return views of the first columns of t and of the others, None if there are no others."""
    if t.shape[-1] == columns:
        return t, None
    first, rest = t.split_with_sizes((columns, t.shape[-1] - columns), -1)
    return first, rest


def counts_of(slots: torch.Tensor, lens: Any, entries: int, plain: bool) -> Any:
    """Return lens or, if it is None, so many entries with the number of all columns of slots (T, K)."""
    return constant(filled, slots.device, plain, entries, slots.shape[1]) if lens is None else lens


def without_table(
    k: Any, v: Any, entries: torch.Tensor | None, batch: int, plain: bool,
    names: tuple[str, str] = ("k_cache", "v_cache"), sizes: tuple[int, ...] = VIEWED_PAGES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return K and V (batch, N, Hkv, D) as (pages, P, Hkv, D) views, and their page table int32 (B, N / P).

    sizes: choices of P if batch and rows have one stride.
    """
    for name, t in zip(names, (k, v), strict=True):
        check_strided(name, t, 4)
    check_shape(names[1], v, (*k.shape[:3], v.shape[3]), f"{names[0]}'s, except for the last dimension")
    count, rows = k.shape[:2]
    if entries is not None:
        check_operand("cache_batch_idx", entries, 1, (torch.int32,), k.device, f"that of {names[0]}")
        check_shape("cache_batch_idx", entries, (batch,), "one per request of q")
    elif count != batch:
        raise ValueError(f"{names[0]}: shape {tuple(k.shape)}, must have the {batch} requests of q")
    size = rows
    if count <= 1 or not rows or all(t.stride(0) == rows * t.stride(1) for t in (k, v)):
        size = next((p for p in sizes if rows % p == 0), rows)
        paged = count * rows // size if size else 0, size
        k, v = k.view(*paged, *k.shape[2:]), v.view(*paged, *v.shape[2:])
    pages = rows // size if size else 0
    if entries is not None:
        return k, v, entries[:, None] * pages + constant(steps, k.device, plain, pages, 1)
    if plain:
        return k, v, constant(pages_in_order, k.device, plain, batch, pages)
    return k, v, steps(k.device, batch * pages, 1).view(batch, pages)


def alias(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of another one that is no view of it, so that this may be freed."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        t.untyped_storage(), t.storage_offset(), t.shape, t.stride()
    )
