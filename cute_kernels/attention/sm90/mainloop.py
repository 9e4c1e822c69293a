"""Main loop of the `mma` role: the KV blocks of one work tile. One warpgroup has 64 rows of the tile.

    mma (mma.py)          loops over work tiles
      mma_one_tile        loops over the KV blocks of a tile, high to low, one loop per mask segment
        mma_one_n_block   S = Q @ K^T of one block, softmax, O += P @ V of the block before

Blocks are visited from the highest to the lowest. The overlap is that of FlashAttention-3. Within a warpgroup, Q K^T
of a block and P V of the block visited before are in flight together. The start of the softmax runs under that P V (in
16 bits half of the thread's first row, in FP8 that row), and the rest under the MMAs of the other warpgroups: named
barriers let warpgroups issue MMAs in turn (`groups`). So a tile has a half block at each end: `first_half_block`
computes P of the highest block, `last_half_block` issues P V of the lowest one together with the first Q K^T of the
next tile. With skip-softmax, `skip` replaces this file's `mma_one_tile` and `last_half_block`.

Arguments: s is the shared storage, r the warpgroup's fragments (acc_s and acc_o among them; a thread has two rows of
each), w the published work tile, a the launch arguments. at is a `ConsumerState`, which stage of each pipeline comes
next: at.q and at.kv are items, numbers that count what has passed through a pipeline.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import pipeline, warp, wgmma
from .. import geometry, logits, mask, mask_blocks
from .. import softmax as online
from ..barriers import NamedBarrier
from ..kv import pages, source
from ..schedule.work import WorkTileInfo
from . import precision, promotion
from .epilogue import LANES
from .groups import o_part, row_group, warp_scheduler_barrier_arrive, warp_scheduler_barrier_sync
from .query import operand_of, overlap_next_qk, receive_q, release_q
from .roles import roles
from .softmax import (
    compute_p,
    convert_p,
    init_rows,
    mask_and_update_max,
    rescale_o,
    rows_of,
    speculate_p,
    store_p,
    transform_scores,
    validate_p,
)
from .state import BlockFlags, ConsumerState, Sm90Fragments, Sm90TileState, next_block


@cute.jit
def mma_one_tile(spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, at: ConsumerState, capped: cutlass.Constexpr):
    """Compute the KV blocks of a work tile, all but the P V of the lowest one, which `last_half_block` issues.

    at: pipeline items of the tile's Q and of its highest KV block. capped: whether scores are soft-capped.
    Returns the `ConsumerState` of the lowest block.
    """
    # S = Q @ K^T of the highest block, unless the tile before has issued it
    r = tile.r
    if const_expr(not overlap_next_qk(spec)):
        issue_first_qk(spec, plan, s, r, tile.w, at)
    first_half_block(spec, plan.args, s, tile, at, capped)

    # The other blocks, from high to low. A warpgroup without query tokens (its 64 rows are padding) computes none.
    n_block_min, n_block_max = tile.w.n_block_min, tile.w.n_block_max - 1
    if const_expr(spec.tile.m > 64):
        if first_row(spec, tile.w) >= geometry.num_rows(tile.w.sequence.q_len, tile.w.pack_factor):
            n_block_min = n_block_max
    full_min, full_max = tile.w.n_block_full_min, tile.w.n_block_full_max
    exact = precision.exact_max_blocks(spec, tile.w.sequence.kv_len)
    segments = mask.segments(spec, n_block_min, n_block_max, full_min, full_max, exact, capped)
    for g in cutlass.range_constexpr(len(segments)):
        segment = segments[g]
        flags = BlockFlags(capped, segment.masked, segment.is_first)

        def compute_block(at, n_block, flags=flags):
            return mma_one_n_block(spec, plan, s, tile, at, n_block, flags)

        at = for_each_n_block(spec, plan, tile, segment.n_block_min, segment.n_block_max, compute_block, at)
    # Pass the stages of the blocks that were not computed. Then add the promoted sums to O and release the Q stage.
    if const_expr(spec.tile.m > 64):
        at = drain_blocks(spec, s, at, n_block_min - tile.w.n_block_min)
    finish_qk(spec, s, r, at)
    return at


@cute.jit
def for_each_n_block(
    spec: cutlass.Constexpr, plan, tile: Sm90TileState, lo: Int32, hi: Int32, body: cutlass.Constexpr, at: ConsumerState
):
    """Call `at = body(at, n_block)` for the KV blocks of the tile at positions [lo, hi), from high to low. Return the
    last state."""
    r = tile.r
    if const_expr(r.promoted is None):
        for position in cutlass.range(hi - 1, lo - 1, -1, unroll=1):
            at = body(at, mask_blocks.n_block_at(spec, plan.args, tile.w, position))
    else:  # the same loop, left after every `promote_interval` blocks to add acc_o to sums in fp32 (`promotion`)
        while hi > lo:
            until = cutlass.max(lo, hi - r.promoted.counts[0])
            for position in cutlass.range(hi - 1, until - 1, -1, unroll=1):
                at = body(at, mask_blocks.n_block_at(spec, plan.args, tile.w, position))
            promotion.promote(spec, r.promoted, r.acc_o, hi - until)
            hi = until
    return at


@cute.jit
def first_half_block(spec: cutlass.Constexpr, a, s, tile: Sm90TileState, at: ConsumerState, capped: cutlass.Constexpr):
    """Begin a tile: wait for S of its highest KV block, that of `at`, and compute P into r.p. Its P V is then pending.

    The highest block is the only one that may reach past the last key.
    """
    r = tile.r
    init_rows(spec, a, tile, capped)
    n_block = mask_blocks.n_block_at(spec, a, tile.w, tile.w.n_block_max - 1)
    logits.fetch_mask(spec, rows_of(tile), tile.mask_source, n_block * spec.tile.n, LANES)
    # wait for S, release the K stage
    warpgroup.wait_group(0)
    pipeline.consumer_release(s.k.pipe, at.kv)
    # softmax
    mask_and_update_max(spec, a, tile, n_block, BlockFlags(capped, True, True))
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        compute_p(tile, row)
        convert_p(spec, r, row)
    zero_tail(spec, s, tile, n_block, at)
    promotion.reset(spec, r.promoted)


@cute.jit
def zero_tail(spec: cutlass.Constexpr, s, tile: Sm90TileState, n_block: Int32, at: ConsumerState):
    """Zero the rows of V past the last key, which hold whatever their page holds: 0 * NaN is NaN."""
    valid = tile.seqlen.kv_len - n_block * spec.tile.n
    if const_expr(source(spec).PARTIAL_TAIL and not precision.is_prepared(spec, pages.V)):
        if valid < spec.tile.n and source(spec).has_partial_tail(spec.tile.n, valid):
            pipeline.consumer_wait(s.v.pipe, at.kv)
            threads, tid = 128 * spec.tile.warpgroups, cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
            source(spec).zero_tail(spec, s.v.smem[None, None, pipeline.stage(s.v.pipe, at.kv)], valid, tid, threads)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=NamedBarrier.MMA, number_of_threads=threads)


@cute.jit
def mma_one_n_block(
    spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, at: ConsumerState, n_block: Int32, flags: cutlass.Constexpr
):
    """Issue Q K^T of `n_block`, the block after that of `at`, and the pending P V of the block of `at`, and compute the
    softmax of `n_block` under that P V and the other warpgroups' MMAs.

    Returns the `ConsumerState` of `n_block`, the P V of which is then pending.
    """
    # It waits for K of `n_block`, the warpgroup's turn and V of the block before; it releases K when S is read and V
    # when P V is done. Q K^T is issued first, because the softmax needs S before O. r.p is single: row 0 of P can be
    # written only after `wait_group(0)`, when P V no longer reads it. Except in the blocks with `flags.is_first`, the
    # highest ones, exponentials do not wait for the maxima (`speculate_p`), which made FP8 17 % faster
    # (bench/notes/attention-sm90.md).
    i, next_at, a, r = at.kv, next_block(spec, s, at), plan.args, tile.r
    pipeline.consumer_wait(s.k.pipe, next_at.kv)
    fence_before_mma(spec, pages.K)
    warp_scheduler_barrier_sync(spec)
    # S = Q @ K^T
    issue_qk(spec, plan, s, r, next_at)
    # O += P @ V of the block before
    issue_pv(spec, plan, s, r, i)
    warp_scheduler_barrier_arrive(spec)
    if const_expr(flags.masked):
        logits.fetch_mask(spec, rows_of(tile), tile.mask_source, n_block * spec.tile.n, LANES)
    # wait for S
    warpgroup.wait_group(1)
    # `consumer_release_after` releases K only if its value is at least `below`. That always holds (exp >= 0 >=
    # -|scale|), but the compiler cannot know it: it keeps the release behind the scores, `wait_group(0)` behind that.
    below = -cute.math.absf(r.call_scales.reduced)
    if const_expr(flags.is_first):
        # the exact maxima first, then the exponentials of row 0
        mask_and_update_max(spec, a, tile, n_block, flags)
        compute_p(tile, 0)
        # release the K stage; wait for P V, release the V stage
        pipeline.consumer_release_after(s.k.pipe, next_at.kv, wgmma.rows_cols(r.acc_s)[0, 0], below)
        warpgroup.wait_group(0)
        pipeline.consumer_release(s.v.pipe, i)
        # row 0 becomes an operand while row 1 is computed
        convert_p(spec, r, 0)
        compute_p(tile, 1)
        convert_p(spec, r, 1)
        rescale_o(spec, r)
    else:
        # Exponentials with the old maxima: of row 0 as many columns as registers allow while P V still reads r.p.
        transform_scores(spec, a, tile, n_block, flags)
        n = const_expr(spec.tile.n // LANES)
        cut = const_expr(precision.columns_under_pv(spec, n))
        front = speculate_p(spec, tile, 0, range(cut))
        # release the K stage; wait for P V, release the V stage
        pipeline.consumer_release_after(s.k.pipe, next_at.kv, online.join_chains(front.sum_chains, online.add), below)
        warpgroup.wait_group(0)
        pipeline.consumer_release(s.v.pipe, i)
        # The sign bit of a sum of exponentials is always 0. OR-ing it into P makes P depend on a value that is read
        # after the wait; otherwise the compiler waits after each MMA. (A NaN may have the bit: its P stays NaN.)
        zero = Uint32(warp.bits(r.st.row_sum[0]) >> Int32(31))
        # the rest of row 0 and row 1
        row0 = speculate_p(spec, tile, 0, range(cut, n), front) if const_expr(cut < n) else front._replace(words=[])
        store_p(spec, r, [word | zero for word in front.words] + row0.words, 0)
        row1 = speculate_p(spec, tile, 1, range(n))
        store_p(spec, r, row1.words, 1)
        # accept P, or compute it again with new maxima and rescale O
        row_sums = [online.join_chains(row.sum_chains, online.add) for row in (row0, row1)]
        validate_p(spec, tile, row_sums, row0.overflow | row1.overflow)
    return next_at


@cute.jit
def last_half_block(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, next_w: WorkTileInfo, at: ConsumerState):
    """Finish a tile: issue the pending P V, that of the block of `at`, and wait for it. If Q has room, the first Q K^T
    of the next tile is issued too and runs under this tile's epilogue.

    That Q K^T is issued even after the last tile, where nobody reads its result: a branch around it would make the
    compiler wait after each MMA in flight.
    """
    if const_expr(overlap_next_qk(spec)):
        if next_w.is_valid != 0:
            wait_first_qk(spec, plan, s, r, next_w, next_tile_state(spec, s, at))
        warp_scheduler_barrier_sync(spec)
        # O += P @ V, and S = Q @ K^T of the next tile
        issue_pv(spec, plan, s, r, at.kv)
        issue_qk(spec, plan, s, r, next_tile_state(spec, s, at))
        warp_scheduler_barrier_arrive(spec)
        warpgroup.wait_group(1)
    else:
        # O += P @ V
        issue_pv(spec, plan, s, r, at.kv)
        warpgroup.wait_group(0)
    # release the V stage
    pipeline.consumer_release(s.v.pipe, at.kv)


def next_tile_state(spec, s, at: ConsumerState):
    """Return the `ConsumerState` of the first block of the next tile."""
    return next_block(spec, s, at)._replace(q=at.q + 1, kept_in_turn=Int32(1))


@cute.jit
def wait_first_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, w: WorkTileInfo, at: ConsumerState):
    """Wait for the operands of a tile's first Q K^T: Q, which `receive_q` makes an operand, and the first K."""
    receive_q(spec, plan, s, r, w, at.q)
    pipeline.consumer_wait(s.k.pipe, at.kv)
    fence_before_mma(spec, pages.K)


@cute.jit
def issue_first_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, w: WorkTileInfo, at: ConsumerState):
    wait_first_qk(spec, plan, s, r, w, at)
    if const_expr(precision.prepares_any(spec) and spec.tile.o_parts > 1):
        wgmma.issue(plan.mma_qk, r.acc_s, *recomputed_qk(spec, plan, s, 0), True)
    else:
        issue_qk(spec, plan, s, r, at)


def recomputed_qk(spec, plan, s, stage):
    """Return the operands of Q K^T in the only stage of Q and in a stage of K. With head_dim 512, the compiler would
    keep up to 64 descriptors in registers and spill some, or compute each with 6 instructions instead of 2."""
    q, k = (wgmma.recomputed(x) for x in (s.q, s.k.smem))
    qk = plan.mma_qk.get_slice(row_group(spec) * 128)
    a = plan.mma_qk.make_fragment_A(qk.partition_A(q))
    b = plan.mma_qk.make_fragment_B(qk.partition_B(k))
    return a[None, None, None, 0], b[None, None, None, stage]


@cute.jit
def issue_qk(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, at: ConsumerState):
    """Issue acc_s = Q K^T of items at.q and at.kv, both of which are full."""
    q = operand_of(spec, s, r, at.q)
    wgmma.issue(plan.mma_qk, r.acc_s, q, r.k[None, None, None, pipeline.stage(s.k.pipe, at.kv)], True)


@cute.jit
def issue_pv(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, i: pipeline.PipelineState):
    """Wait for V of item i, then issue acc_o += P V."""
    pipeline.consumer_wait(s.v.pipe, i)
    fence_before_mma(spec, pages.V)
    wgmma.issue(plan.mma_pv, r.acc_o, r.p, r.v[None, None, None, pipeline.stage(s.v.pipe, i)], False, o_part(spec))


def fence_before_mma(spec, which):
    """Make a stage of K or V that its source filled visible to MMAs. One that was prepared needs nothing."""
    if not precision.is_prepared(spec, which):
        source(spec).fence_before_mma()


@cute.jit
def finish_qk(spec: cutlass.Constexpr, s, r: Sm90Fragments, at: ConsumerState):
    """After the last Q K^T of a tile: add the promoted sums to O and release the Q stage."""
    promotion.finalize(r.promoted, r.acc_o)
    release_q(spec, s, at.q)


def first_row(spec, w):
    """Return this warpgroup's first row of the tile, counted among the rows of the sequence."""
    return w.m_block * spec.tile.m + 64 * row_group(spec)


@cute.jit
def drain_blocks(spec: cutlass.Constexpr, s, at: ConsumerState, count: Int32):
    """Pass `count` KV blocks without computing them: wait for K and V, take the turn, release both.

    A warpgroup without query tokens calls it. Returns the `ConsumerState` of the lowest block.
    """
    i = at.kv
    for _ in cutlass.range(count, unroll=1):
        next_kv = pipeline.next_item(s.k.pipe, i)
        pipeline.consumer_wait(s.k.pipe, next_kv)
        warp_scheduler_barrier_sync(spec)
        warp_scheduler_barrier_arrive(spec)
        pipeline.consumer_release(s.k.pipe, next_kv)
        pipeline.consumer_wait(s.v.pipe, i)
        pipeline.consumer_release(s.v.pipe, i)
        i = next_kv
    return at._replace(kv=i)
