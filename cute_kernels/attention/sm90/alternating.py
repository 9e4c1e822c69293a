"""Main loop of two warpgroups that compute scores of 64 rows in turn and have half of O each (`tile.alternates`).

With V in K, and rows that are found by slots. In `scoring`, one warpgroup has all scores: Q K^T, softmax and the store
of P of a block are a chain that no other block shortens. Here the even blocks of a tile, counted from its highest one,
are those of warpgroup 0, and the odd blocks those of warpgroup 1, so that the softmax of one is computed under the MMAs
of the other. Two blocks are in shared memory, one of each
warpgroup. FlashMLA calls this a seesaw.

| role | threads | waits for | signals |
| --- | --- | --- | --- |
| mma 0 | 128 | work_pipe, q_pipe, k.pipe full; MAXIMA 1, WARP_SCHEDULER 0 | k.pipe empty; MAXIMA 0, WARP_SCHEDULER 1 |
| mma 1 | 128 | work_pipe, q_pipe, k.pipe full; MAXIMA 0, WARP_SCHEDULER 1 | k.pipe empty; MAXIMA 1, WARP_SCHEDULER 0 |

Both also release work_pipe and q_pipe. Named barriers tell that maxima of rows and that P are in shared memory. A pair
of blocks, a in warpgroup 0 and b in warpgroup 1:

| mma 0 | mma 1 |
| --- | --- |
| S = Q K^T of a | S = Q K^T of b |
| maxima, from those of b of the pair before | |
| P of a, to shared memory | O += P V of a |
| O += P V of a | maxima, from those of a |
| | P of b, to shared memory |
| O += P V of b | O += P V of b |

So the maximum of a row passes all blocks in their order, and both warpgroups add P V of all blocks in that order, with
the maxima of the block. Each warpgroup has the sum of its own P; they meet at the end of a tile. With its maxima a
warpgroup tells the sum of a row so far, from which the other one knows by how much the maximum may lag (`set_limits`).

k.pipe has a pipeline for each of two groups of columns. The first group has the columns of V that warpgroup 0 reads,
and the columns of K that V does not have. The second group has the columns of V that warpgroup 1 reads. Each warpgroup
frees both groups of each block: its own group behind its P V, and the other one as soon as it knows that this group is
full. P of b may lie in the first group, in the last 64 columns of the stage, which nobody reads behind Q K^T.
Warpgroup 1 has P of b in registers, so it ends O += P V of b first. The groups of b are therefore loaded, and
multiplied by Q, in reverse order.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import pipeline, wgmma
from .. import mask
from .. import softmax as online
from ..kv import gather, pages
from ..schedule import work
from ..schedule.work import WorkTileInfo
from . import precision, splits
from .groups import warpgroup_idx
from .scoring import (
    complete_q,
    copy_q,
    exact_if_wanted,
    find_keys,
    init_rows,
    issue_qk,
    look_up_block,
    make_words,
    o_fragments,
    slots_of,
)
from .softmax import compute_p, convert_p, mask_and_update_max
from .state import BlockFlags, Sm90Fragments, Sm90TileState
from .turns import Sums, add_sums, follow_rows, p_of_odd, p_stage, set_limits, store_p, tell_p, tell_rows, wait_for_p

FLAGS = BlockFlags(False, True, True)  # of all blocks: the words of keys that exist are their only mask


class TurnState(NamedTuple):
    """The next items of a warpgroup: kv, in k.pipe; q, in q_pipe. partials: the splits that the CTA has stored."""

    kv: Int32
    q: Int32
    partials: Int32


def make_fragments(spec, plan, s) -> Sm90Fragments:
    """Make the fragments of a warpgroup."""
    own, pv = o_fragments(spec, plan, s), plan.mma_pv.get_slice(0)
    shape = plan.mma_qk.get_slice(0).partition_shape_C((spec.tile.m, spec.tile.n))
    acc_s, rows = cute.make_rmem_tensor(shape, Float32), cute.size(own.st.row_max)
    return replace(
        own,
        acc_s=acc_s,
        p=precision.make_p(spec, pv, acc_s),
        tokens=cute.make_rmem_tensor(rows, Int32),
        words=make_words(spec, rows),
        limits=cute.make_rmem_tensor(rows, Float32),
    )


class Own(NamedTuple):
    """State that a warpgroup keeps from tile to tile, see `Sm90TileState`."""

    r: Sm90Fragments
    slots: gather.RowPageIds
    chosen_by: Any


def tile_of(spec, plan, own: Own, w: WorkTileInfo) -> Sm90TileState:
    """Return the state of a tile."""
    seqlen = mask.seqlen_info(spec, plan.args, w.sequence)
    params = exact_if_wanted(plan.args, precision.rescale_params(spec, w.sequence.kv_len))
    return Sm90TileState(own.r, w, seqlen, params, slots=own.slots, chosen_by=own.chosen_by)


# The mma role: one iteration per tile, an inner one per pair of KV blocks, highest block first.
@cute.jit
def compute(spec: cutlass.Constexpr, plan, s, epilogue: cutlass.Constexpr):
    """Run the mma role in one of its warpgroups. epilogue: stores a tile."""
    r = make_fragments(spec, plan, s)
    sums = Sums(*(cute.make_rmem_tensor(cute.size(r.limits), Float32) for _ in Sums._fields))
    slots = gather.page_ids_of(spec, plan.kv[pages.K], spec.tile.n // 32)
    chosen_by = cute.make_rmem_tensor(spec.tile.n // 32, cutlass.Uint32) if const_expr(spec.kv.union) else None
    own = Own(r, slots, chosen_by)
    at, t = TurnState(Int32(0), Int32(0), Int32(0)), Int32(0)
    fetch_tile(spec, plan, s, own, t, at.q)
    w = work.consume(spec, s, t)
    while w.is_valid != 0:
        if w.n_block_max > w.n_block_min:
            begin_tile(spec, tile_of(spec, plan, own, w), sums)
            if warpgroup_idx(spec) == 0:
                at = even_blocks(spec, plan, s, tile_of(spec, plan, own, w), sums, at)
            else:
                at = odd_blocks(spec, plan, s, tile_of(spec, plan, own, w), sums, at)
            add_sums(spec, s, r)
        # Q and slots of the next tile are on their way while this one is stored
        t += 1
        fetch_tile(spec, plan, s, own, t, at.q)
        if w.n_block_max > w.n_block_min:
            at = at._replace(partials=epilogue(spec, plan.args, s, r, w, False, at.partials))
        else:
            at = at._replace(partials=epilogue(spec, plan.args, s, r, w, True, at.partials))
        w = work.consume(spec, s, t)
    if const_expr(s.splits is not None):
        splits.merge(spec, plan.args, s, at.partials)


@cute.jit
def fetch_tile(spec: cutlass.Constexpr, plan, s, own: Own, t: Int32, q: Int32):
    """Begin to copy Q of the t-th tile, item q of q_pipe, if it has keys, and look up the slots of this warpgroup's
    first block. The tile stays in its stage: the epilogue leaves no registers for it."""
    w = work.consumer_wait(spec, s, t)
    tile = tile_of(spec, plan, own, w)
    if w.is_valid != 0 and w.n_block_max > w.n_block_min:
        look_up_block(spec, tile, slots_of(plan, w), w.n_block_max - 1 - warpgroup_idx(spec))
        pipeline.consumer_wait(s.q_pipe, q)
        copy_q(spec, s, w, plan.args)


@cute.jit
def begin_tile(spec: cutlass.Constexpr, tile: Sm90TileState, sums: Sums):
    """Begin a tile of which `fetch_tile` has been called: O = 0."""
    init_rows(spec, tile)
    sums.other.fill(0.0)
    tile.r.acc_o.fill(0.0)
    complete_q(spec)


@cute.jit
def even_blocks(spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, sums: Sums, at: TurnState) -> TurnState:
    """Compute a tile in warpgroup 0. Return the state behind it."""
    slots = slots_of(plan, tile.w)
    for position in cutlass.range(tile.w.n_block_max - 1, tile.w.n_block_min - 1, -2, unroll=1):
        even_block(spec, plan, s, tile, sums, slots, at, position)
        kv = at.kv + 1
        if position > tile.w.n_block_min:
            # O += P V of the other block, with its maxima
            follow_rows(s, tile, sums, 0)
            release(s, 1, kv)
            online.rescale(tile.r.st, wgmma.rows_cols(tile.r.acc_o))
            wait_for_p(0)
            issue_pv_of_other(spec, plan, s, tile.r, kv, 0)
            warpgroup.wait_group(0)
            release(s, 0, kv)
            kv += 1
        at = at._replace(kv=kv)
    return at._replace(q=at.q + 1)


@cute.jit
def even_block(
    spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, sums: Sums, slots: pages.SequencePages, at: TurnState,
    position: Int32,
):  # fmt: skip
    """Compute S, P and O += P V of a block of warpgroup 0, and hand over P."""
    r = tile.r
    find_keys(spec, plan, tile, position)
    issue_qk(spec, plan, s, r, at.kv)
    # behind the issue of Q K^T
    look_up_block(spec, tile, slots, position - 2)
    set_limits(tile, sums)
    warpgroup.wait_group(0)
    pipeline.consumer_release_if(s.q_pipe, at.q, is_last(tile, position))
    release(s, 1, at.kv)
    # maxima, P
    mask_and_update_max(spec, plan.args, tile, position, FLAGS)
    tell_rows(s, r, sums, 0)
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        compute_p(tile, row)
        convert_p(spec, r, row)
    store_p(spec, s, r, 0, at.kv)
    tell_p(0)
    # O += P V
    online.rescale(r.st, wgmma.rows_cols(r.acc_o))
    wgmma.issue(plan.mma_pv, r.acc_o, r.p, v_of(s, r, at.kv), False, 0)
    warpgroup.wait_group(0)
    release(s, 0, at.kv)


@cute.jit
def odd_blocks(spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, sums: Sums, at: TurnState) -> TurnState:
    """Compute a tile in warpgroup 1. Return the state behind it."""
    slots = slots_of(plan, tile.w)
    for position in cutlass.range(tile.w.n_block_max - 2, tile.w.n_block_min - 1, -2, unroll=1):
        at = odd_block(spec, plan, s, tile, sums, slots, at, position)
    pipeline.consumer_release_if(s.q_pipe, at.q, tile.w.n_block_max - tile.w.n_block_min == 1)
    if (tile.w.n_block_max - tile.w.n_block_min) % 2 == 1:
        at = last_even_block(spec, plan, s, tile, sums, at)
    return at._replace(q=at.q + 1)


@cute.jit
def odd_block(
    spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, sums: Sums, slots: pages.SequencePages, at: TurnState,
    position: Int32,
) -> TurnState:  # fmt: skip
    """Compute S and P of a block of warpgroup 1, hand over its P, and compute O += P V of both blocks of a pair."""
    r, even, kv = tile.r, at.kv, at.kv + 1
    find_keys(spec, plan, tile, position)
    issue_qk(spec, plan, s, r, kv, in_reverse=True)
    # behind the issue of Q K^T
    look_up_block(spec, tile, slots, position - 2)
    follow_rows(s, tile, sums, 1)
    release(s, 0, even)
    set_limits(tile, sums)
    warpgroup.wait_group(0)
    pipeline.consumer_release_if(s.q_pipe, at.q, is_last(tile, position))
    release(s, 0, kv)
    # O += P V of the other block
    online.rescale(r.st, wgmma.rows_cols(r.acc_o))
    wait_for_p(1)
    issue_pv_of_other(spec, plan, s, r, even, 1)
    # maxima, P
    mask_and_update_max(spec, plan.args, tile, position, FLAGS)
    tell_rows(s, r, sums, 1)
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        compute_p(tile, row)
        convert_p(spec, r, row)
    store_p(spec, s, r, 1, kv)
    # the other warpgroup may store its next P when it has seen this one
    warpgroup.wait_group(0)
    release(s, 1, even)
    tell_p(1)
    # O += P V
    online.rescale(r.st, wgmma.rows_cols(r.acc_o))
    wgmma.issue(plan.mma_pv, r.acc_o, r.p, v_of(s, r, kv), False, 1)
    warpgroup.wait_group(0)
    release(s, 1, kv)
    return at._replace(kv=kv + 1)


@cute.jit
def last_even_block(spec: cutlass.Constexpr, plan, s, tile: Sm90TileState, sums: Sums, at: TurnState) -> TurnState:
    """Compute O += P V of the last block of a tile with an odd number of them, which is that of warpgroup 0."""
    r = tile.r
    follow_rows(s, tile, sums, 1)
    release(s, 0, at.kv)
    online.rescale(r.st, wgmma.rows_cols(r.acc_o))
    wait_for_p(1)
    issue_pv_of_other(spec, plan, s, r, at.kv, 1)
    warpgroup.wait_group(0)
    release(s, 1, at.kv)
    return at._replace(kv=at.kv + 1)


def is_last(tile: Sm90TileState, position: Int32):
    """Return whether the warpgroup that has a block has no other one of the tile behind it."""
    return position < tile.w.n_block_min + 2


@cute.jit
def release(s, group: cutlass.Constexpr, kv: Int32):
    """Free a group of columns of a block (one warp)."""
    pipeline.consumer_release(s.k.pipes[group], kv)


def v_of(s, r: Sm90Fragments, kv: Int32):
    """Return V of a block."""
    return r.v[None, None, None, pipeline.stage(s.k.pipe, kv)]


def shared_mma(spec):
    """Return the MMA of O += P V with P in shared memory."""
    return wgmma.mma_nn(precision.of(spec).mma_type, 1, precision.pv_columns(spec), False)


@cute.jit
def issue_pv_of_other(spec: cutlass.Constexpr, plan, s, r: Sm90Fragments, kv: Int32, side: cutlass.Constexpr):
    """Issue O += P V of a block of the other warpgroup. side: the index of this one."""
    mma, p = shared_mma(spec), s.scores.p[0] if const_expr(side == 1) else p_of_odd(spec, s)
    a = mma.make_fragment_A(mma.get_slice(0).partition_A(p))
    stage = p_stage(s, 1 - side, kv)
    wgmma.issue(mma, r.acc_o, a[None, None, None, stage], v_of(s, r, kv), False, side)
