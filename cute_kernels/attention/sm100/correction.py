"""The warpgroup that keeps O in step with the maxima of its rows, and stores it: a thread a row of each half."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import pipeline, tmem, warp
from .. import epilogue, geometry, logits, quant, softmax, splits
from ..schedule import work
from ..schedule.work import WorkTileInfo
from .mma_utils import O
from .roles import ROWS, SLOTS, WARPS, groups, is_static, num_iterations, pingpong_groups, roles, tile_q_stage

LOADED = 16  # columns of O that are in registers, and stored, at a time: a block of NVFP4's


class SoftmaxStats(NamedTuple):
    """Of a row. value: what O is to be multiplied by, at a tile's end the sum of its exponentials. top: then, their
    maximum in log2 units."""

    scale_or_sum: Float32
    row_max: Float32


def o_address(s, group):
    """Address of O of a group, in this warp's lanes of tensor memory."""
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    return s.tmem_ptr[0] + tmem.lanes(number) + (O + group * ROWS)


@cute.jit
def recv_stats(s, group, row: Int32, item: Int32):
    """What `softmax.send_stats` says of a row."""
    pipeline.mbarrier_wait(s.sm_stats_full + group, item)
    stats = SoftmaxStats(s.sm_stats[row, group, 0], s.sm_stats[row, group, 1])
    cute.arch.sync_warp()
    pipeline.mbarrier_arrive(s.sm_stats_empty + group)
    return stats


@cute.jit
def correction_rescale(spec: cutlass.Constexpr, at: Int32, factor: Float32):
    """O *= factor of each row, in warps where a row wants that."""
    if cute.arch.vote_any_sync(factor != 1.0):
        for c in cutlass.range_constexpr(0, spec.head_dim_vo, LOADED):
            values = tmem.load(at + c, LOADED)
            tmem.wait_load()
            tmem.store(at + c, [v * factor for v in values])
        tmem.wait_store()


class CombinedStats(NamedTuple):
    """Of a row of a half. top, total: as `SoftmaxStats`, of all its groups. first, second: 2^(top of a group - top), of
    the group that has the tile's first block and, where blocks are had in turn, of the other."""

    row_max: Float32
    row_sum: Float32
    scale_0: Float32
    scale_1: Float32


@cute.jit
def combined_stats(s, group: cutlass.Constexpr, row: Int32, item: Int32, is_pingpong: cutlass.Constexpr):
    """The `CombinedStats` of a row of a group, or of both."""
    one = recv_stats(s, group, row, item)
    result = CombinedStats(one.row_max, one.scale_or_sum, Float32(1.0), Float32(0.0))
    if const_expr(is_pingpong):
        two = recv_stats(s, 1, row, item)
        top = cute.arch.fmax(one.row_max, two.row_max)
        known = Float32(0.0) if top == -Float32.inf else top
        first, second = (cute.math.exp2(x.row_max - known, fastmath=True) for x in (one, two))
        result = CombinedStats(top, warp.fma(two.scale_or_sum, second, one.scale_or_sum * first), first, second)
    return result


class OutputRow(NamedTuple):
    """A row of O. number: in its tile. whole, part: whether it is one of the output, or of a part of a tile. lse: log2.
    first, second: what O of the group that has the tile's first block, and of the other, is to be multiplied by."""

    number: Int32
    token: Int32
    head: Int32
    is_output: Any
    is_partial: Any
    lse: Float32
    scale_0: Float32
    scale_1: Float32


class CorrectionCounters(NamedTuple):
    """Before the tile's end: rounds and tiles."""

    num_iterations: Int32
    tiles: Int32


@cute.jit
def correction_epilogue(
    spec: cutlass.Constexpr,
    a,
    s,
    w: WorkTileInfo,
    group: cutlass.Constexpr,
    row: Int32,
    at: CorrectionCounters,
    is_pingpong: cutlass.Constexpr,
):
    """The thread's row of a half: O and LSE. group: the half's; in_turn: both are."""
    half = 0 if const_expr(is_pingpong) else group
    number = (tile_q_stage(spec, w) * w.m_block + half) * ROWS + row
    token = geometry.token_of(number, geometry.pack_divisor(w))
    head = geometry.head_of(number, w.head_idx, geometry.pack_divisor(w))
    sink, factor, second = epilogue.sink_of(a, head), Float32(0.0), Float32(0.0)
    whole, part = token < w.q_len, False
    if const_expr(work.is_split_kv(spec)):
        sink = -Float32.inf if w.split.slot >= 0 else sink  # it enters where parts are merged
        whole, part = whole and w.split.slot < 0, whole and w.split.slot >= 0
    lse, mine = sink * logits.LOG2_E, const_expr(range(SLOTS) if is_pingpong else (group,))
    if w.n_block_max > w.n_block_min:
        of = combined_stats(s, group, row, at.num_iterations + at.tiles, is_pingpong)
        normal = softmax.normalizer(of.row_max, of.row_sum, sink)
        out = a.out.out_scale * softmax.head_scale(a.out.out_scale_ptr, head)
        if const_expr(work.is_split_kv(spec)):
            out = Float32(1.0) if w.split.slot >= 0 else out
        lse, factor = normal.lse, normal.inv_row_sum * (out * const_expr(quant.kv_format(spec).dequant_scale))
        if const_expr(is_pingpong):
            factor, second = factor * of.scale_0, factor * of.scale_1
        for g in mine:
            pipeline.mbarrier_wait(
                s.o_full + g, at.tiles if const_expr(groups(spec) == SLOTS) else at.num_iterations - 1
            )
        tmem.fence_after_thread_sync()
    into = OutputRow(row, w.q_start + token, head, whole, part, lse, factor, second)
    for c in cutlass.range_constexpr(0, spec.head_dim_vo, LOADED):
        store_columns(spec, a, s, w, into, group, c, is_pingpong)
    if w.n_block_max > w.n_block_min:
        tmem.fence_before_thread_sync()
        for g in mine:
            pipeline.mbarrier_arrive(s.o_empty + g)
    epilogue.store_lse(a, into.token, head, lse, whole)


@cute.jit
def store_columns(
    spec: cutlass.Constexpr,
    a,
    s,
    w: WorkTileInfo,
    into: OutputRow,
    group: cutlass.Constexpr,
    c: cutlass.Constexpr,
    is_pingpong: cutlass.Constexpr,
):
    """Columns c to c + LOADED - 1 of the thread's row of O, zeros where no row of the tile sees a key."""
    values = cute.make_rmem_tensor(LOADED, Float32)
    values.fill(0.0)
    if w.n_block_max > w.n_block_min:
        loaded = tmem.load(o_address(s, group) + c, LOADED)
        tmem.wait_load()
        for e in cutlass.range_constexpr(LOADED):
            values[e] = loaded[e] * into.scale_0
    if const_expr(is_pingpong):
        add_columns(s, w, into, c, values)
    if const_expr(work.is_split_kv(spec)):
        if into.is_partial:
            epilogue.store_partial(spec, a, w.split.slot, into.number, Int32(c // LOADED), values, into.lse)
    if into.is_output:
        epilogue.store_piece(spec, a, into.token, into.head, Int32(c // LOADED), values, ())


@cute.jit
def add_columns(s, w: WorkTileInfo, into: OutputRow, c: cutlass.Constexpr, values: cute.Tensor):
    """What group 1 found, which has the tile's second block. A group without a key of the row may hold 0 x NaN."""
    for e in cutlass.range_constexpr(LOADED):
        values[e] = values[e] if into.scale_0 != 0.0 else Float32(0.0)
    if w.n_block_max - w.n_block_min > 1:
        loaded = tmem.load(o_address(s, 1) + c, LOADED)
        tmem.wait_load()
        for e in cutlass.range_constexpr(LOADED):
            values[e] = warp.fma(loaded[e], into.scale_1, values[e]) if into.scale_1 != 0.0 else values[e]


@cute.jit
def correction(spec: cutlass.Constexpr, plan, s):
    """All tiles of the CTA."""
    a = plan.args
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    row = number * 32 + cute.arch.lane_idx()
    t, i, q = Int32(0), Int32(0), Int32(0)
    w = work.consume(spec, s, t)
    while w.is_valid != 0:
        if w.n_block_max > w.n_block_min:
            count = num_iterations(spec, w)
            for left in cutlass.range(count, 0, -1, unroll=1):
                for group in cutlass.range_constexpr(groups(spec)):
                    factor = recv_stats(s, group, row, i + q).scale_or_sum
                    if left < count:
                        if const_expr(groups(spec) < SLOTS):  # of every block: a phase looks like the one before last
                            pipeline.mbarrier_wait(s.o_full, i - 1)
                        tmem.fence_after_thread_sync()
                        correction_rescale(spec, o_address(s, group), factor)
                        tmem.fence_before_thread_sync()
                    pipeline.mbarrier_arrive(
                        s.p_full_o_rescaled + (group if const_expr(groups(spec) == SLOTS) else i % SLOTS)
                    )
                i += 1
        n, at = pingpong_groups(spec, w), CorrectionCounters(i, q)
        if const_expr(is_static(n, 1)):
            for group in cutlass.range_constexpr(groups(spec)):
                correction_epilogue(spec, a, s, w, group, row, at, False)
        elif const_expr(is_static(n, SLOTS)):
            correction_epilogue(spec, a, s, w, 0, row, at, True)
        elif n == 1:
            for group in cutlass.range_constexpr(groups(spec)):
                correction_epilogue(spec, a, s, w, group, row, at, False)
        else:
            correction_epilogue(spec, a, s, w, 0, row, at, True)
        if w.n_block_max > w.n_block_min:
            q += 1
        t += 1
        w = work.consume(spec, s, t)
    if const_expr(work.is_split_kv(spec)):
        splits.barrier(roles(spec).warps("softmax", "correction"))
