"""Rows of K and V written to a cache, and of Q to a tensor, in plain torch: norm, rotary embedding, quantisation."""

from math import nan, pi
from typing import Any

import torch

from cute_kernels import dtypes
from cute_kernels.cache_write.args import (
    ANGLES,
    FROM_FIRST,
    INDICES,
    INTERLEAVED,
    PAGES,
    SLOTS,
    CacheWriteArgs,
    pack,
)
from cute_kernels.cache_write.spec import CacheWriteSpec

from .. import fp4

LARGEST = {getattr(torch, dtypes.TORCH[name]): most for name, most in dtypes.LARGEST.items()}
MOST = (1 << 31) - 1


def write_rows(spec: CacheWriteSpec, *flat: Any) -> None:
    """Do what a kernel of `spec` does with its arguments, in the order of `args.fields`; one of several rows with one
    place is written."""
    a = pack(spec, flat)
    if a.k.is_meta:  # there are no values
        return
    if a.nhd:  # as (pages, H, P, D) from here on
        views = {name: getattr(a, name) for name in ("k_cache", "v_cache", "k_sf", "v_sf")}
        a = a._replace(**{name: t.transpose(1, 2) for name, t in views.items() if t is not None})
    positions = request, position = token_positions(a, spec.transform and bool(a.rope & FROM_FIRST))
    places = page, row = token_places(a, *positions)
    written = (page >= 0) & (page < min(len(a.k_cache), len(a.v_cache)))
    rotated = torch.ones_like(written)
    if spec.transform:
        if a.kv_lens_out is not None and len(a.kv_lens_out):
            a.kv_lens_out.copy_(a.kv_lens + a.cu_seqlens.diff())
        rope = rope_positions(a, position)
        count = len(a.rope_table) or rotation_rows(a)
        rotated = (rope >= 0) & ((rope < count) | bool(a.rope & ANGLES)) | (count == 0)
        table = rotation(a, rope.where(rotated, 0))
        if a.q.shape[1]:
            values = transformed(a.q, a.q_weight, table, a)
            store_query(spec, a, values, rotated)
    written &= rotated
    for side in ("k", "v"):
        values, cache = getattr(a, side), getattr(a, f"{side}_cache")
        if not values.shape[1]:
            continue
        if side == "k" and spec.transform:
            values = transformed(values, a.k_weight, table, a)
        at = tuple(place[written] for place in places)
        store_rows(spec, a, side, cache, values[written.nonzero()[:, 0]], at)  # V may have other rows behind these


def index(a: Any, name: str) -> torch.Tensor:
    """Return an index tensor as int64, clamped."""
    values = getattr(a, name)
    values = values.view(torch.int64) if a.wide >> INDICES.index(name) & 1 else values.long()
    return values.clamp(-1, MOST)


def token_positions(a: Any, from_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the position of each token, -1 for none. from_first: kv_lens holds the position of the
    first token of each request."""
    tokens = torch.arange(len(a.k), device=a.k.device)
    none = torch.full_like(tokens, -1)
    if len(a.batch_indices):
        return index(a, "batch_indices"), index(a, "positions")
    starts, lens = index(a, "cu_seqlens"), index(a, "kv_lens")
    if len(starts) < 2:
        return none, none
    request = (torch.searchsorted(starts[1:].contiguous(), tokens, right=True)).clamp(max=len(lens) - 1)
    left = starts[1:][request] - tokens
    inside = (left > 0) & (tokens >= starts[request])
    position = lens[request] - left
    if from_first:
        position = lens[request] + tokens - starts[request]
        position = position.where((lens[request] >= 0) & (position <= MOST), -1)
    return torch.where(inside, request, -1), torch.where(inside, position, -1)


def token_places(a: Any, request: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page and the row of each token; a page outside the cache for none."""
    tokens, size = torch.arange(len(a.k), device=a.k.device), a.k_cache.shape[2]
    if a.places == SLOTS:
        slots = index(a, "slots")[: len(tokens)]
        slot = torch.cat([slots, slots.new_full((len(tokens) - len(slots),), -1)])
        return slot.div(size, rounding_mode="floor"), slot.remainder(size)
    if a.places != PAGES:
        return torch.where(tokens < size, 0, -1), tokens
    table = index(a, "kv_indices")[None] if len(a.kv_indptr) else index(a, "page_table")
    column, entries = position.div(size, rounding_mode="floor"), table.shape[1]
    if not table.numel() or a.kv_indptr.numel() == 1 + (
        a.wide >> INDICES.index("kv_indptr") & 1
    ):  # no entry, no request
        return torch.full_like(tokens, -1), torch.zeros_like(tokens)
    if len(a.kv_indptr):
        starts = index(a, "kv_indptr").clamp(0, entries)
        requests = len(starts) - 1
        held = request.clamp(0, requests - 1)
        begin, end, line = starts[:-1][held], starts[1:][held], torch.zeros_like(held)
    else:
        requests = len(table)
        line = request.clamp(0, requests - 1)
        begin, end = torch.zeros_like(line), torch.full_like(line, entries)
    fits = (request >= 0) & (request < requests) & (position >= 0) & (column < end - begin)
    entry = (begin + column).clamp(0, max(entries - 1, 0)).where(fits, 0)
    page = table[line, entry]
    return torch.where(fits, page, -1), position.remainder(size)


def rope_positions(a: Any, position: torch.Tensor) -> torch.Tensor:
    if not len(a.rope_positions):
        return position
    given = index(a, "rope_positions")[: len(a.k)]
    return torch.cat([given, given.new_full((len(a.k) - len(given),), -1)])


def rotation_rows(a: CacheWriteArgs) -> int:
    """Return the positions of which two tables of 16 bits have cosines and sines."""
    return 0 if a.rope_cos is None else len(a.rope_cos)


def rotation(a: CacheWriteArgs, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return cosines and sines (N, 1, R / 2); None if nothing is rotated."""
    if rotation_rows(a):
        return a.rope_cos[position].float()[:, None], a.rope_sin[position].float()[:, None]
    if not len(a.rope_table):
        return None
    if a.rope & ANGLES:
        turns = position[:, None].float().double() * a.rope_table.double().unflatten(1, (2, -1)).sum(1)
        radians = (turns - turns.round()) * (2 * pi)
        return radians.cos().float()[:, None], radians.sin().float()[:, None]
    cos, sin = a.rope_table[position].chunk(2, 1)
    return cos[:, None], sin[:, None]


def transformed(
    x: torch.Tensor, weight: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor] | None, a: CacheWriteArgs
) -> torch.Tensor:
    """Return x (N, H, D), normalised and rotated, in fp32."""
    x = x.float()
    if len(weight):
        weight = weight.view(-1, x.shape[2])
        x = x * (x.square().mean(-1, keepdim=True) + a.norm_eps).rsqrt() * (weight.float() + a.norm_offset)
    if table is None:
        return x
    cos, sin = table
    half = cos.shape[-1]
    if a.rope & INTERLEAVED:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, -1).flatten(-2) if a.rope & INTERLEAVED else torch.cat(pair, -1)
    return torch.cat([turned, x[..., 2 * half :]], -1)


def row_scales(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each row of x (N, H, D), (N, H): normal numbers; NaN does not count."""
    limits = torch.finfo(torch.float32)
    top = x.float().abs().nan_to_num(0.0, limits.max).amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:2]).float()
    return (top / LARGEST[dtype]).clamp(min=limits.tiny)


def narrowed(x: torch.Tensor, scale: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return x (N, H, D) divided by a scale, a number or one per row, per head or for all, saturated. NaN stays NaN; in
    int8 it becomes 0."""
    if isinstance(scale, torch.Tensor):
        scale = scale[..., None]
    else:
        scale = torch.tensor(scale, dtype=torch.float32)  # a number divides as fp32
    most, quotient = LARGEST[dtype], x.float() / scale
    if dtype == torch.int8:
        return quotient.nan_to_num(0.0).round().clamp(-most - 1, most).to(dtype)
    return quotient.clamp(-most, most).masked_fill(quotient.isnan(), nan).to(dtype)  # one NaN, whatever x's bits


def store_query(spec: CacheWriteSpec, a: CacheWriteArgs, values: torch.Tensor, written: torch.Tensor) -> None:
    if len(a.q_out):
        a.q_out[written] = values[written].to(a.q_out.dtype)
    elif spec.quantised and len(a.q_fp8):
        scale = a.q_scale_ptr if len(a.q_scale_ptr) else a.q_scale
        found = narrowed(values[written], scale, a.q_fp8.dtype)
        a.q_fp8.view(torch.uint8)[written] = found.view(torch.uint8)  # torch indexes no fp8 on the CPU


def store_rows(
    spec: CacheWriteSpec, a: CacheWriteArgs, side: str, cache: torch.Tensor, values: torch.Tensor, at: Any
) -> None:
    """Write values (n, H, D) to rows `at` of a cache (pages, H, P, D). at: their pages and rows."""
    if not spec.quantised:
        put(cache, at, values.to(cache.dtype))
        return
    if spec.by_token:
        scales = row_scales(values, cache.dtype)
        put(cache, at, narrowed(values, scales, cache.dtype))
        put(getattr(a, f"{side}_sf"), at, scales.contiguous()[..., None].view(torch.uint8))
        return
    scale, tensor = getattr(a, f"{side}_scale"), getattr(a, f"{side}_scale_ptr")
    if spec.cache != "nvfp4":
        put(cache, at, narrowed(values, tensor if len(tensor) else scale, cache.dtype))
        return
    by_head = [one if a.scales_multiply else 1.0 / one for one in tensor] if len(tensor) else [scale]
    found = [
        fp4.nvfp4_quantize(part, one) for part, one in zip(values.split(values.shape[1] // len(by_head), 1), by_head)
    ]
    put(cache, at, torch.cat([codes for codes, _ in found], 1))
    factors = torch.cat([factor.view(torch.uint8) for _, factor in found], 1)
    if side == "v" and a.v_sf_interleaved:
        put_interleaved(a.v_sf, at, factors)
    else:
        put(getattr(a, f"{side}_sf"), at, factors)


def put(cache: torch.Tensor, at: Any, rows: torch.Tensor) -> None:
    page, row = at
    if cache.element_size() == 1:  # torch indexes no fp8 on the CPU
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache.transpose(1, 2)[page, row] = rows


def put_interleaved(sf: torch.Tensor, at: Any, factors: torch.Tensor) -> None:
    """Write factors (n, H, S) to sf (pages, H, P, S), in which block s of row t is element 4 s + t % 4 of the 4 S
    elements of its 4 rows."""
    page, row = at
    columns = factors.shape[2]
    element = 4 * torch.arange(columns, device=sf.device) + row[:, None] % 4
    down = (row - row % 4)[:, None] + element.div(columns, rounding_mode="floor")
    heads = torch.arange(sf.shape[1], device=sf.device)[None, :, None]
    sf[page[:, None, None], heads, down[:, None], element.remainder(columns)[:, None]] = factors
