"""Where a finished tile goes: O in 16 bits and LSE, straight from registers, rows outside the request left alone."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device import warp


@cute.jit
def store_row(out: cute.Tensor, words: cute.Tensor, keep):
    """One row of O: `words` (D / 8,) are this lane's 2-element pieces of every 8-column group of the row.

    A quad transposes them so that each lane holds whole 16-byte groups, and stores 64 contiguous bytes at a time.
    """
    lane = cute.arch.lane_idx() % 4
    groups = cute.size(words)
    for k in cutlass.range_constexpr(0, groups, 4):
        warp.quad_transpose(words, k)
    if keep:
        for k in cutlass.range_constexpr(0, groups, 4):
            piece = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                piece[i] = words[k + i]
            cute.autovec_copy(cute.recast_tensor(piece, out.element_type), cute.local_tile(out, (8,), (k + lane,)))
