"""Partial results of tiles that are split among CTAs: store them, and merge the CTA's own (`..splits`)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import copy, wgmma
from .. import geometry, softmax, splits
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
    o, lane = wgmma.rows_cols(r.acc_o), cute.arch.lane_idx() % LANES
    part = o_part(spec)  # by a shuffle: not where lanes of the warp differ
    left = geometry.num_rows(w.sequence.q_len, geometry.pack_divisor(w)) - w.m_block * spec.tile.m
    for k in cutlass.range_constexpr(cute.size(o, mode=[0])):
        scale, lse = Float32(0.0), -Float32.inf
        if const_expr(not empty):
            normal = softmax.row_normalizer(r.st, k, -Float32.inf, LANES)
            scale, lse = normal.inv_row_sum * precision.of(spec).dequant_scale, normal.lse
        row, piece = r.cols[k, 0][0], cute.make_rmem_tensor(PIECE, Float32)
        if row < left:
            target = a.schedule.o_partial[w.split.slot, row, None]
            count = const_expr(spec.head_dim_vo // spec.tile.o_parts // (LANES * PIECE))
            for i in cutlass.range_constexpr(count):
                for e in cutlass.range_constexpr(PIECE):
                    piece[e] = Float32(0.0) if const_expr(empty) else o[k, PIECE * i + e] * scale
                at = LANES * i + lane
                if const_expr(spec.tile.o_parts > 1):
                    at += part * LANES * count
                copy.vector(piece, cute.local_tile(target, (PIECE,), (at,)))
            if lane == 0 and (const_expr(spec.tile.o_parts == 1) or part == 0):
                target[spec.head_dim_vo] = lse
    splits.record(s.splits, w, number, mma_thread_idx(spec))


@cute.jit
def merge(spec: cutlass.Constexpr, a, s, count: Int32):
    """Merge the tiles of the CTA's `count` splits that no other CTA will still add to."""
    warps, rows = const_expr(roles(spec).warps("mma")), const_expr(min(ROWS, ROWS * VALUES // spec.head_dim_vo))
    splits.barrier(warps)
    if const_expr(spec.tile.scores_apart):
        splits.merge_together(spec, a, s.splits, count, mma_thread_idx(spec), warps)
    else:
        splits.merge(spec, a, s.splits, count, mma_thread_idx(spec), warps, rows)
