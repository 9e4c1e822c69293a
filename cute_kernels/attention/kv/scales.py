"""Scale factors of block-scaled caches. Their rows are too short for TMA: one warp copies them with cp.async, into the
stages that a source fills with the rows they belong to."""

from math import gcd
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...device import pipeline
from ..spec import SF_VEC_SIZE
from . import pages
from .pages import KVBlock
from .tma import BOXES

PIECE = 16  # largest number of bytes per lane and copy


def scale_rows(spec):
    """Return the number of neighbouring rows for which a lane copies scale factors. They must be of one page: a power
    of two, at most the smallest page size."""
    return 1 if gathers(spec) else min(BOXES[0], 1 << (spec.tile.n // 32).bit_length() - 1)


def load_warps(spec):
    """Return the number of warps that load scale factors: 1, or 0 if the cache has none."""
    return int(spec.kv.block_scaled)


def allocate(spec, smem, dim, stages):
    """Allocate the scale factors of all stages, (n, D / 16, stages) bytes; None if the cache has none."""
    n, size = spec.tile.n, dim // SF_VEC_SIZE
    if not spec.kv.block_scaled:
        return None
    return smem.allocate_tensor(cutlass.Uint8, cute.make_layout((n, size, stages), stride=(size, 1, n * size)), 16)


def gathers(spec):
    """Return whether pages may have any size."""
    return spec.kv.source == "gather"


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
    groups = const_expr(spec.tile.n // scale_rows(spec))
    found = cute.make_rmem_tensor((groups + 31) // 32, Int32)
    for c in cutlass.range_constexpr(cute.size(found)):
        group = 32 * c + cute.arch.lane_idx()
        row = n_block * spec.tile.n + group * scale_rows(spec)
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


@cute.jit
def fill(
    spec: cutlass.Constexpr,
    scales: cute.Tensor,
    smem: cute.Tensor,
    p: pipeline.Pipeline,
    found: cute.Tensor,
    at: KVBlock,
    interleaved: Any = 0,
):
    """Copy the scale factors of a block, (n, D / 16) bytes row by row, into the item's stage. Called by one warp.

    found: the pages from `find`; rows without a page become zeros. Every lane arrives when its copies have completed.
    interleaved: 1 if groups of 4 rows are interleaved, see `source_of_part`.
    """
    size, count = const_expr(cute.size(smem, mode=[1])), const_expr(scale_rows(spec))
    piece = const_expr(gcd(size, PIECE))
    step = Int64(scales.stride[2])
    # wait for a free stage
    pipeline.producer_acquire(p, at.item)
    # copy
    for c in cutlass.range_constexpr(cute.size(found)):
        first_row, page, page_size = (32 * c + cute.arch.lane_idx()) * count, found[c], scales.shape[2]
        row = at.n_block * spec.tile.n + first_row
        row = row % page_size if const_expr(gathers(spec)) else row & (page_size - 1)
        exists = (page >= 0) & (page < scales.shape[0])
        source = scales[page if exists else Int32(0), at.head, row, None].iterator.toint()
        target = smem[first_row, None, pipeline.stage(p, at.item)].iterator.toint()
        if first_row < spec.tile.n:
            for e in cutlass.range_constexpr(count):
                text = f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {piece}, {{$r2}};"
                written, from_row = Int32(piece) if exists else Int32(0), source + e * step
                if const_expr(size < scales.shape[3]):
                    rows, part = source_of_part(spec.tile.o_tiles, (first_row + e) % 4, at.o_tile, interleaved)
                    from_row += rows * step + part * size
                for i in cutlass.range_constexpr(0, size, piece):
                    cute.arch.inline_ptx(text, read_only_args=[target + e * size + i, from_row + i, written])
    # arrive when the copies have completed
    cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full_barrier(p, at.item))
