"""Rows of latent attention written to a cache, and read from it, in plain torch."""

from math import nan
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from cute_kernels.latent.args import INTERLEAVED, LatentArgs, indexer_args, pack, pack_read
from cute_kernels.latent.spec import LatentSpec, ReadSpec
from cute_kernels.records import BYTES, INDEX, RECORDS, LatentRecord

from .. import fp4
from .cache_write import narrowed, rope_positions, token_places, token_positions

E4M3, BYTE = torch.float8_e4m3fn, torch.uint8
LEAST_POWER = LEAST_MAGNITUDE = 1e-4
LEAST_QUERY, LEAST_E2M1 = 1e-10, 2.0**-9
E2M1_MAX = 6.0


class RowBytes(NamedTuple):
    """Rows of a cache, (n, bytes). factors: those of planar records; rotated: of a cache of their own."""

    row: torch.Tensor
    factors: torch.Tensor | None = None
    rotated: torch.Tensor | None = None


def power_above(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two that is at least x, normal positive numbers."""
    return ((x.contiguous().view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def largest(blocks: torch.Tensor) -> torch.Tensor:
    """Return the largest finite magnitude of the last dimension; NaN does not count."""
    return blocks.abs().nan_to_num(0.0, torch.finfo(torch.float32).max).amax(-1)


def e4m3_scales(form: LatentRecord, index: bool, power_of_two: bool, top: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks with these largest magnitudes."""
    scale = (top.clamp(min=LEAST_MAGNITUDE) if index else top) / fp4.E4M3_MAX
    least = torch.finfo(torch.float32).tiny
    if form.factor == "ue8m0" or power_of_two:
        return power_above(scale.clamp(min=least if index else LEAST_POWER))
    return scale.clamp(min=least)


def e2m1_factors(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scale factors (e4m3) of blocks of 16 values: the largest magnitude over 6, rounded up."""
    exact = (blocks.abs().amax(-1) / E2M1_MAX).clamp(min=LEAST_E2M1)
    exact = exact.masked_fill(blocks.isnan().any(-1), nan)
    byte = fp4.e4m3(exact).view(BYTE)
    low = (byte.view(E4M3).float() < exact) & (byte < 0x7E)
    return (byte + low.to(BYTE)).view(E4M3)


def permutation(count: int) -> torch.Tensor:
    """Return the place of each factor (`LatentRecord.permuted`)."""
    s = torch.arange(count)
    return 8 * (s % 4) + s // 4


def write_latent(spec: LatentSpec, *flat: Any) -> None:
    """Do what a kernel of `spec` does with its arguments, in the order of `args.fields`."""
    a = pack(spec, flat)
    if a.kv.is_meta:  # there are no values
        return
    write_rows_of(spec, a)
    if spec.joined:
        write_rows_of(spec.indexer, indexer_args(a))


def write_rows_of(spec: LatentSpec, a: LatentArgs) -> None:
    """Write the keys and the queries of a launch, of the latent or of its indexer."""
    queries = a.q if spec.index else a.q_pe
    tokens = max(len(a.kv), len(queries))
    count = torch.empty(tokens, 0, device=a.kv.device)
    at: Any = SimpleNamespace(**a._asdict() | {"k": count, "k_cache": a.cache[:, None]})
    positions = _, position = token_positions(at, False)
    page, row = token_places(at, *positions)
    tables = [t for t in (a.rope_table, a.rope_rows) if len(t)]
    turns, exists = None, torch.ones_like(page, dtype=torch.bool)
    if tables:
        rope = rope_positions(at, position)
        exists = (rope >= 0) & (rope < len(tables[0]))
        turns = tables[0][rope.where(exists, 0)].float().chunk(2, 1)
    if len(a.kv):
        write_keys(spec, a, turns, exists, (page, row))
    if queries.shape[1]:
        (write_index_queries if spec.index else write_queries)(a, turns, exists)


def turned(x: torch.Tensor, turns: Any, interleaved: bool) -> torch.Tensor:
    """Return x (N, ..., R), rotated by cosines and sines (N, R / 2)."""
    cos, sin = (t.view(len(t), *[1] * (x.ndim - 2), -1) for t in turns)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def write_keys(spec: LatentSpec, a: LatentArgs, turns: Any, exists: torch.Tensor, place: Any) -> None:
    """Write the keys of tokens to their places, and their rotated part to its tensor."""
    interleaved, latent = bool(a.rope & INTERLEAVED), a.kv.shape[1]
    x = a.kv.float() if spec.index or not len(a.pe) else torch.cat([a.kv, a.pe], 1).float()
    if len(a.weight):
        x = normalised(spec, a, x)
    values, pe = x[:, :latent], x[:, latent:]
    if turns is not None and spec.index:
        rotated = 2 * turns[0].shape[1]
        values = torch.cat([turned(values[:, :rotated], turns, interleaved), values[:, rotated:]], 1)
    elif turns is not None and pe.shape[1]:
        pe = turned(pe, turns, interleaved)
    if not spec.index and len(a.pe_out):
        a.pe_out[exists] = pe[exists].to(a.pe_out.dtype)
    page, row = place
    written = exists & (page >= 0) & (page < len(a.cache))
    page, row, values, pe = page[written], row[written], values[written], pe[written]
    power, scale = bool(a.power_of_two), a.scale
    if not spec.index and len(a.scale_ptr):
        scale = a.scale_ptr
    own = bool(len(a.pe_cache))
    found = row_bytes(spec.record, a.kv.dtype, values, pe, scale, power, own)
    form, size = spec.form, a.cache.shape[1]
    if form.planar:
        flat = a.cache.as_strided((len(a.cache), size * form.token_bytes), (a.cache.stride(0), 1))
        put(flat, page, row * form.row, found.row)
        put(flat, page, size * form.row + row * form.factor_row, found.factors)
        return
    a.cache[page, row, : found.row.shape[1]] = found.row
    if found.rotated is not None:
        a.pe_cache[page, row, : found.rotated.shape[1]] = found.rotated


def put(flat: torch.Tensor, page: torch.Tensor, first: torch.Tensor, rows: Any) -> None:
    """Write rows (n, bytes) to columns `first` on of rows `page`."""
    flat[page[:, None], first[:, None] + torch.arange(rows.shape[1], device=rows.device)] = rows


def normalised(spec: LatentSpec, a: LatentArgs, x: torch.Tensor) -> torch.Tensor:
    """Return rows, normalised: all of x, or the latent alone, as there are weights."""
    part = x[:, : len(a.weight)]
    weight = a.weight.float() + (0.0 if spec.index else a.norm_offset)
    if spec.index and len(a.bias):
        part = part - part.mean(1, keepdim=True)
    part = part * (part.square().mean(1, keepdim=True) + a.norm_eps).rsqrt() * weight
    if spec.index and len(a.bias):
        part = part + a.bias.float()
    return torch.cat([part, x[:, len(a.weight) :]], 1)


def row_bytes(
    record: str, dtype: torch.dtype, values: torch.Tensor, pe: torch.Tensor, scale: Any = 1.0,
    power_of_two: bool = True, own: bool = False,
) -> RowBytes:  # fmt: skip
    """Return rows of a record. values, pe: both parts (n, D), (n, R) in fp32. own: the rotated part has a cache."""
    form, rows = RECORDS[record], len(values)
    if form.rotated_as == "codes":
        values, pe = torch.cat([values, pe], 1), pe[:, :0]
    if form.rotated > pe.shape[1] and form.rotated_as != "codes":
        pe = torch.cat([pe, pe.new_zeros(rows, form.rotated - pe.shape[1])], 1)
    rotated = as_bytes(narrowed(pe[:, None], scale if not form.vec else 1.0, E4M3)[:, 0] if form.rotated_as == "e4m3"
                       else pe.to(dtype))  # fmt: skip
    if form.codes == "":
        codes = as_bytes(values.to(dtype))
    elif not form.vec:
        codes = as_bytes(narrowed(values[:, None], scale, E4M3)[:, 0])
    blocks = values.unflatten(1, (-1, form.vec or 1))
    if form.codes == "e2m1":
        factors = e2m1_factors(blocks)
        codes = fp4.pack(fp4.e2m1(blocks / factors.float()[..., None]).flatten(1))
        if form.permuted:
            factors = factors.view(BYTE).clone().scatter_(
                1, permutation(factors.shape[1]).to(values.device).expand(rows, -1), factors.view(BYTE)
            )  # fmt: skip
        factors = as_bytes(factors)
    elif form.vec:
        scales = e4m3_scales(form, record == INDEX, power_of_two, largest(blocks))
        codes = as_bytes(narrowed(blocks, scales, E4M3).flatten(1))
        factors = as_bytes(scales)
        if form.factor == "ue8m0":
            factors = (scales.view(torch.int32) >> 23).to(BYTE)
    if not form.vec:
        return RowBytes(codes, None, rotated) if own else RowBytes(torch.cat([codes, rotated], 1))
    if form.planar:
        return RowBytes(torch.cat([codes, rotated], 1) if rotated.shape[1] else codes, factors)
    parts = [(0, codes), (form.factors_at, factors), (form.rotated_at, rotated)]
    return RowBytes(torch.cat([part for _, part in sorted(parts, key=lambda x: x[0]) if part.shape[1]], 1))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BYTE)


def write_queries(a: LatentArgs, turns: Any, exists: torch.Tensor) -> None:
    """Join and rotate the parts of queries."""
    nope = a.q if len(a.q) else a.q_pe[..., :0]
    pe = a.q_pe if turns is None else turned(a.q_pe.float(), turns, bool(a.rope & INTERLEAVED))
    if len(a.q_out):
        latent = nope.shape[2]
        a.q_out[exists, :, :latent] = nope[exists]
        a.q_out[exists, :, latent:] = pe[exists].to(a.q_out.dtype)
    if len(a.q_fp8):
        scale = a.q_scale_ptr if len(a.q_scale_ptr) else a.q_scale
        found = narrowed(torch.cat([nope.float(), pe.float()], 2)[exists], scale, E4M3)
        a.q_fp8.view(BYTE)[exists] = found.view(BYTE)


def write_index_queries(a: LatentArgs, turns: Any, exists: torch.Tensor) -> None:
    """Rotate and quantise an indexer's queries, and fold their scales into the weights of the heads."""
    x = a.q.float()
    if turns is not None:
        rotated = 2 * turns[0].shape[1]
        x = torch.cat([turned(x[..., :rotated], turns, bool(a.rope & INTERLEAVED)), x[..., rotated:]], -1)
    scales = power_above(largest(x).clamp(min=LEAST_QUERY) / fp4.E4M3_MAX)
    a.q_fp8.view(BYTE)[exists] = narrowed(x, scales, E4M3).view(BYTE)[exists]
    if len(a.weights_out):
        a.weights_out[exists] = (a.weights * scales * a.weight_scale)[exists]


def latent_values(
    record: str, cache: torch.Tensor, dtype: torch.dtype = torch.bfloat16, scale: Any = 1.0, latent: int = 512
) -> torch.Tensor:  # fmt: skip
    """Return the values (pages, P, D + R) of a cache of bytes (pages, P, bytes) in fp32. dtype: of what is not
    quantised. scale, latent: of records without factors."""
    form, (pages, size, _) = RECORDS[record], cache.shape
    rows = cache
    if form.planar:
        flat = cache.as_strided((pages, size * form.token_bytes), (cache.stride(0), 1))
        rows = flat[:, : size * form.row].view(pages, size, form.row)
        factors = flat[:, size * form.row :].reshape(pages, size, form.factor_row)
    if not form.vec:
        kind = E4M3 if form.codes else dtype
        return rows.contiguous().view(kind).float() * (scale if form.codes else 1.0)
    width = form.latent // (2 if form.codes == "e2m1" else 1)
    codes, count = rows[..., :width], form.latent // form.vec
    if not form.planar:
        factors = rows[..., form.factors_at :]
    size_of = 4 if form.factor == "fp32" else 1
    held = factors[..., : count * size_of].contiguous()
    if form.factor == "fp32":
        scales = held.view(torch.float32)
    elif form.factor == "ue8m0":
        scales = (held.int() << 23).view(torch.float32)
    else:
        scales = (held[..., permutation(count)] if form.permuted else held).view(E4M3).float()
    if form.codes == "e2m1":
        values = fp4.nvfp4_dequantize(codes.contiguous(), torch.ones_like(scales).to(E4M3)).float()
    else:
        values = codes.contiguous().view(E4M3).float()
    values = (values.unflatten(-1, (count, form.vec)) * scales[..., None]).flatten(-2)
    if form.rotated_as == "codes":
        return values
    end = form.rotated_at + form.rotated * (1 if form.rotated_as == "e4m3" else 2)
    part = rows[..., form.rotated_at : end].contiguous().view(E4M3 if form.rotated_as == "e4m3" else dtype)
    return torch.cat([values, part.float()], -1)


def read_latent(spec: ReadSpec, *flat: Any) -> None:
    """Do what a kernel of `spec` does with its arguments, in the order of `args.read_fields`."""
    a = pack_read(spec, flat)
    if a.cache.is_meta:  # there are no values
        return
    table, starts, firsts = (
        t.view(torch.int64) if a.wide >> i & 1 and len(t) else t
        for i, t in enumerate((a.page_table, a.starts, a.firsts))
    )
    requests, rows = len(table), min(a.rows, len(a.out))
    if not requests or rows <= 0:
        return
    if len(starts) > requests:
        rows = min(rows, int(starts[requests]))
    row = torch.arange(max(rows, 0), device=a.out.device)
    request = torch.searchsorted(starts[:requests].contiguous().long(), row, right=True) - 1
    first = starts.long()[request.clamp(min=0)]
    position = row - first + (firsts.long()[request.clamp(min=0)] if len(firsts) else 0)
    begins = firsts.long()[request.clamp(min=0)] if len(firsts) else torch.zeros_like(position)
    size = a.cache.shape[1]
    column = position // max(size, 1)
    there = (request >= 0) & (row >= first) & (begins >= 0) & (position < 1 << 31) & (column < table.shape[1])
    page = table[request.clamp(min=0), column.where(there, 0)].long() if table.shape[1] else torch.full_like(row, -1)
    there &= (page >= 0) & (page < len(a.cache))
    row, page, at = row[there], page[there], (position - column * size)[there]
    if spec.record in (BYTES, INDEX):
        codes, scales = raw_rows(spec, a.cache, page, at, a.out.shape[1])
        a.out[row] = codes
        if spec.record == INDEX:
            a.scales[row] = scales
        return
    scale = 1.0 if spec.record != "e4m3" else a.scale_ptr if len(a.scale_ptr) else a.scale
    values = latent_values(spec.record, a.cache[page.unique()], a.out.dtype, scale) if len(page) else a.out[:0, None]
    a.out[row] = values[torch.searchsorted(page.unique(), page), at].to(a.out.dtype)


def raw_rows(
    spec: ReadSpec, cache: torch.Tensor, page: torch.Tensor, at: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows of a cache as they are, and those of their factors if the record is planar."""
    form, size = spec.form, cache.shape[1]
    if not form.planar:
        return cache[page, at][:, :width], None
    flat = cache.as_strided((len(cache), size * form.token_bytes), (cache.stride(0), 1))

    def rows(first: torch.Tensor, count: int) -> torch.Tensor:
        return flat[page[:, None], first[:, None] + torch.arange(count, device=cache.device)]

    return rows(at * form.row, form.row), rows(size * form.row + at * form.factor_row, form.factor_row)
