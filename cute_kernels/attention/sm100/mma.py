"""The mma warp: it issues all MMAs of the CTA.

A tile's loop over KV blocks is `mma_tile`, of which there are two: `mma_two_halves` (256 rows) and `mma_one_half` (128
rows).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import pipeline
from ..schedule import work
from . import mma_one_half, mma_two_halves
from .mma_utils import MmaState
from .roles import SLOTS, groups, is_static, num_iterations, pingpong_groups


@cute.jit
def mma(spec: cutlass.Constexpr, plan, s):
    """Issue the MMAs of all tiles of the CTA. One warp."""
    # For each tile that has keys: wait for Q, then issue the tile's MMAs. `mma_tile` waits for K, V, P and O, and it
    # releases stages by tcgen05.commit: the arrival comes when all MMAs issued so far are done.
    #
    # A kernel with tiles of 256 and of 128 rows has two of the loops and chooses by the rows of the tile's request.
    # Both issue Q @ K^T ahead of P @ V, so that the tensor core has work while softmax makes the next P.
    #
    # SASS instructions that the warp issues per two KV blocks: 157 in 16 bits (flash-attn-4: 205, cuDNN: 148 to 160)
    # and 101 in e4m3 (127). Each MMA has an election of its own (`umma.mma`), which ptxas drops: all that a group of
    # MMAs needs stays in uniform registers. One election around the loop took 274, as nothing is uniform inside it.
    base = s.tmem_ptr[0]

    def mma_one_tile(w, _, at):
        if w.n_block_max > w.n_block_min:
            n = pingpong_groups(spec, w)
            # wait for Q
            pipeline.consumer_wait(s.q_pipe if const_expr(s.q_ready_pipe is None) else s.q_ready_pipe, at.tile)
            # S = Q @ K^T and O += P @ V of all blocks
            i = at.item
            if const_expr(groups(spec) < SLOTS or is_static(n, SLOTS)):
                i = mma_one_half.mma_tile(spec, plan.args, s, base, w, at)
            elif const_expr(is_static(n, 1)):
                i = mma_two_halves.mma_tile(spec, plan.args, s, base, w, at)
            elif n == 1:
                i = mma_two_halves.mma_tile(spec, plan.args, s, base, w, at)
            else:
                i = mma_one_half.mma_tile(spec, plan.args, s, base, w, at)
            at = MmaState(i, at.iteration + Uint32(num_iterations(spec, w)), at.tile + 1)
        return at

    work.for_each_tile(spec, s, mma_one_tile, MmaState(Uint32(0), Uint32(0), Int32(0)), carries_tile=True)
