"""Skip-softmax in prefill: KV blocks that hardly count cost Q K^T and its maxima, neither exponentials nor P V.

A warpgroup votes on each block by itself, its 64 rows together. A block is left out where every row r that has keys in
it finds exp(m_j - m) < threshold / kv_len: m_j is the block's exact maximum of the row's logits, after scale, cap and
masks, and m the exact one of all blocks before that were not left out, in a register of its own (`Votes.kept_max`),
because the running maximum of `softmax.SoftmaxState` may lag behind. Rows past the request and rows that see no key of
the block agree to anything. Blocks come last first; the first of a tile is never left out. What is left out is in
neither O nor LSE.

`mma_one_n_block` issues the P V owed, if any, with Q K^T as the dense loop does, and looks for maxima and votes under
it; exponentials run under the MMAs of the other warpgroup. What a warp does between one Q K^T and the next bounds how
fast blocks are left out: so lanes do not share their maxima before a block is kept, and the vote is one barrier.

V of a block that all warpgroups leave out is not fetched: its loaders wait for the votes (`load_v`); a kept block's V
comes under its exponentials. Loaders that gather fetch all of it, because they look up pages a block ahead, and so do
those of a V that is prepared.
"""

from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import pipeline, warp
from .. import geometry, load, logits, mask, softmax
from ..kv import pages, source
from ..kv.pages import KVBlock
from ..schedule import work
from ..schedule.work import WorkTileInfo
from .epilogue import LANES, scales_of
from .groups import WARPGROUP_BARRIER, warp_scheduler_barrier_arrive, warp_scheduler_barrier_sync, warpgroup_idx
from .mainloop import (
    begin_tile,
    compute_p,
    convert_p,
    end_tile,
    exact_max_blocks,
    fence_before_mma,
    issue_pv,
    issue_qk,
    overlap_next_qk,
    rescale,
    rows_of,
    run_segment,
    transform_scores,
    wait_first_qk,
)
from .roles import WARPS, prepared
from .state import BlockFlags, ConsumerState, MainloopVariant, PendingPV, Sm90Fragments, Sm90TileState


class SkipVoteState(NamedTuple):
    """What decides in the tile at hand, whose Q is item q of its pipe. log2_threshold: log2 of threshold / kv_len. top,
    kept_max: (rows,), maxima of a row: this lane's of the block at hand, the row's of the blocks before that were not
    left out.
    """

    tile: Sm90TileState
    q: Int32
    log2_threshold: Float32
    lane_max: cute.Tensor
    kept_max: cute.Tensor


class SkipVotesSmem(NamedTuple):
    """Where the loaders of V read what became of a block, by its place in V's pipe. words: (stages, groups), whether
    the group left it out. signals: an mbarrier for each word. Nobody frees them: a group writes a word anew when V of
    the block that had it before is there, or was left out, so that has been read."""

    flags: cute.Tensor
    mbarriers: cute.Pointer


def allocate(spec, smem) -> Any:
    """The `SkipVotesSmem`; None in other kernels."""
    if not waits_for_votes(spec):
        return None
    words = smem.allocate_tensor(Int32, cute.make_layout((spec.tile.stages, spec.tile.warpgroups)), 16)
    return SkipVotesSmem(words, pipeline.make_mbarriers(smem, cute.size(words), 1))


def waits_for_votes(spec):
    """Whether V of a block is fetched only if a warpgroup wants it: where a TMA fetches it and nobody prepares it."""
    return spec.logits.skip and spec.kv.source == "tma" and not any(prepared(spec))


@cute.jit
def publish_vote(spec: cutlass.Constexpr, s, skips: Int32, stage: Int32):
    """A warpgroup tells the loaders of V whether it leaves out the block at that stage."""
    if const_expr(waits_for_votes(spec)):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx() % WARPS) == 0:
            with cute.arch.elect_one():
                s.skip_votes.flags[stage, warpgroup_idx(spec)] = skips
                cute.arch.mbarrier_arrive(s.skip_votes.mbarriers + (warpgroup_idx(spec) * spec.tile.stages + stage))


@cute.jit
def all_skip(spec: cutlass.Constexpr, s, item: Int32):
    """A loading warp: whether all warpgroups leave a block out. Knows it as soon as one wants the block."""
    skips, stage, phase = Int32(1), pipeline.stage(s.v_pipe, item), pipeline.phase(s.v_pipe, item)
    for g in cutlass.range_constexpr(spec.tile.warpgroups):
        if skips != 0:
            cute.arch.mbarrier_wait(s.skip_votes.mbarriers + (g * spec.tile.stages + stage), phase)
            skips = cute.arch.make_warp_uniform(s.skip_votes.flags[stage, g])
    return skips


@cute.jit
def load_v(spec: cutlass.Constexpr, plan, s, loader: Int32):
    """One warp: its share of V, as `load.load_kv`, but for blocks that all warpgroups leave out, whose stage passes
    unfilled. Loader 0 loads Q, too."""
    a, page_ids = plan.args, source(spec).page_id_cache(spec, plan.v)
    i, t, q, more = Int32(0), Int32(0), Int32(0), Int32(1)
    while more != 0:
        w = work.consume(spec, s, t)
        more = w.is_valid
        if w.is_valid != 0 and w.n_block_max > w.n_block_min:
            head = geometry.kv_head_of(spec, a, w)
            sequence_pages = pages.of_sequence(a, w.batch_idx, pages.V)
            if loader == 0:
                load.load_or_reserve_q(spec, plan, s, w, q)
            for n_block in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
                if all_skip(spec, s, i) != 0:
                    pipeline.producer_acquire_tx(s.v_pipe, i, Int32(0))
                else:
                    at = KVBlock(loader, i, n_block, head, w.kv_len)
                    source(spec).fill(spec, plan.v, s.v, s.v_pipe, page_ids, sequence_pages, at)
                i += 1
            q += 1
        t += 1


@cute.jit
def vote(
    spec: cutlass.Constexpr,
    a,
    s,
    r: Sm90Fragments,
    vote_state: SkipVoteState,
    stage: Int32,
    n_block: Int32,
    flags: cutlass.Constexpr,
):
    """Soft cap, mask and maxima of block j in r.s, and the warpgroup's vote: whether to leave the block out. stage: of
    its V."""
    tile, to_log2 = vote_state.tile, scales_of(r, vote_state.tile.scales).reduced
    view = transform_scores(spec, a, r, tile, n_block, flags)
    mine = True
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        top = softmax.reduce(view[k, None], cute.arch.fmax)
        vote_state.lane_max[k] = top
        below = top == -Float32.inf or (top - vote_state.kept_max[k]) * to_log2[k] < vote_state.log2_threshold
        mine = mine and (below or r.tokens[k] >= tile.w.q_len)
    all_lanes = warp.barrier_red_and(WARPGROUP_BARRIER + warpgroup_idx(spec), 32 * WARPS, mine) != 0
    skips = Int32(cute.arch.vote_all_sync(all_lanes))  # the same, but now known to be uniform
    publish_vote(spec, s, skips, stage)
    return skips


@cute.jit
def mma_one_n_block(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    vote_state: SkipVoteState,
    pending_pv: PendingPV,
    n_block: Int32,
    flags: cutlass.Constexpr,
):
    """QK of block j (the item behind last.kv) and, if it is owed, the PV of item last.kv in flight together, maxima and
    vote of j under PV, softmax of j under the other warpgroup's MMAs. Returns the new `PendingPV`."""
    i, next_kv, a, tile = pending_pv.kv, pipeline.next_item(s.k_pipe, pending_pv.kv), plan.args, vote_state.tile
    at, skips = ConsumerState(next_kv, vote_state.q), Int32(0)
    pipeline.consumer_wait(s.k_pipe, next_kv)
    fence_before_mma(spec, pages.K)
    warp_scheduler_barrier_sync(spec)
    if pending_pv.is_pending != 0:
        issue_qk(spec, plan, s, r, at)
        issue_pv(spec, plan, s, r, i)
        warp_scheduler_barrier_arrive(spec)
        logits.fetch_mask(spec, a, rows_of(r, tile), tile.mask_start, n_block * spec.tile.n, LANES)
        warpgroup.wait_group(1)
        pipeline.consumer_release(s.k_pipe, next_kv)
        skips = vote(
            spec, a, s, r, vote_state, next_kv.index, n_block, flags
        )  # its barrier keeps the wait for PV behind it
        warpgroup.wait_group(0)
    else:
        issue_qk(spec, plan, s, r, at)
        warp_scheduler_barrier_arrive(spec)
        logits.fetch_mask(spec, a, rows_of(r, tile), tile.mask_start, n_block * spec.tile.n, LANES)
        warpgroup.wait_group(0)
        pipeline.consumer_release(s.k_pipe, next_kv)
        skips = vote(spec, a, s, r, vote_state, next_kv.index, n_block, flags)
        # not read here, but the stage is free only when V has landed, or never will
        pipeline.consumer_wait(s.v_pipe, i)
    pipeline.consumer_release(s.v_pipe, i)
    if skips == 0:
        softmax_kept_block(spec, r, vote_state, flags)
    return PendingPV(next_kv, 1 - skips)


@cute.jit
def softmax_kept_block(spec: cutlass.Constexpr, r: Sm90Fragments, vote_state: SkipVoteState, flags: cutlass.Constexpr):
    """P of the block at hand into r.p; O, none of whose PV is in flight, is brought to the new maxima."""
    rows, tile = cute.size(r.tokens), vote_state.tile
    for k in cutlass.range_constexpr(rows):
        vote_state.lane_max[k] = cute.arch.warp_reduction_max(vote_state.lane_max[k], threads_in_group=LANES)
    tops = cute.make_tensor(vote_state.lane_max.iterator, cute.make_layout((rows, 1)))
    exact_max = const_expr(exact_max_blocks(spec) > 0 and flags.is_first)
    softmax.update_max(r.st, tops, scales_of(r, tile.scales).reduced, 1, tile.rescale_params, exact_max)
    for k in cutlass.range_constexpr(rows):
        vote_state.kept_max[k] = cute.arch.fmax(vote_state.kept_max[k], vote_state.lane_max[k])
        compute_p(r, tile, k)
        convert_p(spec, r, k)
    rescale(spec, r)


@cute.jit
def finish_pv(
    spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, after: WorkTileInfo, at: ConsumerState, is_pending: Int32
):
    """The PV owed by the tile at hand, if any, and the first QK of the tile `after`, see `mainloop.finish_pv`."""
    if const_expr(overlap_next_qk(spec)):
        if after.is_valid != 0:
            wait_first_qk(spec, plan, s, r, after, ConsumerState(pipeline.next_item(s.k_pipe, at.kv), at.q + 1))
    if is_pending != 0:
        issue_pv(spec, plan, s, r, at.kv)
        warpgroup.wait_group(0)
    else:
        pipeline.consumer_wait(s.v_pipe, at.kv)
    pipeline.consumer_release(s.v_pipe, at.kv)
    if const_expr(overlap_next_qk(spec)):
        warp_scheduler_barrier_sync(spec)
        issue_qk(spec, plan, s, r, ConsumerState(pipeline.next_item(s.k_pipe, at.kv), at.q + 1))
        warp_scheduler_barrier_arrive(spec)


@cute.jit
def run_tile(
    spec: cutlass.Constexpr,
    plan,
    s,
    r: Sm90Fragments,
    tile: Sm90TileState,
    at: ConsumerState,
    capped: cutlass.Constexpr,
):
    """As `mainloop.run_tile`, without the blocks that the warpgroup leaves out."""
    a, rows = plan.args, cute.size(r.tokens)
    publish_vote(spec, s, Int32(0), at.kv.index)  # the first block is kept
    begin_tile(spec, a, s, r, tile, at, capped)
    log2_threshold = a.logits.skip_threshold - cute.math.log2(Float32(tile.w.kv_len), fastmath=True)
    vote_state = SkipVoteState(tile, at.q, log2_threshold, *(cute.make_rmem_tensor(rows, Float32) for _ in range(2)))
    for k in cutlass.range_constexpr(rows):
        vote_state.kept_max[k] = r.st.row_max[k]  # exact after one block
    pending_pv = PendingPV(at.kv, Int32(1))
    segments = mask.segments(
        spec,
        tile.w.n_block_min,
        tile.w.n_block_max - 1,
        tile.w.n_block_full_min,
        tile.w.n_block_full_max,
        exact_max_blocks(spec),
        capped,
    )
    for g in cutlass.range_constexpr(len(segments)):
        segment = segments[g]
        flags = BlockFlags(capped, segment.masked, segment.is_first)
        pending_pv = run_segment(
            spec, r, segment, pending_pv, partial(mma_one_n_block, spec, plan, s, r, vote_state, flags=flags)
        )
    end_tile(spec, s, r, at)
    return pending_pv


SKIPPING = MainloopVariant(run_tile, finish_pv, Int32(1))
