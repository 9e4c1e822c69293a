"""The `mma` role: a loop over work tiles, each a main loop and the epilogue."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .. import mask, mask_blocks
from ..schedule import work
from ..schedule.work import WorkTileInfo
from . import alternating, mainloop, precision, query, scoring, shared_scores, skip, splits
from .epilogue import store
from .groups import warp_scheduler_barrier_arrive, warpgroup_idx
from .roles import roles
from .state import Sm90Fragments, Sm90TileState, initial_state, make_fragments


def main_loop(spec):
    """Return the module that computes the KV blocks of a tile, by its `mma_one_tile` and `last_half_block`."""
    if spec.tile.s_parts > 1:
        return shared_scores
    return skip if spec.logits.skip else mainloop


@cute.jit
def mma(spec: cutlass.Constexpr, plan, s):
    """Run the `mma` role in one of its warpgroups: 64 rows of every work tile of the CTA."""
    # A warpgroup waits for a tile in work_pipe, then for its Q and for a K and a V of each of its blocks; it releases
    # each stage when the MMA that reads it is done, and stores O and LSE from registers.
    # The order at the end of a tile hides its epilogue: first the next tile is read, then P V of the tile's last block
    # and, where Q has room, Q K^T of the next tile's first block are issued together (`last_half_block`), and the
    # epilogue runs under that Q K^T. So the loop carries the next tile, with its first Q K^T in flight, and it is not
    # `work.for_each_tile`, which reads tiles only between two iterations.
    # Warpgroups issue MMAs in turn: the last one passes the first turn to warpgroup 0.
    # Splits are merged after the last tile: with the loops of a merge inside this loop, the compiler keeps MMA
    # descriptors out of uniform registers, which costs 70 of 730 instructions a block.
    cute.arch.setmaxregister_increase(roles(spec).registers("mma"))
    if const_expr(spec.tile.scores_apart):
        scoring.output(spec, plan, s, epilogue)
    elif const_expr(spec.tile.alternates):
        alternating.compute(spec, plan, s, epilogue)
    else:
        compute_tiles(spec, plan, s)


@cute.jit
def compute_tiles(spec: cutlass.Constexpr, plan, s):
    """Compute the CTA's tiles, scores and O."""
    a = plan.args
    r = make_fragments(spec, plan, s)
    if warpgroup_idx(spec) == spec.tile.warpgroups - 1:
        warp_scheduler_barrier_arrive(spec)
    at = initial_state(spec)
    w, t, num_partials = next_tile(spec, a, s, r, Int32(0), Int32(0))
    if w.is_valid != 0:
        # S = Q @ K^T of the first tile's first block
        if const_expr(query.overlap_next_qk(spec)):
            mainloop.issue_first_qk(spec, plan, s, r, w, at)
        while w.is_valid != 0:
            source = mask_blocks.mask_source(spec, a, w) if const_expr(spec.mask.custom) else None
            seqlen = mask.seqlen_info(spec, a, w.sequence)
            tile = Sm90TileState(r, w, seqlen, precision.rescale_params(spec, w.sequence.kv_len), source)
            # The KV blocks of the tile. With a soft cap that a call may turn off, either case has its own copy of the
            # code: a conditional among MMAs in flight makes the compiler wait for each of them.
            last = at
            if const_expr(not spec.logits.soft_cap):
                last = main_loop(spec).mma_one_tile(spec, plan, s, tile, at, False)
            elif a.logits.soft_cap > 0.0:
                last = main_loop(spec).mma_one_tile(spec, plan, s, tile, at, True)
            else:
                last = main_loop(spec).mma_one_tile(spec, plan, s, tile, at, False)
            # the next tile, the last P V of this one, its epilogue
            w, t, num_partials = next_tile(spec, a, s, r, t, num_partials)
            main_loop(spec).last_half_block(spec, plan, s, r, w, last)
            num_partials = epilogue(spec, a, s, r, tile.w, False, num_partials)
            at = mainloop.next_tile_state(spec, s, last)
        warpgroup.wait_group(0)
    if const_expr(s.splits is not None):
        splits.merge(spec, a, s, num_partials)


class NextTile(NamedTuple):
    """A work tile, the number of the tile after it, and the number of partial tiles that the CTA has stored."""

    w: WorkTileInfo
    t: Int32
    num_partials: Int32


@cute.jit
def next_tile(spec: cutlass.Constexpr, a, s, r: Sm90Fragments, t: Int32, num_partials: Int32):
    """Return the first of the CTA's tiles from number t on that sees a key. Tiles before it, which see none, are stored
    as zeros."""
    w = work.consume(spec, s, t)
    while w.is_valid != 0 and w.n_block_max <= w.n_block_min:
        num_partials = epilogue(spec, a, s, r, w, True, num_partials)
        t += 1
        w = work.consume(spec, s, t)
    return NextTile(w, t + 1, num_partials)


@cute.jit
def epilogue(
    spec: cutlass.Constexpr, a, s, r: Sm90Fragments, w: WorkTileInfo, empty: cutlass.Constexpr, num_partials: Int32
):
    """Store O and LSE of a tile, or, if the tile is split among CTAs, of this CTA's split. empty: the tile sees no key.
    Returns the number of splits that the CTA has stored so far."""
    if const_expr(w.split is not None):
        if w.split.slot >= 0:
            splits.store_partial(spec, a, s, r, w, num_partials, empty)
            num_partials += 1
        else:
            store(spec, a, r, w, empty)
    else:
        store(spec, a, r, w, empty)
    return num_partials
