"""Skip-softmax: KV blocks that hardly count cost Q K^T and their maxima, but neither exponentials nor P V.

Rule. Each warpgroup votes on each block by itself, with its 64 rows together. It leaves the block out if every row that
sees a key of it finds exp(m_j - m) < threshold / kv_len. m_j is the block's exact maximum of the row's logits, after
scale, soft cap and masks; m is the exact maximum of the earlier blocks that were kept. It has a register of its own
(`SkipVoteState.kept_max`), because row_max of `softmax.SoftmaxState` may lag behind. Rows past the sequence and rows
that see no key of the block agree to anything. The first block of a tile, the highest, is always kept. A block that is
left out is in neither O nor LSE.

Schedule. `mma_one_n_block` issues the pending P V, if any, together with Q K^T, as the dense loop does, and finds the
maxima and votes under that P V; the exponentials run under the MMAs of the other warpgroup. The work of a warp between
one Q K^T and the next bounds how fast blocks are left out, so lanes share their maxima only for blocks that are kept,
and the vote is one reducing barrier: with three smaller changes, that took 75 % skipped from 1.32 to 1.39 times the
dense speed (H200, b1 s32768).

A vote costs exponentials their place under the own P V, so a warpgroup does not vote where that hardly pays: where it
has kept `STEADY` blocks in turn (`tile_table`), it keeps twice as many without a vote, in the dense loop, then votes on
`VOTES` blocks and decides again. The maxima of blocks that are kept without a vote do not enter m. The first blocks of
a tile say little about the others, since m is small there: with votes on 8 blocks and then 56 without, 75 % left out
ran at 1.19 instead of 1.47 times the dense speed.

V of a block that all warpgroups leave out is not fetched: its loaders wait for the votes (`load_v`), and V of a kept
block arrives under its exponentials. V is always fetched if its pages are gathered, since those loaders look up page
ids a block ahead, or if it is prepared.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import pipeline, warp
from .. import geometry, load, logits, mask, skip_rule
from .. import softmax as online
from ..barriers import NamedBarrier
from ..kv import pages, rings, source
from ..kv.pages import KVBlock
from ..schedule import work
from ..schedule.work import WorkTileInfo
from . import mainloop
from .epilogue import LANES, scales_of
from .groups import warp_scheduler_barrier_arrive, warp_scheduler_barrier_sync, warpgroup_idx
from .mainloop import (
    fence_before_mma,
    finish_qk,
    first_half_block,
    issue_first_qk,
    issue_pv,
    issue_qk,
    next_tile_state,
    wait_first_qk,
)
from .query import overlap_next_qk
from .roles import WARPS
from .softmax import compute_p, convert_p, rescale_o, rows_of, transform_scores
from .state import BlockFlags, ConsumerState, Sm90Fragments, Sm90TileState
from .tile_table import STEADY, UNASKED, VOTES, exact_max_blocks, keeps_unasked, waits_for_votes


class SkipVoteState(NamedTuple):
    """State of a warpgroup's votes on the blocks of a tile.

    log2_threshold: log2(threshold / kv_len). lane_max, kept_max: (rows,), maxima of raw scores of each row: this lane's
    in the current block, and the row's in the blocks before that were not left out.
    """

    tile: Sm90TileState
    log2_threshold: Float32
    lane_max: cute.Tensor
    kept_max: cute.Tensor


class SkipVotesSmem(NamedTuple):
    """Votes of the warpgroups on the blocks in v.pipe, for the loaders of V.

    flags (stages, warpgroups): 1 if the warpgroup leaves the block out. mbarriers: one per flag. Flags need no release:
    a warpgroup writes one again only after V of the block before in that stage has arrived or was left out, so its
    loaders have read the flag.
    """

    flags: cute.Tensor
    mbarriers: cute.Pointer


def allocate(spec, smem) -> Any:
    """Allocate the `SkipVotesSmem`; None if no loader waits for votes."""
    if not waits_for_votes(spec):
        return None
    words = smem.allocate_tensor(Int32, cute.make_layout((spec.tile.stages, spec.tile.warpgroups)), 16)
    return SkipVotesSmem(words, pipeline.make_mbarriers(smem, cute.size(words), 1))


@cute.jit
def publish_vote(spec: cutlass.Constexpr, s, skips: Int32, stage: Int32):
    """Tell the loaders of V whether this warpgroup leaves out the block in `stage` of v.pipe."""
    if const_expr(waits_for_votes(spec)):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx() % WARPS) == 0:
            with cute.arch.elect_one():
                s.skip_votes.flags[stage, warpgroup_idx(spec)] = skips
                cute.arch.mbarrier_arrive(s.skip_votes.mbarriers + (warpgroup_idx(spec) * spec.tile.stages + stage))


@cute.jit
def all_skip(spec: cutlass.Constexpr, s, item: Int32):
    """Return 1 if all warpgroups leave out the block of `item`, in a loading warp. Waits no longer than for the first
    warpgroup that keeps it."""
    skips, stage, phase = Int32(1), pipeline.stage(s.v.pipe, item), pipeline.phase(s.v.pipe, item)
    for g in cutlass.range_constexpr(spec.tile.warpgroups):
        if skips != 0:
            cute.arch.mbarrier_wait(s.skip_votes.mbarriers + (g * spec.tile.stages + stage), phase)
            skips = cute.arch.make_warp_uniform(s.skip_votes.flags[stage, g])
    return skips


@cute.jit
def load_v(spec: cutlass.Constexpr, plan, s, loader: Int32):
    """Run the `load_v` role in one warp: its share of V of all work tiles, except of blocks that all warpgroups leave
    out. Loader 0 loads Q, too."""
    # As in `load.load_kv`, a warp waits for a tile in work_pipe and, for each of its KV blocks from high to low, for a
    # free stage of v.pipe, which it fills by TMA. Before that it waits for the votes on the block. A block that all
    # warpgroups leave out passes its stage unfilled, with zero bytes, so that items of K and V keep the same number
    # and the mma role waits for every V alike. Q goes first, because the tile's first Q K^T needs it.
    a, into = plan.args, rings.load_target(plan, s, pages.V)
    page_ids = source(spec).page_id_cache(spec, into.op)

    def load_tile(w, _, items):
        i, q = items
        if w.n_block_max > w.n_block_min:
            head = geometry.kv_head_of(spec, a, w)
            sequence_pages = pages.of_sequence(a, w.batch_idx, pages.V)
            # Q
            if loader == 0:
                load.load_or_reserve_q(spec, plan, s, w, q)
            # V of each block, once the votes on it are known
            for position in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
                if all_skip(spec, s, i) != 0:
                    pipeline.producer_acquire_tx(s.v.pipe, i, Int32(0))
                else:
                    at = load.block_at(spec, a, w, KVBlock(loader, i, position, head, w.sequence.kv_len))
                    source(spec).fill(spec, into, page_ids, sequence_pages, at)
                i += 1
            q += 1
        return load.Items(i, q)

    work.for_each_tile(spec, s, load_tile, load.Items(Int32(0), Int32(0)))


@cute.jit
def mma_one_tile(spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, at: ConsumerState, capped: cutlass.Constexpr):
    """Compute the KV blocks of a work tile as `mainloop.mma_one_tile` does, without those that are left out.

    Returns the `ConsumerState` of the last block, kept or not.
    """
    r = tile.r
    # S = Q @ K^T of the first block, where the tile before has not issued it; the first block is always kept
    if const_expr(not overlap_next_qk(spec)):
        issue_first_qk(spec, plan, s, r, tile.w, at)
    publish_vote(spec, s, Int32(0), at.kv.index)
    first_half_block(spec, plan.args, s, tile, at, capped)

    # the threshold of the votes, and the maxima of the kept blocks
    rows = cute.size(r.tokens)
    log2_threshold = skip_rule.log2_threshold(plan.args, tile.w.sequence.kv_len)
    vote_state = SkipVoteState(tile, log2_threshold, *(cute.make_rmem_tensor(rows, Float32) for _ in range(2)))
    for k in cutlass.range_constexpr(rows):
        vote_state.kept_max[k] = r.st.row_max[k]  # exact after one block

    # the other blocks, from high to low
    n_block_min, n_block_max = tile.w.n_block_min, tile.w.n_block_max - 1
    full_min, full_max, exact = tile.w.n_block_full_min, tile.w.n_block_full_max, exact_max_blocks(spec)
    segments = mask.segments(spec, n_block_min, n_block_max, full_min, full_max, exact, capped)
    for g in cutlass.range_constexpr(len(segments)):
        segment = segments[g]
        flags = BlockFlags(capped, segment.masked, segment.is_first)
        hi, lo = segment.n_block_max, segment.n_block_min

        def vote_on_block(at, n_block, flags=flags):
            return mma_one_n_block(spec, plan, s, vote_state, at, n_block, flags)

        def keep_block(at, n_block, flags=flags):
            publish_vote(spec, s, Int32(0), pipeline.next_item(s.k.pipe, at.kv).index)
            counted = at._replace(kept_in_turn=at.kept_in_turn + 1)
            return mainloop.mma_one_n_block(spec, plan, s, tile, counted, n_block, flags)

        if const_expr(flags.masked or flags.is_first or not keeps_unasked(spec)):
            at = mainloop.for_each_n_block(spec, plan, tile, lo, hi, vote_on_block, at)
        else:
            while hi > lo:
                until = cutlass.max(lo, hi - VOTES)
                at = mainloop.for_each_n_block(spec, plan, tile, until, hi, vote_on_block, at)
                hi = until
                if at.kept_in_turn >= STEADY:
                    until = cutlass.max(lo, hi - UNASKED * at.kept_in_turn)
                at = mainloop.for_each_n_block(spec, plan, tile, until, hi, keep_block, at)
                hi = until
    # O += promoted sums, release the Q stage
    finish_qk(spec, s, r, at)
    return at


@cute.jit
def mma_one_n_block(
    spec: cutlass.Constexpr,
    plan,
    s,
    vote_state: SkipVoteState,
    at: ConsumerState,
    n_block: Int32,
    flags: cutlass.Constexpr,
):
    """Issue Q K^T of `n_block`, the item after at.kv, with the P V of item at.kv if that is pending. Find the maxima of
    `n_block` and vote on it under that P V. If it is kept, compute its softmax under the other warpgroup's MMAs.

    Returns the `ConsumerState` of `n_block`, with kept_in_turn as the vote says.
    """
    i, next_at, a, tile = at.kv, at._replace(kv=pipeline.next_item(s.k.pipe, at.kv)), plan.args, vote_state.tile
    skips, next_kv, r = Int32(0), next_at.kv, tile.r
    pipeline.consumer_wait(s.k.pipe, next_kv)
    fence_before_mma(spec, pages.K)
    warp_scheduler_barrier_sync(spec)
    if at.kept_in_turn != 0:
        # S = Q @ K^T
        issue_qk(spec, plan, s, r, next_at)
        # O += P @ V of the block before
        issue_pv(spec, plan, s, r, i)
        warp_scheduler_barrier_arrive(spec)
        if const_expr(flags.masked):
            logits.fetch_mask(spec, rows_of(tile), tile.mask_source, n_block * spec.tile.n, LANES)
        # wait for S, release the K stage
        warpgroup.wait_group(1)
        pipeline.consumer_release(s.k.pipe, next_kv)
        # maxima and vote; its barrier keeps the wait for P V behind it
        skips = vote(spec, a, s, vote_state, next_kv.index, n_block, flags)
        warpgroup.wait_group(0)
    else:
        # S = Q @ K^T
        issue_qk(spec, plan, s, r, next_at)
        warp_scheduler_barrier_arrive(spec)
        if const_expr(flags.masked):
            logits.fetch_mask(spec, rows_of(tile), tile.mask_source, n_block * spec.tile.n, LANES)
        # wait for S, release the K stage
        warpgroup.wait_group(0)
        pipeline.consumer_release(s.k.pipe, next_kv)
        # maxima and vote
        skips = vote(spec, a, s, vote_state, next_kv.index, n_block, flags)
        # V is not read here, but its stage is free only after V has landed, or is known never to come
        pipeline.consumer_wait(s.v.pipe, i)
    # release the V stage
    pipeline.consumer_release(s.v.pipe, i)
    if skips == 0:
        softmax_kept_block(spec, vote_state, flags)
    return next_at._replace(kept_in_turn=(at.kept_in_turn + 1) * (1 - skips))


@cute.jit
def vote(
    spec: cutlass.Constexpr, a, s, vote_state: SkipVoteState, stage: Int32, n_block: Int32, flags: cutlass.Constexpr
):
    """Apply bias, soft cap and mask to a block in acc_s, find its maxima, and vote.

    Returns 1 if the warpgroup leaves the block out, else 0. stage: stage of the block's V.
    """
    tile, r = vote_state.tile, vote_state.tile.r
    scores, to_log2 = transform_scores(spec, a, tile, n_block, flags), scales_of(r).reduced
    lane_skips = True
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        lane_max = online.reduce(scores[k, None], cute.arch.fmax)
        vote_state.lane_max[k] = lane_max
        below = skip_rule.is_negligible(lane_max, vote_state.kept_max[k], to_log2[k], vote_state.log2_threshold)
        lane_skips = lane_skips and (below or r.tokens[k] >= tile.w.sequence.q_len)
    all_lanes = warp.barrier_red_and(NamedBarrier.WARPGROUP + warpgroup_idx(spec), 32 * WARPS, lane_skips) != 0
    skips = Int32(cute.arch.vote_all_sync(all_lanes))  # the same value, which the compiler now knows to be uniform
    publish_vote(spec, s, skips, stage)
    return skips


@cute.jit
def softmax_kept_block(spec: cutlass.Constexpr, vote_state: SkipVoteState, flags: cutlass.Constexpr):
    """Compute P of a kept block into r.p and rescale O to the new maxima. No P V may be in flight."""
    tile, r = vote_state.tile, vote_state.tile.r
    rows = cute.size(r.tokens)
    for k in cutlass.range_constexpr(rows):
        vote_state.lane_max[k] = cute.arch.warp_reduction_max(vote_state.lane_max[k], threads_in_group=LANES)
    row_max = cute.make_tensor(vote_state.lane_max.iterator, cute.make_layout((rows, 1)))
    exact_max = const_expr(exact_max_blocks(spec) > 0 and flags.is_first)
    online.update_max(r.st, row_max, scales_of(r).reduced, 1, tile.rescale_params, exact_max)
    for k in cutlass.range_constexpr(rows):
        vote_state.kept_max[k] = cute.arch.fmax(vote_state.kept_max[k], vote_state.lane_max[k])
        compute_p(tile, k)
        convert_p(spec, r, k)
    rescale_o(spec, r)


@cute.jit
def last_half_block(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, next_w: WorkTileInfo, at: ConsumerState):
    """Finish a tile: issue the P V of item at.kv, if it is pending, and wait for it, then issue the first Q K^T of the
    next tile as `mainloop.last_half_block` does."""
    if const_expr(overlap_next_qk(spec)):
        if next_w.is_valid != 0:
            wait_first_qk(spec, plan, s, r, next_w, next_tile_state(spec, s, at))
    # O += P @ V
    if at.kept_in_turn != 0:
        issue_pv(spec, plan, s, r, at.kv)
        warpgroup.wait_group(0)
    else:
        pipeline.consumer_wait(s.v.pipe, at.kv)
    # release the V stage
    pipeline.consumer_release(s.v.pipe, at.kv)
    # S = Q @ K^T of the next tile
    if const_expr(overlap_next_qk(spec)):
        warp_scheduler_barrier_sync(spec)
        issue_qk(spec, plan, s, r, next_tile_state(spec, s, at))
        warp_scheduler_barrier_arrive(spec)
