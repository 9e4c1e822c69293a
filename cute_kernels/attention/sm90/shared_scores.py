"""Main loop of warpgroups that have the same 64 rows and share their scores (`tile.s_parts`): it replaces `mainloop`.

With head_dim 512 a warpgroup has half of the columns of O. If both warpgroups also computed all of S, three products
would be issued for two. Here each computes S of its half of a block's keys and writes its P to shared memory, where
P V of both reads it. A row then has one maximum, which both know, but two sums, which meet at the end of the tile.

    mma_one_tile          loops over the KV blocks of a tile, high to low, by segments of the mask
      mma_exact_block     a block in which maxima usually grow: the warpgroups exchange those of their halves first
      mma_blocks          other blocks: exponentials with the old maxima, and no wait between two blocks

A block needs half of the keys of K and half of the columns of V per warpgroup. Q K^T of one warpgroup, that of the
other, and P V of both follow each other on the tensor cores, so that each half of K and of V is free for more than half
of the time, in which the next one arrives: one stage of each suffices. A barrier says that P of both halves is there,
and whether P of some row left the range of its type. It comes while P V of the block before still runs.

No code may change O while an MMA is in flight, not even in a branch: ptxas would then wait for each single MMA. If P of
a block is out of range, the loop of `mma_blocks` therefore ends. `mma_blocks` then computes this P again and rescales
O, and `mma_one_tile` calls it again for the remaining blocks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import layout, pipeline, warp, wgmma
from .. import mask, mask_blocks
from .. import softmax as online
from ..barriers import NamedBarrier
from ..schedule.work import WorkTileInfo
from . import precision
from .epilogue import LANES, scales_of
from .groups import o_part, rows_barrier, warp_scheduler_barrier_arrive, warp_scheduler_barrier_sync
from .mainloop import finish_qk, issue_recomputed_qk, wait_first_qk, zero_tail
from .softmax import compute_p, convert_p, init_rows, rescale_o, speculate_p, store_p, transform_scores
from .state import BlockFlags, ConsumerState, Sm90Fragments, Sm90TileState, next_block, v_item
from .tile_table import P_STAGES


@dataclass(frozen=True)
class ScoresSmem:
    """Shared memory of warpgroups that have the same rows. p (m, n, P_STAGES): P of blocks. row_max (m, s_parts):
    maxima of rows. row_sum (m, LANES, s_parts): sums of rows."""

    p: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


def allocate(spec, smem):
    """Allocate `ScoresSmem`; None unless warpgroups share scores."""
    t = spec.tile
    if t.s_parts == 1:
        return None
    kind = layout.smem_layout((t.m, t.n), P_STAGES, precision.of(spec).mma_type)
    return ScoresSmem(
        smem.allocate_tensor(precision.of(spec).mma_type, kind.outer, 1024, kind.inner),
        smem.allocate_tensor(Float32, cute.make_layout((t.m, t.s_parts)), 16),
        smem.allocate_tensor(Float32, cute.make_layout((t.m, LANES, t.s_parts), stride=(LANES, 1, LANES * t.m)), 16),
    )


@cute.jit
def mma_one_tile(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    at: ConsumerState,
    capped: cutlass.Constexpr,
):
    """Do the work of `mainloop.mma_one_tile`. Between two segments no MMA is in flight, P of the block of `at` is
    complete, and its P V is pending."""
    # S = Q @ K^T of the highest block, and its P
    wait_first_qk(spec, plan, s, r, tile.w, at)
    issue_recomputed_qk(spec, plan, s, r, at)
    first_half_block(spec, plan.args, s, r, tile, at, capped)
    # the other blocks, from high to low
    last, full_min, full_max = tile.w.n_block_max - 1, tile.w.n_block_full_min, tile.w.n_block_full_max
    segments = mask.segments(spec, tile.w.n_block_min, last, full_min, full_max, 0, capped)
    for g in cutlass.range_constexpr(len(segments)):
        segment = segments[g]
        flags = BlockFlags(capped, segment.masked, segment.is_first)
        position = segment.n_block_max - 1
        if const_expr(flags.is_first):
            while position >= segment.n_block_min:
                at = mma_exact_block(spec, plan, s, r, tile, at, position, flags)
                position -= 1
        else:
            while position >= segment.n_block_min:
                cursor = BlockCursor(at, position)
                at, position = mma_blocks(spec, plan, s, r, tile, cursor, segment.n_block_min, flags)
    finish_qk(spec, s, r, at)
    return at


@cute.jit
def first_half_block(
    spec: cutlass.Constexpr,
    a,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    at: ConsumerState,
    capped: cutlass.Constexpr,
):
    """Begin a tile: wait for S of its highest KV block, that of `at`, and compute P. Its P V is then pending."""
    init_rows(spec, a, r, tile, capped)
    n_block = mask_blocks.n_block_at(spec, a, tile.w, tile.w.n_block_max - 1)
    # wait for S, release the K stage
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.k_pipe, at.kv)
    # softmax
    transform_scores(spec, a, r, tile, n_block, BlockFlags(capped, True, True))
    write_exact_p(spec, s, r, tile, at)
    zero_tail(spec, s, tile, n_block, at)
    rows_barrier(spec)


@cute.jit
def mma_exact_block(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    at: ConsumerState,
    position: Int32,
    flags: cutlass.Constexpr,
):
    """Issue Q K^T of the block at `position`, which follows that of `at`, and the pending P V, and compute P with the
    maxima of both halves. Returns the `ConsumerState` of the block, the P V of which is then pending."""
    next_at = issue_next_qk(spec, plan, s, r, at)
    # O += P @ V of the block before
    issue_pv(spec, plan, s, r, at)
    # wait for S
    warpgroup.wait_group(1)
    transform_scores(spec, plan.args, r, tile, mask_blocks.n_block_at(spec, plan.args, tile.w, position), flags)
    write_exact_p(spec, s, r, tile, next_at)
    # release the K stage; wait for P V, release the V stage
    pipeline.consumer_release_after(s.k_pipe, next_at.kv, wgmma.rows_cols(r.acc_s)[0, 0], least_sum(tile))
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.v_pipe, v_item(at))
    rescale_o(spec, r)
    rows_barrier(spec)
    return next_at


class BlockCursor(NamedTuple):
    """at: the `ConsumerState` of the last block of which P was computed. position: the next block."""

    at: ConsumerState
    position: Int32


@cute.jit
def mma_blocks(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    cursor: BlockCursor,
    n_block_min: Int32,
    flags: cutlass.Constexpr,
):
    """Compute the blocks from the cursor down to `n_block_min`, or to one at which maxima have to be exchanged. The
    exponentials of a block, with the old maxima, run under P V of the block before and the other warpgroup's MMAs.
    Returns the next `BlockCursor`."""
    at, position = cursor
    fits, has_pv = Int32(1), Int32(0)  # has_pv: whether P V of the block before that of `at` is in flight
    while fits != 0 and position >= n_block_min:
        next_at = issue_next_qk(spec, plan, s, r, at)
        # wait for the P V in flight, release its V stage, which is the only one
        warpgroup.wait_group(1)
        pipeline.consumer_release_if(s.v_pipe, v_item(at), has_pv != 0)
        # O += P @ V of the block before
        issue_pv(spec, plan, s, r, at)
        # wait for S
        warpgroup.wait_group(1)
        transform_scores(spec, plan.args, r, tile, mask_blocks.n_block_at(spec, plan.args, tile.w, position), flags)
        # exponentials with the old maxima; release the K stage
        columns = range(const_expr(spec.tile.s_columns // LANES))
        rows = [speculate_p(spec, r, tile, row, columns) for row in range(2)]
        sums = [online.join_chains(row.sum_chains, online.add) for row in rows]
        pipeline.consumer_release_after(s.k_pipe, next_at.kv, sums[0], least_sum(tile))
        for row in cutlass.range_constexpr(2):
            store_p(spec, r, rows[row].words, row)
        write_p(spec, s, r, next_at)
        # wait until P of both halves is there; accept it if all rows are in range
        exceeds = precision.exceeds_range(spec, sums, rows[0].overflow | rows[1].overflow)
        threads = const_expr(128 * spec.tile.warpgroups)
        fits = warp.barrier_red_and(NamedBarrier.MMA, threads, exceeds == False)  # noqa: E712
        fits = cute.arch.make_warp_uniform(fits)
        for row in cutlass.range_constexpr(2):
            r.st.row_sum[row] += sums[row] if fits != 0 else Float32(0.0)
        at, position, has_pv = next_at, position - 1, Int32(1)
    # wait for the last P V, release the V stage
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.v_pipe, v_item(at))
    # the maxima of both halves, P again
    if fits == 0:
        write_exact_p(spec, s, r, tile, at)
        rescale_o(spec, r)
        rows_barrier(spec)
    return BlockCursor(at, position)


@cute.jit
def issue_next_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, at: ConsumerState):
    """Wait for K of the block after that of `at`, and issue acc_s = Q K^T in this warpgroup's turn. Returns the
    `ConsumerState` of that block."""
    next_at = next_block(spec, s, at)
    pipeline.consumer_wait(s.k_pipe, next_at.kv)
    warp_scheduler_barrier_sync(spec)
    issue_recomputed_qk(spec, plan, s, r, next_at)
    warp_scheduler_barrier_arrive(spec)
    return next_at


@cute.jit
def issue_pv(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, at: ConsumerState):
    """Wait for V of the block of `at`, then issue acc_o += P V."""
    v = v_item(at)
    pipeline.consumer_wait(s.v_pipe, v)
    p = r.shared_p[None, None, None, at.p]
    wgmma.issue(plan.mma_pv, r.acc_o, p, r.v[None, None, None, pipeline.stage(s.v_pipe, v)], False)


def least_sum(tile: Sm90TileState):
    """Return what no sum of exponentials is below, for `pipeline.consumer_release_after`. See `mainloop`."""
    return -cute.math.absf(tile.scales.reduced)


@cute.jit
def update_common_max(spec: cutlass.Constexpr, s, r: Sm90Fragments, tile: Sm90TileState):
    """Bring row_max up to date with the scores of a block in both warpgroups, as `softmax.update_max` does."""
    top = online.lane_row_max(r.st, wgmma.rows_cols(r.acc_s), r.offsets)
    count, own = const_expr(cute.size(r.tokens)), o_part(spec)
    both = cute.make_rmem_tensor((count, 1), Float32)
    for row in cutlass.range_constexpr(count):
        both[row, 0] = cute.arch.warp_reduction_max(top[row], threads_in_group=LANES)
        if cute.arch.lane_idx() % LANES == 0:
            s.scores.row_max[r.cols[row, 0][0], own] = both[row, 0]
    rows_barrier(spec)
    for row in cutlass.range_constexpr(count):
        both[row, 0] = cute.arch.fmax(both[row, 0], s.scores.row_max[r.cols[row, 0][0], 1 - own])
    online.update_max(r.st, both, scales_of(r, tile.scales).reduced, 1, tile.rescale_params, False)


@cute.jit
def write_exact_p(spec: cutlass.Constexpr, s, r: Sm90Fragments, tile: Sm90TileState, at: ConsumerState):
    """Compute P of the block of `at` with the maxima of both halves, add it to row_sum, and write it to its stage. O is
    then to be rescaled, and P complete after a barrier."""
    update_common_max(spec, s, r, tile)
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        compute_p(r, tile, row)
        convert_p(spec, r, row)
    write_p(spec, s, r, at)


@cute.jit
def write_p(spec: cutlass.Constexpr, s, r: Sm90Fragments, at: ConsumerState):
    """Write this warpgroup's part of P, in r.p, to the stage of the block of `at`."""
    t, thread = spec.tile, cute.arch.thread_idx()[0] % 128
    mma = wgmma.mma_nt(precision.of(spec).mma_type, 1, t.s_columns, True)
    part = cute.local_tile(s.scores.p[None, None, at.p], (t.m, t.s_columns), (0, o_part(spec)))
    wgmma.store_a(mma, r.p, part, thread)
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def last_half_block(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, next_w: WorkTileInfo, at: ConsumerState):
    """Finish a tile: issue the pending P V, wait for it, and add up the sums of both halves."""
    # O += P @ V
    issue_pv(spec, plan, s, r, at)
    own, lane = o_part(spec), cute.arch.lane_idx() % LANES
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        s.scores.row_sum[r.cols[row, 0][0], lane, own] = r.st.row_sum[row]
    rows_barrier(spec)
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        r.st.row_sum[row] += s.scores.row_sum[r.cols[row, 0][0], lane, 1 - own]
    # release the V stage
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.v_pipe, v_item(at))
