"""The correction warpgroup: it rescales O when a row's maximum has grown, normalises it and stores it.

A thread has one row of each half. It has lanes of tensor memory that it shares with softmax threads of the same row.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import pipeline, tmem, warp
from .. import epilogue, geometry, logits, softmax, splits
from ..schedule import work
from ..schedule.work import WorkTileInfo
from . import precision
from .mma_utils import O
from .roles import ROWS, SLOTS, WARPS, groups, is_static, num_iterations, pingpong_groups, roles, tile_q_stage

LOAD_COLUMNS = 16  # columns of O in registers, and stored, at a time: an NVFP4 block. With 32, one kernel spilled


class SoftmaxStats(NamedTuple):
    """Statistics of a row at a tile's end, from softmax to correction. row_max: in log2 units."""

    row_sum: Float32
    row_max: Float32


def o_address(s, group):
    """Return the address of a group's O in this warp's lanes of tensor memory."""
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    return s.tmem_ptr[0] + tmem.lanes(number) + (O + group * ROWS)


@cute.jit
def arrive(mbarrier, row: Int32):
    """Arrive at an mbarrier (one warp: one arrival). row: of this thread. The warp's first lane arrives: all arrivals
    of a loop share the comparison, and elections would take an instruction each."""
    if row % 32 == 0:
        cute.arch.mbarrier_arrive(mbarrier)


def slot_of(spec, group, i):
    """Return the slot of S that a group uses in iteration i. Opaque: NVVM would mask each multiple of it anew."""
    return group if groups(spec) == SLOTS else warp.opaque(i & (SLOTS - 1))


def next_iteration(spec, i):
    """Return the iteration behind i. If each group owns a slot, only the parity counts, which takes an instruction less
    than the number."""
    return i ^ 1 if groups(spec) == SLOTS else i + 1


def acc_scale_index(spec, group, row, slot):
    """Return the index in sm_stats of a row's factor on O, for the block in a slot of S."""
    return row, group, 0 if groups(spec) == SLOTS else slot


@cute.jit
def recv_acc_scale(spec: cutlass.Constexpr, s, group, row: Int32, i: Int32):
    """Wait for the factor on O that a group's `softmax.send_acc_scale` sent in iteration i, and return it."""
    slot = slot_of(spec, group, i)
    pipeline.mbarrier_wait(s.acc_scale_full + slot, i if const_expr(groups(spec) == SLOTS) else i >> 1)
    return s.sm_stats[acc_scale_index(spec, group, row, slot)]


@cute.jit
def recv_row_stats(s, group, row: Int32, tile: Int32):
    """Wait for what a group's `softmax.send_row_stats` sent for tile number `tile` with keys, and return it."""
    pipeline.mbarrier_wait(s.row_stats_full + group, tile)
    stats = SoftmaxStats(s.sm_stats[row, group, 0], s.sm_stats[row, group, 1])
    cute.arch.sync_warp()
    arrive(s.row_stats_empty + group, row)
    return stats


@cute.jit
def correction_rescale(spec: cutlass.Constexpr, address: Int32, scale: Float32):
    """Multiply each row of O by its scale. A warp does nothing if all of its scales are 1."""
    if cute.arch.vote_any_sync(scale != 1.0):
        tmem.fence_after_thread_sync()
        for c in cutlass.range_constexpr(0, spec.tile_vo, LOAD_COLUMNS):
            values = tmem.load(address + c, LOAD_COLUMNS)
            tmem.wait_load()
            tmem.store(address + c, [v * scale for v in values])
        tmem.wait_store()
        tmem.fence_before_thread_sync()


class CombinedStats(NamedTuple):
    """Statistics of a row over all groups that have blocks of it. row_max: log2 units. scale_0, scale_1: 2^(row_max of
    the group - row_max), for the group of the tile's first block and, if two groups alternate, for the other."""

    row_max: Float32
    row_sum: Float32
    scale_0: Float32
    scale_1: Float32


@cute.jit
def combined_stats(s, group: cutlass.Constexpr, row: Int32, tile: Int32, is_pingpong: cutlass.Constexpr):
    """Return the statistics of a row from one group, or, with `is_pingpong`, from both."""
    one = recv_row_stats(s, group, row, tile)
    result = CombinedStats(one.row_max, one.row_sum, Float32(1.0), Float32(0.0))
    if const_expr(is_pingpong):
        two = recv_row_stats(s, 1, row, tile)
        row_max = cute.arch.fmax(one.row_max, two.row_max)
        finite_max = Float32(0.0) if row_max == -Float32.inf else row_max
        scale_0, scale_1 = (cute.math.exp2(x.row_max - finite_max, fastmath=True) for x in (one, two))
        row_sum = warp.fma(two.row_sum, scale_1, one.row_sum * scale_0)
        result = CombinedStats(row_max, row_sum, scale_0, scale_1)
    return result


class OutputRow(NamedTuple):
    """A row of O. group, is_pingpong: static, as `correction_epilogue` has them. number: in its tile. is_output,
    is_partial: whether it goes to the output, or to the partial result of a split tile. lse: log2 units. scale_0,
    scale_1: factors on O of the group of the tile's first block, and of the other."""

    group: Any
    is_pingpong: Any
    number: Int32
    token: Int32
    head: Int32
    is_output: Any
    is_partial: Any
    lse: Float32
    scale_0: Float32
    scale_1: Float32


class CorrectionCounters(NamedTuple):
    """Iterations (see `next_iteration`) and tiles that have keys, before the stats at the tile's end."""

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
    """Normalise and store the thread's row of a half, O and LSE. group: the half's; with `is_pingpong`, both groups
    have the tile's only half, and their O are combined. A row without keys gets zeros."""
    half = 0 if const_expr(is_pingpong) else group
    number = (tile_q_stage(spec, w) * w.m_block + half) * ROWS + row
    token = geometry.token_of(number, geometry.pack_divisor(w))
    head = geometry.head_of(number, w.head_idx, geometry.pack_divisor(w))
    sink, scale_0, scale_1 = epilogue.sink_of(a, head), Float32(0.0), Float32(0.0)
    is_output, is_partial = token < w.sequence.q_len, False
    if const_expr(w.split is not None):
        sink = -Float32.inf if w.split.slot >= 0 else sink  # the merge of splits adds it
        is_output, is_partial = is_output and w.split.slot < 0, is_output and w.split.slot >= 0
    lse = sink * logits.LOG2_E
    if w.n_block_max > w.n_block_min:
        # row_sum and row_max
        stats = combined_stats(s, group, row, at.tiles, is_pingpong)
        normal = softmax.normalizer(stats.row_max, stats.row_sum, sink)
        out_scale = a.out.out_scale * softmax.head_scale(a.out.out_scale_ptr, head)
        if const_expr(w.split is not None):
            out_scale = Float32(1.0) if w.split.slot >= 0 else out_scale
        lse, scale_0 = normal.lse, normal.inv_row_sum * (out_scale * const_expr(precision.of(spec).dequant_scale))
        if const_expr(is_pingpong):
            scale_0, scale_1 = scale_0 * stats.scale_0, scale_0 * stats.scale_1
        # wait until O is complete
        for g in const_expr(range(SLOTS) if is_pingpong else (group,)):
            pipeline.mbarrier_wait(
                s.o_full + g, at.tiles if const_expr(groups(spec) == SLOTS) else at.num_iterations - 1
            )
        tmem.fence_after_thread_sync()
    # store O
    numbers = row, w.sequence.q_start + token, head
    out_row = OutputRow(group, is_pingpong, *numbers, is_output, is_partial, lse, scale_0, scale_1)
    for c in cutlass.range_constexpr(0, spec.tile_vo, LOAD_COLUMNS):
        store_columns(spec, a, s, w, out_row, c)
    # O may be overwritten after this warp's next arrival at p_full_o_rescaled
    if w.n_block_max > w.n_block_min:
        tmem.fence_before_thread_sync()
    epilogue.store_lse(a, out_row.token, head, lse, epilogue.stores_lse(spec, w, is_output))


@cute.jit
def store_columns(spec: cutlass.Constexpr, a, s, w: WorkTileInfo, out_row: OutputRow, c: cutlass.Constexpr):
    """Store columns c to c + LOAD_COLUMNS - 1 of the thread's row of O; zeros if no row of the tile sees a key."""
    values = cute.make_rmem_tensor(LOAD_COLUMNS, Float32)
    values.fill(0.0)
    if w.n_block_max > w.n_block_min:
        loaded = tmem.load(o_address(s, out_row.group) + c, LOAD_COLUMNS)
        tmem.wait_load()
        for e in cutlass.range_constexpr(LOAD_COLUMNS):
            values[e] = loaded[e] * out_row.scale_0
    if const_expr(out_row.is_pingpong):
        add_columns(s, w, out_row, c, values)
    if const_expr(w.split is not None):
        if out_row.is_partial:
            epilogue.store_partial(spec, a, w.split.slot, out_row.number, Int32(c // LOAD_COLUMNS), values, out_row.lse)
    if out_row.is_output:
        piece = epilogue.first_piece(spec, w, LOAD_COLUMNS) + Int32(c // LOAD_COLUMNS)
        epilogue.store_piece(spec, a, out_row.token, out_row.head, piece, values, ())


@cute.jit
def add_columns(s, w: WorkTileInfo, out_row: OutputRow, c: cutlass.Constexpr, values: cute.Tensor):
    """Add O of group 1, which has the tile's second block, to `values`, O of group 0. The O of a group that saw no key
    of the row may be 0 * NaN: with a scale of 0 it counts as 0."""
    for e in cutlass.range_constexpr(LOAD_COLUMNS):
        values[e] = values[e] if out_row.scale_0 != 0.0 else Float32(0.0)
    if w.n_block_max - w.n_block_min > 1:
        loaded = tmem.load(o_address(s, 1) + c, LOAD_COLUMNS)
        tmem.wait_load()
        for e in cutlass.range_constexpr(LOAD_COLUMNS):
            values[e] = warp.fma(loaded[e], out_row.scale_1, values[e]) if out_row.scale_1 != 0.0 else values[e]


@cute.jit
def correction(spec: cutlass.Constexpr, plan, s):
    """Rescale, normalise and store O of all tiles of the CTA. One warpgroup."""
    # Per block and group, wait for the factor on O, rescale O unless all factors of the warp are 1, and tell the mma
    # warp (p_full_o_rescaled). O of the block before is complete then: the factor comes after S of the block, and its Q
    # @ K^T was issued behind P @ V of the block before. With one group Q @ K^T is a block ahead, and o_full says it.
    #
    # The arrivals at p_full_o_rescaled also tell softmax that the factors have been read: they come behind a vote on
    # those of all lanes.
    #
    # The warp waits for o_full at every block, even if it rescales nothing: a wait tests only the parity of a phase, so
    # after a wait left out, the next one would be satisfied by the phase two before its own.
    #
    # Per tile, wait for row_sum and row_max and for o_full, normalise O and store it. The next tile's first P @ V,
    # which overwrites O, waits for the arrivals behind that. It takes 21 instructions per block of both halves, if
    # nothing is rescaled.
    a = plan.args
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    row = number * 32 + cute.arch.lane_idx()

    def correct_tile(w, _, at):
        i, q = at
        if w.n_block_max > w.n_block_min:
            # the tile's first block has no O to rescale
            for group in cutlass.range_constexpr(groups(spec)):
                recv_acc_scale(spec, s, group, row, i)
                cute.arch.sync_warp()  # all lanes have seen this phase; for other blocks the vote says it
                arrive(s.p_full_o_rescaled + slot_of(spec, group, i), row)
            i = next_iteration(spec, i)
            for _ in cutlass.range(num_iterations(spec, w) - 1, 0, -1, unroll=1):
                for group in cutlass.range_constexpr(groups(spec)):
                    scale = recv_acc_scale(spec, s, group, row, i)
                    if const_expr(groups(spec) < SLOTS):
                        pipeline.mbarrier_wait(s.o_full, i - 1)
                    correction_rescale(spec, o_address(s, group), scale)
                    arrive(s.p_full_o_rescaled + slot_of(spec, group, i), row)
                i = next_iteration(spec, i)
        # the tile's O and LSE: one row per half, or one of both groups
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
        return CorrectionCounters(i, q)

    work.for_each_tile(spec, s, correct_tile, CorrectionCounters(Int32(0), Int32(0)), carries_tile=True)
    # all partial results are stored: softmax may merge them
    if const_expr(s.splits is not None):
        splits.barrier(roles(spec).warps("softmax", "correction"))
