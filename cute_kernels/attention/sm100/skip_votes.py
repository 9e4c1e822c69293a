"""Votes of the four warps of a warpgroup on skipping a block, in shared memory."""

import cutlass.cute as cute
from cutlass import Int32

from ...device import copy

WARPS = 4
BLOCKS = 2  # votes are kept on two blocks: a warp may still read those on a block while others vote on the next


def allocate(smem, groups: int) -> cute.Tensor:
    """Return room for the votes: (WARPS, groups, BLOCKS) words."""
    return smem.allocate_tensor(Int32, cute.make_layout((WARPS, groups, BLOCKS)), 16)


def of_block(words: cute.Tensor, group, block: Int32) -> cute.Tensor:
    """Return the (WARPS,) votes of a group on its block number `block`."""
    return words[None, group, block % BLOCKS]


@cute.jit
def cast(votes: cute.Tensor, warp: Int32, agrees):
    """Store the vote of a warp: whether all of its lanes agree."""
    all_lanes = cute.arch.vote_all_sync(agrees)
    with cute.arch.elect_one():
        votes[warp] = Int32(all_lanes)


@cute.jit
def all_agree(votes: cute.Tensor):
    """Return whether all four warps agree, as an Int32."""
    each = cute.make_rmem_tensor(WARPS, Int32)
    copy.vector(votes, each)
    return cute.arch.make_warp_uniform(each[0] & each[1] & each[2] & each[3])
