"""The warp that issues all MMAs: those of tiles of two halves are in `mma_two_tiles`, of one half in `mma_pingpong`,
and where there is one group in `mma_one_group`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import pipeline
from ..prepare import dequantises
from ..schedule import work
from . import mma_one_group, mma_pingpong, mma_two_tiles
from .mma_utils import MmaState
from .roles import SLOTS, groups, is_static, num_iterations, pingpong_groups


@cute.jit
def mma(spec: cutlass.Constexpr, plan, s):
    """One warp: the MMAs of all tiles."""
    base, t, at = s.tmem_ptr[0], Int32(0), MmaState(Uint32(0), Uint32(0), Int32(0))
    w = work.consume(spec, s, t)
    while w.is_valid != 0:
        if w.n_block_max > w.n_block_min:
            n = pingpong_groups(spec, w)
            pipeline.consumer_wait(s.q_ready_pipe if const_expr(dequantises(spec)) else s.q_pipe, at.tile)
            i = at.item
            if const_expr(groups(spec) < SLOTS):
                i = mma_one_group.mma_tile(spec, s, base, w, at)
            elif const_expr(is_static(n, 1)):
                i = mma_two_tiles.mma_tile(spec, s, base, w, at)
            elif const_expr(is_static(n, SLOTS)):
                i = mma_pingpong.mma_tile(spec, s, base, w, at)
            elif n == 1:
                i = mma_two_tiles.mma_tile(spec, s, base, w, at)
            else:
                i = mma_pingpong.mma_tile(spec, s, base, w, at)
            at = MmaState(i, at.iteration + Uint32(num_iterations(spec, w)), at.tile + 1)
        t += 1
        w = work.consume(spec, s, t)
