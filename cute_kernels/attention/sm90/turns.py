"""Shared memory through which two warpgroups that compute scores in turn tell each other results (`alternating`).

P of a block, for O += P V of the other warpgroup; maxima of rows, which the other one makes its own; and sums of rows,
so that both know by how much a maximum may lag behind, and divide O by the same sum. Each warpgroup waits at a named
barrier at which the other one arrives, in turn: neither can arrive twice before the other one has waited.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import copy, layout, pipeline, wgmma
from .. import softmax as online
from ..barriers import NamedBarrier
from . import precision
from .epilogue import LANES, scales_of
from .groups import rows_barrier, warpgroup_idx
from .scoring import QUARTER
from .state import Sm90Fragments, Sm90TileState
from .tile_table import BOX, has_free_box

THREADS = 256


@dataclass(frozen=True)
class TurnSmem:
    """Shared memory between the warpgroups. p: P of the block of each, (m, n, 1); of warpgroup 1 (m, n, stages), in K,
    if that has room. rows (2, m, 2): the maximum and the sum of rows, of each warpgroup. totals (m, 2): the sums at the
    end of a tile."""

    p: tuple[cute.Tensor, Any]
    rows: cute.Tensor
    totals: cute.Tensor


def allocate(spec, smem):
    """Allocate `TurnSmem`. P of warpgroup 1 is None if it lies in K."""
    t, dtype = spec.tile, precision.of(spec).mma_type
    kind = layout.smem_layout((t.m, t.n), 1, dtype)
    count = 1 if has_free_box((spec.padded_qk, spec.padded_vo)) else 2
    p = [smem.allocate_tensor(dtype, kind.outer, 1024, kind.inner) for _ in range(count)]
    rows = smem.allocate_tensor(Float32, cute.make_layout((2, t.m, 2), stride=(1, 2, 2 * t.m)), 16)
    totals = smem.allocate_tensor(Float32, cute.make_layout((t.m, 2)), 16)
    return TurnSmem((p[0], p[1] if count > 1 else None), rows, totals)


def p_of_odd(spec, s):
    """Return P of warpgroup 1, (m, n, stages): in the first columns of each stage of K that V does not have."""
    if s.scores.p[1] is not None:
        return s.scores.p[1]
    k = s.k.smem
    n, columns, count = (cute.size(k, mode=[i]) for i in range(3))
    box = layout.smem_layout((n, BOX), 1, k.element_type).outer
    stages = cute.make_layout(count, stride=n * columns)
    return cute.make_tensor(k.iterator + n * spec.padded_vo, cute.append(cute.select(box, mode=[0, 1]), stages))


def p_stage(s, side, kv: Int32):
    """Return the stage of P of a block of a warpgroup in its memory."""
    return pipeline.stage(s.k.pipe, kv) if s.scores.p[side] is None else 0


class Sums(NamedTuple):
    """Sums of this thread's rows, relative to row_max, in all lanes: own, of P of this warpgroup, and other, of that of
    the other one when it last told it."""

    own: cute.Tensor
    other: cute.Tensor


@cute.jit
def set_limits(tile: Sm90TileState, sums: Sums):
    """Set by how much the maximum of each row may grow before row_max follows, as `scoring.set_limits` does. The
    sum leaves out keys that the other warpgroup has added since it last told it: the limit is then less."""
    st, limits, most = tile.r.st, tile.r.limits, tile.rescale_params.rescale_threshold
    for k in cutlass.range_constexpr(cute.size(limits)):
        sums.own[k] = cute.arch.warp_reduction_sum(st.row_sum[k], threads_in_group=LANES)
        total = sums.own[k] + sums.other[k]
        limits[k] = cute.arch.fmin(cute.arch.fmax(cute.math.log2(total, fastmath=True) - QUARTER, 0.0), most)


@cute.jit
def tell_rows(s, r: Sm90Fragments, sums: Sums, side: cutlass.Constexpr):
    """Tell the other warpgroup the maxima of rows, and the sums of the blocks before. acc_scale: of these sums."""
    both = cute.make_rmem_tensor(2, Float32)
    for k in cutlass.range_constexpr(cute.size(r.limits)):
        both[0], both[1] = r.st.row_max[k], sums.own[k] * r.st.acc_scale[k]
        if cute.arch.lane_idx() % LANES == 0:
            copy.vector(both, s.scores.rows[None, r.cols[k, 0][0], side])
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.MAXIMA + side, number_of_threads=THREADS)


@cute.jit
def follow_rows(s, tile: Sm90TileState, sums: Sums, side: cutlass.Constexpr):
    """Wait for the maxima of the other warpgroup, make them this one's, and set acc_scale as `update_max` does."""
    r, both = tile.r, cute.make_rmem_tensor(2, Float32)
    cute.arch.barrier(barrier_id=NamedBarrier.MAXIMA + 1 - side, number_of_threads=THREADS)
    for k in cutlass.range_constexpr(cute.size(r.limits)):
        copy.vector(s.scores.rows[None, r.cols[k, 0][0], 1 - side], both)
        top, old = both[0], r.st.row_max_scaled[k]
        scaled = online.fma(top, scales_of(r).reduced[k], -tile.rescale_params.max_offset)
        r.st.row_max[k], sums.other[k] = top, both[1]
        r.st.row_max_scaled[k] = Float32(online.NO_KEY_MAX) if top == -Float32.inf else scaled
        r.st.acc_scale[k] = cute.math.exp2(old - r.st.row_max_scaled[k], fastmath=True)
        r.st.row_sum[k] = r.st.row_sum[k] * r.st.acc_scale[k]


@cute.jit
def store_p(spec: cutlass.Constexpr, s, r: Sm90Fragments, side: cutlass.Constexpr, kv: Int32):
    """Store P of a block of this warpgroup for the other one."""
    p = s.scores.p[0] if const_expr(side == 0) else p_of_odd(spec, s)
    mma = wgmma.mma_nt(precision.of(spec).mma_type, 1, spec.tile.n, True)
    wgmma.store_a(mma, r.p, p[None, None, p_stage(s, side, kv)], cute.arch.thread_idx()[0] % 128)
    cute.arch.fence_proxy("async.shared", space="cta")


def tell_p(side):
    """Tell the other warpgroup that all of P that `store_p` has stored is there. side: the index of this one."""
    cute.arch.barrier_arrive(barrier_id=NamedBarrier.WARP_SCHEDULER + 1 - side, number_of_threads=THREADS)


def wait_for_p(side):
    """Wait until P of the other warpgroup is in shared memory. side: the index of this one."""
    cute.arch.barrier(barrier_id=NamedBarrier.WARP_SCHEDULER + side, number_of_threads=THREADS)


@cute.jit
def add_sums(spec: cutlass.Constexpr, s, r: Sm90Fragments):
    """Make the sums of rows those of both warpgroups, in lane 0 of each quad, at the end of a tile."""
    own, lane = warpgroup_idx(spec), cute.arch.lane_idx() % LANES
    for k in cutlass.range_constexpr(cute.size(r.limits)):
        total = cute.arch.warp_reduction_sum(r.st.row_sum[k], threads_in_group=LANES)
        if lane == 0:
            s.scores.totals[r.cols[k, 0][0], own] = total
    rows_barrier(spec)
    for k in cutlass.range_constexpr(cute.size(r.limits)):
        total = s.scores.totals[r.cols[k, 0][0], 0] + s.scores.totals[r.cols[k, 0][0], 1]
        r.st.row_sum[k] = total if lane == 0 else Float32(0.0)
