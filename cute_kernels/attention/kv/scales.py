"""Scale factors that lie beside the cache. Their rows are too short for TMA: one warp copies them with cp.async, into
the stages that a source fills with the rows they belong to.

A row of scale factors in a stage has those of the padded head dim: behind the row's own there are zeros, so that padded
columns never meet the NaN of another row. cp.async copies at least 4 bytes. Rows of a number of bytes that 4 does not
divide begin at any address, and go through registers instead, one or two bytes at a time (`fill_narrow`).
"""

from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...device import pipeline
from . import pages
from .pages import KVBlock, LoadTarget
from .tma import BOXES

PIECE, LEAST = 16, 4  # largest and smallest number of bytes per lane and copy
UNITS = {1: cutlass.Uint8, 2: cutlass.Uint16}  # bytes that go through registers at a time -> type


def rows_per_lane(spec):
    """Return the number of neighbouring rows for which a lane copies scale factors. They must be of one page: a power
    of two, at most the smallest page size."""
    return 1 if gathers(spec) else min(BOXES[0], 1 << (spec.tile.n // 32).bit_length() - 1)


def load_warps(spec):
    """Return the number of warps that load scale factors: 1, or 0 if the cache has none."""
    return int(spec.kv.layout.exists)


def allocate(spec, smem, dim, stages):
    """Allocate the scale factors of all stages, (n, N, stages) bytes; None if the cache has none. dim: padded."""
    n, size = spec.tile.n, spec.kv.layout.row_bytes(dim)
    if not size:
        return None
    return smem.allocate_tensor(cutlass.Uint8, cute.make_layout((n, size, stages), stride=(size, 1, n * size)), 16)


def gathers(spec):
    """Return whether pages may have any size."""
    return spec.kv.source == "gather"


def has_narrow_rows(spec):
    """Return whether rows of scale factors, of K or of V, go through registers."""
    layout = spec.kv.layout
    return layout.exists and any(gcd(layout.row_bytes(dim), PIECE) < LEAST for dim in spec.dims)


def has_row_factors(spec):
    """Return whether a whole row shares a factor."""
    return spec.kv.layout.of_rows


def has_block_factors(spec):
    """Return whether blocks of a row share a factor each."""
    return spec.kv.layout.exists and not has_row_factors(spec)


@cute.jit
def find(
    spec: cutlass.Constexpr,
    page_size: Int32,
    sequence_pages: pages.SequencePages,
    n_block: Int32,
    kv_len: Int32,
    mixed: Int32,
):
    """Return the pages of the rows for which this lane copies scale factors; -1 past kv_len. Called before the wait for
    a free stage, which hides the latency. mixed: 1 if groups of 4 rows are interleaved, so that all 4 are copied."""
    groups = const_expr(spec.tile.n // rows_per_lane(spec))
    found = cute.make_rmem_tensor((groups + 31) // 32, Int32)
    for c in cutlass.range_constexpr(cute.size(found)):
        group = 32 * c + cute.arch.lane_idx()
        row = n_block * spec.tile.n + group * rows_per_lane(spec)
        found[c] = Int32(-1)
        if row - row % 4 * mixed < kv_len and group < groups:
            found[c] = sequence_pages.pages[row // page_size if gathers(spec) else row >> pages.shift(page_size)]
    return found


def source_of_part(o_tiles, row, o_tile, interleaved):
    """Return where the scale factors of a row are that a tile with a part of the columns of O needs: (by how many rows
    further on, which part of that row). row: in its group of 4. Interleaved factors of 4 rows are stored block by
    block, so that a part of the blocks of 4 rows is all blocks of fewer rows."""
    linear, mixed = row * o_tiles + o_tile, 4 * o_tile + row
    part = linear + interleaved * (mixed - linear)
    return part // o_tiles - row, part % o_tiles


def padded_row(padded, size, row, interleaved):
    """Return where a row of `size` scale factors goes in a stage with rows of `padded`: (by how many before the stage's
    row, how far behind the beginning of that row its share of the zeros lies). row: in its group of 4. Interleaved
    factors of 4 rows lie together, and so do their zeros."""
    return interleaved * row * (padded - size), size + interleaved * (3 - row) * size


@cute.jit
def fill(spec: cutlass.Constexpr, into: LoadTarget, found: cute.Tensor, at: KVBlock, interleaved: Any = 0):
    """Copy the scale factors of a block, (n, N) bytes row by row, into the item's stage. Called by one warp.

    into: op is the tensor of scale factors. found: the pages from `find`; rows without a page become zeros. Every lane
    arrives when its copies have completed. interleaved: 1 if groups of 4 rows are interleaved, see `source_of_part`.
    """
    if const_expr(gcd(into.op.shape[3], PIECE) < LEAST):
        fill_narrow(spec, into, found, at, interleaved)
    else:
        fill_wide(spec, into, found, at, interleaved)


def rows_of_lane(spec, scales, found, at: KVBlock, c):
    """Return where the c-th rows of this lane are: (first row in the block, page, first row in the page, whether the
    page exists). found: the pages from `find`."""
    first_row, page, page_size = (32 * c + cute.arch.lane_idx()) * rows_per_lane(spec), found[c], scales.shape[2]
    row = at.n_block * spec.tile.n + first_row
    row = row % page_size if gathers(spec) else row & (page_size - 1)
    return first_row, page, row, (page >= 0) & (page < scales.shape[0])


@cute.jit
def fill_wide(spec: cutlass.Constexpr, into: LoadTarget, found: cute.Tensor, at: KVBlock, interleaved: Any):
    """Do the work of `fill` with cp.async."""
    scales, smem, ring = into.op, into.smem, into.ring
    padded, count = const_expr(cute.size(smem, mode=[1])), const_expr(rows_per_lane(spec))
    size = const_expr(min(padded, scales.shape[3]))
    piece = const_expr(gcd(size, PIECE))
    step = Int64(scales.stride[2])
    # wait for a free stage
    pipeline.producer_acquire(ring, at.item)
    # copy
    for c in cutlass.range_constexpr(cute.size(found)):
        first_row, page, row, exists = rows_of_lane(spec, scales, found, at, c)
        source = scales[page if exists else Int32(0), at.head, row, None].iterator.toint()
        target = smem[first_row, None, pipeline.stage(ring, at.item)].iterator.toint()
        if first_row < spec.tile.n:
            for e in cutlass.range_constexpr(count):
                text = f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {piece}, {{$r2}};"
                written, to, start = Int32(piece) if exists else Int32(0), target, source
                if const_expr(size < scales.shape[3]):
                    rows, part = source_of_part(spec.tile.o_tiles, (first_row + e) % 4, at.o_tile, interleaved)
                    start += rows * step + part * size
                if const_expr(size < padded):
                    back, tail = padded_row(padded, size, (first_row + e) % 4, interleaved)
                    for i in cutlass.range_constexpr(0, padded - size, piece):
                        cute.arch.inline_ptx(text, read_only_args=[to + e * padded + tail + i, start, Int32(0)])
                    to -= back
                for i in cutlass.range_constexpr(0, size, piece):
                    operands = [to + e * padded + i, start + e * step + i, written]
                    cute.arch.inline_ptx(text, read_only_args=operands)
    # arrive when the copies have completed
    cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full_barrier(ring, at.item))


@cute.jit
def fill_narrow(spec: cutlass.Constexpr, into: LoadTarget, found: cute.Tensor, at: KVBlock, interleaved: Any):
    """Do the work of `fill` through registers."""
    scales, smem, ring = into.op, into.smem, into.ring
    unit, count = const_expr(gcd(scales.shape[3], PIECE)), const_expr(rows_per_lane(spec))
    size, padded = const_expr(scales.shape[3] // unit), const_expr(cute.size(smem, mode=[1]) // unit)
    # wait for a free stage
    pipeline.producer_acquire(ring, at.item)
    base = smem[None, None, pipeline.stage(ring, at.item)].iterator
    to = cute.make_tensor(cute.recast_ptr(base, dtype=UNITS[unit]), cute.make_layout(spec.tile.n * padded))
    for c in cutlass.range_constexpr(cute.size(found)):
        first_row, page, row, exists = rows_of_lane(spec, scales, found, at, c)
        if first_row < spec.tile.n:
            values = cute.make_rmem_tensor((size, count), UNITS[unit])
            values.fill(0)
            # load
            if exists:
                for e in cutlass.range_constexpr(count):
                    source = cute.recast_tensor(scales[page, at.head, row + e, None], UNITS[unit])
                    for i in cutlass.range_constexpr(size):
                        values[i, e] = source[i]
            # store, with zeros behind
            for e in cutlass.range_constexpr(count):
                target = (first_row + e) * padded
                back, tail = padded_row(padded, size, (first_row + e) % 4, interleaved)
                for i in cutlass.range_constexpr(size):
                    to[target - back + i] = values[i, e]
                for i in cutlass.range_constexpr(padded - size):
                    to[target + tail + i] = UNITS[unit](0)
    # arrive, behind this lane's stores
    cute.arch.mbarrier_arrive(pipeline.full_barrier(ring, at.item))
