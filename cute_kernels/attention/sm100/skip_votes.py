"""Votes of the four warps of a warpgroup on what to leave out, in shared memory."""

import cutlass.cute as cute
from cutlass import Int32

from ...device import copy

WARPS = 4
TURNS = 2  # votes at a time: a warp may still read those on a block while others vote on the next


def allocate(smem, groups: int) -> cute.Tensor:
    """(WARPS, groups, TURNS)."""
    return smem.allocate_tensor(Int32, cute.make_layout((WARPS, groups, TURNS)), 16)


def of(words: cute.Tensor, group, turn: Int32) -> cute.Tensor:
    """(WARPS,) votes of a group. turn: their number."""
    return words[None, group, turn % TURNS]


@cute.jit
def cast(mine: cute.Tensor, warp: Int32, agrees):
    """One warp: its vote, of all lanes that say so (`agrees`)."""
    all_lanes = cute.arch.vote_all_sync(agrees)
    with cute.arch.elect_one():
        mine[warp] = Int32(all_lanes)


@cute.jit
def all_of(mine: cute.Tensor):
    """Whether all four warps agree."""
    each = cute.make_rmem_tensor(WARPS, Int32)
    copy.vector(mine, each)
    return cute.arch.make_warp_uniform(each[0] & each[1] & each[2] & each[3])
