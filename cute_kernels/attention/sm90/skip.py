"""Skip-softmax in prefill: KV blocks that hardly count cost Q K^T and its maxima, neither exponentials nor P V.

A warpgroup votes on each block by itself, its 64 rows together. A block is left out where every row r that has keys in
it finds exp(m_j - m) < threshold / kv_len: m_j is the block's exact maximum of the row's logits, after scale, cap and
masks, and m the exact one of all blocks before that were not left out, in a register of its own (`Votes.peak`), because
the running maximum of `softmax.State` may lag behind. Rows past the request and rows that see no key of the block agree
to anything. Blocks come last first; the first of a tile is never left out. What is left out is in neither O nor LSE.

A block's P V cannot be in flight while the next block's fate is decided, because the compiler waits for MMAs that are
in flight across a conditional. So `step` issues the P V owed, if any, with Q K^T as the dense loop does, and looks for
maxima and votes under it; exponentials run under the MMAs of the other warpgroup alone.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import pipe, wgmma
from .. import logits, mask, softmax
from ..kv import source
from ..schedule.work import Work
from .math import (
    GROUP_BARRIER,
    How,
    Items,
    Last,
    Loop,
    Registers,
    Tile,
    ahead,
    first_block,
    group_index,
    issue_pv,
    issue_qk,
    operand_p,
    pass_turn,
    probabilities,
    rows_of,
    set_rows,
    transform,
    wait_first_qk,
    wait_turn,
)
from .store import LANES, scales_of, span

WARPS = 4  # of a warpgroup


class Votes(NamedTuple):
    """What decides in the tile at hand, whose Q is item q of its pipe. least: log2 of threshold / kv_len. top, peak:
    (rows,), exact maxima of a row, of the block at hand and of the blocks before that were not left out."""

    tile: Tile
    q: Int32
    least: Float32
    top: cute.Tensor
    peak: cute.Tensor


def allocate(spec, smem) -> Any:
    """Shared memory of the warps' votes, (warp of a group, group, 2): those on a block while a warp may still read
    those on the one before. None in other kernels."""
    if not spec.logits.skip:
        return None
    return smem.allocate_tensor(Int32, cute.make_layout((WARPS, spec.tile.warpgroups, 2)), 16)


@cute.jit
def agreed(s, mine, turn: Int32):
    """Whether all lanes of the warpgroup say so (`mine`). turn: of one vote it is odd, of the next one even."""
    group, warp = group_index(), cute.arch.warp_idx() % WARPS
    votes = s.votes[None, group, turn % 2]
    all_lanes = cute.arch.vote_all_sync(mine)
    with cute.arch.elect_one():
        votes[warp] = Int32(all_lanes)
    cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=32 * WARPS)
    each = cute.make_rmem_tensor(WARPS, Int32)
    cute.autovec_copy(votes, each)
    return cute.arch.make_warp_uniform(each[0] & each[1] & each[2] & each[3])


@cute.jit
def look(spec: cutlass.Constexpr, a, s, r: Registers, votes: Votes, item: Int32, j: Int32, how: cutlass.Constexpr):
    """Soft cap, mask and maxima of block j in r.s, and the warpgroup's vote: whether to leave the block out."""
    x, to_log2 = votes.tile, scales_of(r, votes.tile.scales)[1]
    view = transform(spec, a, r, x, j, how)
    mine = True
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        top = cute.arch.warp_reduction_max(softmax.reduce(view[k, None], cute.arch.fmax), threads_in_group=LANES)
        votes.top[k] = top
        below = top == -Float32.inf or (top - votes.peak[k]) * to_log2[k] < votes.least
        mine = mine and (below or r.tokens[k] >= x.w.q_len)
    return agreed(s, mine, item)


@cute.jit
def step(
    spec: cutlass.Constexpr, plan, s, r: Registers, votes: Votes, last: Last, j: Int32, how: cutlass.Constexpr
):
    """QK of block j (item last.kv + 1) and, if it is owed, the PV of item last.kv in flight together, maxima and vote
    of j under PV, softmax of j under the other warpgroup's MMAs. Returns the new `Last`."""
    i, a, x = last.kv, plan.args, votes.tile
    at, out = Items(i + 1, votes.q), Int32(0)
    pipe.wait_full(s.k_pipe, i + 1)
    source(spec).landed()
    wait_turn(spec)
    if last.owed != 0:
        issue_qk(spec, plan, s, r, at)
        issue_pv(spec, plan, s, r, i)
        pass_turn(spec)
        logits.fetch_mask(spec, a, rows_of(r, x), x.mask_start, j * spec.tile.n, LANES)
        warpgroup.wait_group(1)
        pipe.release(s.k_pipe, i + 1)
        out = look(spec, a, s, r, votes, i + 1, j, how)  # its barrier keeps the wait for PV behind it
        warpgroup.wait_group(0)
    else:
        issue_qk(spec, plan, s, r, at)
        pass_turn(spec)
        logits.fetch_mask(spec, a, rows_of(r, x), x.mask_start, j * spec.tile.n, LANES)
        pipe.wait_full(s.v_pipe, i)  # nobody reads it, but the stage is free only when it has landed
        warpgroup.wait_group(0)
        pipe.release(s.k_pipe, i + 1)
        out = look(spec, a, s, r, votes, i + 1, j, how)
    pipe.release(s.v_pipe, i)
    if out == 0:
        keep(spec, r, votes)
    return Last(i + 1, 1 - out)


@cute.jit
def keep(spec: cutlass.Constexpr, r: Registers, votes: Votes):
    """P of the block at hand into r.p; O, none of whose PV is in flight, is brought to the new maxima."""
    rows, x = cute.size(r.tokens), votes.tile
    tops = cute.make_tensor(votes.top.iterator, cute.make_layout((rows, 1)))
    softmax.update_max(r.st, tops, scales_of(r, x.scales)[1], 1, span(spec))
    for k in cutlass.range_constexpr(rows):
        votes.peak[k] = cute.arch.fmax(votes.peak[k], votes.top[k])
        probabilities(r, x, k)
        operand_p(spec, r, k)
    softmax.rescale(r.st, wgmma.rows_cols(r.o))


@cute.jit
def finish_pv(spec: cutlass.Constexpr, plan, s, r: Registers, after: Work, at: Items, owed: Int32):
    """The PV owed by the tile at hand, if any, and the first QK of the tile `after`, see `math.finish_pv`."""
    if const_expr(ahead(spec)):
        if after.valid != 0:
            wait_first_qk(spec, plan, s, r, after, Items(at.kv + 1, at.q + 1))
    if owed != 0:
        issue_pv(spec, plan, s, r, at.kv)
        warpgroup.wait_group(0)
    else:
        pipe.wait_full(s.v_pipe, at.kv)
    pipe.release(s.v_pipe, at.kv)
    if const_expr(ahead(spec)):
        wait_turn(spec)
        issue_qk(spec, plan, s, r, Items(at.kv + 1, at.q + 1))
        pass_turn(spec)


@cute.jit
def run_tile(spec: cutlass.Constexpr, plan, s, r: Registers, x: Tile, at: Items, capped: cutlass.Constexpr):
    """As `math.run_tile`, without the blocks that the warpgroup leaves out."""
    a, rows = plan.args, cute.size(r.tokens)
    softmax.reset(r.st)
    r.o.fill(0.0)
    set_rows(spec, r, x, a, capped)
    first_block(spec, a, s, r, x, at.kv, capped)
    least = a.logits.skip_threshold - cute.math.log2(Float32(x.w.kv_len), fastmath=True)
    votes = Votes(x, at.q, least, *(cute.make_rmem_tensor(rows, Float32) for _ in range(2)))
    for k in cutlass.range_constexpr(rows):
        votes.peak[k] = r.st.m[k]  # exact after one block
    last = Last(at.kv, Int32(1))
    segments = mask.segments(spec, x.w.lo, x.w.hi - 1, x.w.full_lo, x.w.full_hi)
    for g in cutlass.range_constexpr(len(segments)):
        lo, hi, masked = segments[g]
        for j in cutlass.range(hi - 1, lo - 1, -1, unroll=1):
            last = step(spec, plan, s, r, votes, last, j, How(capped, masked))
    if const_expr(not spec.pack_gqa and not spec.tile.q_in_regs):
        pipe.release(s.q_pipe, at.q)
    return last


SKIPPING = Loop(run_tile, finish_pv)
