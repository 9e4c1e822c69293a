"""Main loop of warpgroups that have the same 64 rows and share their scores (`tile.s_parts`): it replaces `mainloop`.

With head_dim 512 a warpgroup has half of the columns of O. If both warpgroups also computed all of S, three products
would be issued for two. Here each computes S of its half of a block's keys and writes its P to shared memory, where
P V of both reads it. A row then has one maximum, which both know, but two sums, which meet at the end of the tile.

    mma_one_tile          loops over the KV blocks of a tile, high to low, by segments of the mask
      mma_exact_block     a block in which maxima usually grow: the warpgroups exchange those of their halves first
      mma_blocks          other blocks: exponentials with the old maxima, and no wait between two blocks

Shared memory bounds this loop: 64 rows read all of K and V there, and TMA writes all of it. An MMA of 64 keys reads a
third less for Q K^T than two of 32 keys, and blocks of 128 keys give each warpgroup 64. Such a block has no room, so K
comes in pieces of some columns and V in pieces of some keys (`tile.pieces`), each a stage. Both warpgroups read each
piece, and free it as soon as they have multiplied it, while they multiply the next one. A block takes each stage an
even number of times, so a piece has the same stage and phase in every block.

The order is that of `mainloop`, Q K^T of a block before P V of the block visited before. But from the piece number LEAD
of K on, pieces of K and of V take turns, so that both keep flowing, and the last ones of V are issued in the softmax.

No code may change O while an MMA is in flight, not even in a branch: ptxas would then wait for each single MMA. If P of
a block is out of range, the loop of `mma_blocks` therefore ends. `mma_blocks` then computes this P again and rescales
O, and `mma_one_tile` calls it again for the remaining blocks.

P has two stages: P of a block replaces that of the second block before, which nobody reads any more. A warpgroup that
has S of the block has seen its last pieces of K, for which both warpgroups had freed the first ones, behind that P V.
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
from ..kv import source
from ..schedule.work import WorkTileInfo
from . import precision
from .epilogue import LANES, scales_of
from .groups import o_part, rows_barrier, warpgroup_idx
from .mainloop import finish_qk, recomputed_qk
from .query import receive_q
from .softmax import compute_p, convert_p, init_rows, rescale_o, speculate_p, store_p, transform_scores
from .state import BlockFlags, ConsumerState, Sm90Fragments, Sm90TileState, next_block
from .tile_table import P_STAGES

LEAD = 3  # pieces of K that are multiplied before V of the block before, the last pieces of which come in the softmax


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
def mma_one_tile(spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, at: ConsumerState, capped: cutlass.Constexpr):
    """Do the work of `mainloop.mma_one_tile`. Between two segments no MMA is in flight, P of the block of `at` is
    complete, and its P V is pending."""
    r = tile.r
    # S = Q @ K^T of the highest block, and its P
    receive_q(spec, plan, s, r, tile.w, at.q)
    at = first_half_block(spec, plan, s, tile, at, capped)
    # the other blocks, from high to low
    last, full_min, full_max = tile.w.n_block_max - 1, tile.w.n_block_full_min, tile.w.n_block_full_max
    segments = mask.segments(spec, tile.w.n_block_min, last, full_min, full_max, 0, capped)
    for g in cutlass.range_constexpr(len(segments)):
        segment = segments[g]
        flags = BlockFlags(capped, segment.masked, segment.is_first)
        position = segment.n_block_max - 1
        if const_expr(flags.is_first):
            while position >= segment.n_block_min:
                at = mma_exact_block(spec, plan, s, tile, at, position, flags)
                position -= 1
        else:
            while position >= segment.n_block_min:
                cursor = BlockCursor(at, position)
                at, position = mma_blocks(spec, plan, s, tile, cursor, segment.n_block_min, flags)
    finish_qk(spec, s, r, at)
    return at


@cute.jit
def first_half_block(
    spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, at: ConsumerState, capped: cutlass.Constexpr
):
    """Begin a tile: compute S and P of its highest KV block, that of `at`. Its P V is then pending. Returns `at` with
    the number of keys of the block."""
    init_rows(spec, plan.args, tile, capped)
    n_block = mask_blocks.n_block_at(spec, plan.args, tile.w, tile.w.n_block_max - 1)
    for i in cutlass.range_constexpr(spec.tile.pieces):
        issue_qk(spec, plan, s, tile.r, i)
        if const_expr(i > 0):
            warpgroup.wait_group(1)
            pipeline.consumer_release(s.k.pipe, piece(spec, s, i - 1))
    # wait for S, release the last piece of K
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.k.pipe, piece(spec, s, -1))
    # softmax
    transform_scores(spec, plan.args, tile, n_block, BlockFlags(capped, True, True))
    write_exact_p(spec, s, tile, at)
    rows_barrier(spec)
    return at._replace(keys=cutlass.min(tile.seqlen.kv_len - n_block * spec.tile.n, spec.tile.n))


@cute.jit
def mma_exact_block(
    spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, at: ConsumerState, position: Int32, flags: cutlass.Constexpr
):
    """Issue Q K^T of the block at `position`, which follows that of `at`, and the pending P V, and compute P with the
    maxima of both halves. Returns the `ConsumerState` of the block, the P V of which is then pending."""
    next_at, n_block = next_block(spec, s, at), mask_blocks.n_block_at(spec, plan.args, tile.w, position)
    r = tile.r
    issue_qk_and_pv(spec, plan, s, r, at, Int32(0))
    transform_scores(spec, plan.args, tile, n_block, flags)
    issue_pv(spec, plan, s, r, at, -2)
    issue_pv(spec, plan, s, r, at, -1)
    write_exact_p(spec, s, tile, next_at)
    # wait for P V, release its last V
    warpgroup.wait_group(0)
    release_last_v(spec, s, Int32(1))
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
    tile: Sm90TileState,
    cursor: BlockCursor,
    n_block_min: Int32,
    flags: cutlass.Constexpr,
):
    """Compute the blocks from the cursor down to `n_block_min`, or to one at which maxima have to be exchanged. The
    exponentials of a block, with the old maxima, run under P V of the block before. Returns the next `BlockCursor`."""
    at, position = cursor
    r = tile.r
    fits, has_pv = Int32(1), Int32(0)  # has_pv: whether the end of P V of the block before that of `at` is in flight
    columns = range(const_expr(spec.tile.s_columns // LANES))
    while fits != 0 and position >= n_block_min:
        next_at, n_block = next_block(spec, s, at), mask_blocks.n_block_at(spec, plan.args, tile.w, position)
        issue_qk_and_pv(spec, plan, s, r, at, has_pv)
        # exponentials with the old maxima, between the last pieces of P V
        transform_scores(spec, plan.args, tile, n_block, flags)
        issue_pv(spec, plan, s, r, at, -2)
        row0 = speculate_p(spec, tile, 0, columns)
        store_p(spec, r, row0.words, 0)
        issue_pv(spec, plan, s, r, at, -1)
        row1 = speculate_p(spec, tile, 1, columns)
        store_p(spec, r, row1.words, 1)
        write_p(spec, s, r, next_at)
        # wait until P of both halves is there; accept it if all rows are in range
        sums = [online.join_chains(row.sum_chains, online.add) for row in (row0, row1)]
        exceeds = precision.exceeds_range(spec, sums, row0.overflow | row1.overflow)
        threads = const_expr(128 * spec.tile.warpgroups)
        fits = warp.barrier_red_and(NamedBarrier.MMA, threads, exceeds == False)  # noqa: E712
        fits = cute.arch.make_warp_uniform(fits)
        for row in cutlass.range_constexpr(2):
            r.st.row_sum[row] += sums[row] if fits != 0 else Float32(0.0)
        at, position, has_pv = next_at, position - 1, Int32(1)
    # wait for P V, release its last V
    warpgroup.wait_group(0)
    release_last_v(spec, s, has_pv)
    # the maxima of both halves, P again
    if fits == 0:
        write_exact_p(spec, s, tile, at)
        rescale_o(spec, r)
        rows_barrier(spec)
    return BlockCursor(at, position)


def piece(spec, s, i):
    """Return the `PipelineState` of piece i of a block, in k.pipe and in v.pipe. i: from 0, or from -1 down."""
    return pipeline.state_of(s.k.pipe, i % spec.tile.pieces)


@cute.jit
def issue_qk_and_pv(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, at: ConsumerState, has_pv: Int32):
    """Issue acc_s = Q K^T of the next block and P V of the block of `at`, except for its last two pieces. Wait for S.

    has_pv: whether the end of the P V before that is in flight; its pieces of V are then released."""
    for i in cutlass.range_constexpr(spec.tile.pieces):
        # a piece of S += Q @ K^T, a piece of O += P @ V
        issue_qk(spec, plan, s, r, i)
        if const_expr(i >= LEAD):
            issue_pv(spec, plan, s, r, at, i - LEAD)
        # wait for the pieces before, release them
        warpgroup.wait_group(2 if const_expr(i >= LEAD) else 1)
        if const_expr(i == 0):
            release_last_v(spec, s, has_pv)
        else:
            pipeline.consumer_release(s.k.pipe, piece(spec, s, i - 1))
        if const_expr(i > LEAD):
            pipeline.consumer_release(s.v.pipe, piece(spec, s, i - 1 - LEAD))
    # wait for S, release the last piece of K
    issue_pv(spec, plan, s, r, at, -LEAD)
    warpgroup.wait_group(1)
    pipeline.consumer_release(s.k.pipe, piece(spec, s, -1))
    pipeline.consumer_release(s.v.pipe, piece(spec, s, -LEAD - 1))


@cute.jit
def release_last_v(spec: cutlass.Constexpr, s, condition: Int32):
    """Release the pieces of V that `issue_qk_and_pv` leaves in flight, if `condition` is not 0."""
    for i in cutlass.range_constexpr(LEAD):
        pipeline.consumer_release_if(s.v.pipe, piece(spec, s, i - LEAD), condition != 0)


@cute.jit
def issue_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, i: cutlass.Constexpr):
    """Wait for piece i of K of the next block, and issue acc_s (+)= Q K^T with it."""
    at, steps = piece(spec, s, i), const_expr(spec.padded_qk // spec.tile.pieces // 16)  # of 16 columns
    pipeline.consumer_wait(s.k.pipe, at)
    q, k = recomputed_qk(spec, plan, s, pipeline.stage(s.k.pipe, at))
    wgmma.issue(plan.mma_qk, r.acc_s, q, k, i == 0, o_part(spec), i * steps)


@cute.jit
def issue_pv(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, at: ConsumerState, i: cutlass.Constexpr):
    """Wait for piece i of V of the block of `at`, zero its rows past the last key, which hold whatever their page holds
    (0 * NaN is NaN), and issue acc_o += P V with it. i: from 0, or from -1 down."""
    t, stage = spec.tile, pipeline.stage(s.v.pipe, piece(spec, s, i))
    pipeline.consumer_wait(s.v.pipe, piece(spec, s, i))
    keys, first = const_expr(t.n // t.pieces), const_expr(i % t.pieces * (t.n // t.pieces))
    valid = at.keys - first
    if valid > 0 and valid < keys and source(spec).has_partial_tail(keys, valid):
        own = cute.local_tile(s.v.smem[None, None, stage], (keys, spec.padded_vo // t.o_parts), (0, o_part(spec)))
        source(spec).zero_tail(spec, own, valid, cute.arch.thread_idx()[0] % 128, 128)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + warpgroup_idx(spec), number_of_threads=128)
    p, v = r.shared_p[None, None, None, at.p], r.v[None, None, None, stage]
    wgmma.issue(plan.mma_pv, r.acc_o, p, v, False, o_part(spec), first // 16)


@cute.jit
def update_common_max(spec: cutlass.Constexpr, s, tile: Sm90TileState):
    """Bring row_max up to date with the scores of a block in both warpgroups, as `softmax.update_max` does."""
    r = tile.r
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
    online.update_max(r.st, both, scales_of(r).reduced, 1, tile.rescale_params, False)


@cute.jit
def write_exact_p(spec: cutlass.Constexpr, s, tile: Sm90TileState, at: ConsumerState):
    """Compute P of the block of `at` with the maxima of both halves, add it to row_sum, and write it to its stage. O is
    then to be rescaled, and P complete after a barrier."""
    update_common_max(spec, s, tile)
    for row in cutlass.range_constexpr(cute.size(tile.r.tokens)):
        compute_p(tile, row)
        convert_p(spec, tile.r, row)
    write_p(spec, s, tile.r, at)


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
    for i in cutlass.range_constexpr(spec.tile.pieces):
        issue_pv(spec, plan, s, r, at, i)
        if const_expr(i > 0):
            warpgroup.wait_group(1)
            pipeline.consumer_release(s.v.pipe, piece(spec, s, i - 1))
    own, lane = o_part(spec), cute.arch.lane_idx() % LANES
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        s.scores.row_sum[r.cols[row, 0][0], lane, own] = r.st.row_sum[row]
    rows_barrier(spec)
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        r.st.row_sum[row] += s.scores.row_sum[r.cols[row, 0][0], lane, 1 - own]
    # release the last piece of V
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.v.pipe, piece(spec, s, -1))
