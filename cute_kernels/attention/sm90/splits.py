"""Partial results of tiles that are split among CTAs: store them, and merge the CTA's own (`..splits`, `..stripes`)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import copy, wgmma
from .. import geometry, softmax, splits, stripes
from ..schedule.work import WorkTileInfo
from . import precision
from .epilogue import LANES
from .groups import o_part
from .roles import roles

PIECE = 2  # neighbouring columns of a lane
ROWS, VALUES = 16, 128  # a warp merges so many rows of up to so many values at a time, fewer of longer ones


def mma_thread_idx(spec):
    return cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")


@cute.jit
def store_partial(spec: cutlass.Constexpr, a, s, r, w: WorkTileInfo, number: Int32, empty: cutlass.Constexpr):
    """Store this thread's rows of O, normalised, and LSE of the CTA's split `number`. empty: the split has no key."""
    o, part = wgmma.rows_cols(r.acc_o), o_part(spec)  # o_part shuffles: not where lanes of the warp differ
    left = geometry.num_rows(w.sequence.q_len, geometry.pack_divisor(w)) - w.m_block * spec.tile.m
    for k in cutlass.range_constexpr(cute.size(o, mode=[0])):
        scale, lse = Float32(0.0), -Float32.inf
        if const_expr(not empty):
            normal = softmax.row_normalizer(r.st, k, -Float32.inf, LANES)
            scale, lse = normal.inv_row_sum * precision.of(spec).dequant_scale, normal.lse
        row, values = r.cols[k, 0][0], cute.make_rmem_tensor(cute.size(o, mode=[1]), Float32)
        if const_expr(empty):
            values.fill(0.0)
        else:
            values.store(o[k, None].load() * scale)
        if const_expr(spec.tile.has_stripes):
            if cute.arch.make_warp_uniform(row // stripes.ROWS) * stripes.ROWS < left:
                store_blocks(spec, a, values, w.split.slot, row, lse, part)
        elif row < left:
            store_row(spec, a, values, w.split.slot, row, lse, part)
    splits.record(s.splits, w, number, mma_thread_idx(spec))


@cute.jit
def store_row(spec: cutlass.Constexpr, a, values: cute.Tensor, slot: Int32, row: Int32, lse: Float32, part: Int32):
    """Store this lane's values of a row, which are pairs of columns, and the LSE of the row."""
    target, lane = a.schedule.o_partial[slot, row, None], cute.arch.lane_idx() % LANES
    count = const_expr(spec.head_dim_vo // spec.tile.o_parts // (LANES * PIECE))
    for i in cutlass.range_constexpr(count):
        at = LANES * i + lane
        if const_expr(spec.tile.o_parts > 1):
            at += part * LANES * count
        copy.vector(cute.local_tile(values, (PIECE,), (i,)), cute.local_tile(target, (PIECE,), (at,)))
    if lane == 0 and (const_expr(spec.tile.o_parts == 1) or part == 0):
        target[spec.head_dim_vo] = lse


@cute.jit
def store_blocks(spec: cutlass.Constexpr, a, values: cute.Tensor, slot: Int32, row: Int32, lse: Float32, part: Int32):
    """Store this lane's values of a row as `stripes` wants them, and the LSE of the row. Called by all lanes of a warp,
    which have 8 rows. Two lanes exchange pairs of columns, so that a lane has four in a row: an even one of the first
    half of a block, an odd one of the second half."""
    lane, is_odd = cute.arch.lane_idx() % LANES, cute.arch.lane_idx() % 2 == 1
    blocks, piece = const_expr(cute.size(values) // 4), cute.make_rmem_tensor(2 * PIECE, Float32)
    target = stripes.blocks_of(spec, a, slot)[None, row % stripes.ROWS, None, row // stripes.ROWS]
    for i in cutlass.range_constexpr(blocks):
        for e in cutlass.range_constexpr(PIECE):
            first, second = values[4 * i + e], values[4 * i + PIECE + e]
            got = cute.arch.shuffle_sync_bfly(first if is_odd else second, 1)
            piece[e], piece[PIECE + e] = (got, second) if is_odd else (first, got)
        at = cute.local_tile(target[None, part * blocks + i], (2 * PIECE,), (lane % 2 * 2 + lane // 2,))
        copy.vector(piece, at)
    lses = stripes.lses_of(spec, a, slot)
    if lane == 0 and part == 0:
        lses[row] = lse


@cute.jit
def merge(spec: cutlass.Constexpr, a, s, count: Int32):
    """Merge the tiles of the CTA's `count` splits that no other CTA will still add to."""
    warps, rows = const_expr(roles(spec).warps("mma")), const_expr(min(ROWS, ROWS * VALUES // spec.head_dim_vo))
    splits.barrier(warps)
    if const_expr(spec.tile.has_stripes):
        stripes.merge(spec, a, s.splits, count, mma_thread_idx(spec), warps)
    else:
        splits.merge(spec, a, s.splits, count, mma_thread_idx(spec), warps, rows)
