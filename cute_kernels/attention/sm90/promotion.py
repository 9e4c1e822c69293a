"""The second level of O's accumulation: 8-bit MMAs add up in fewer bits than fp32 has, so that O moves, after every
`tile.promote` blocks, from the accumulators to sums in shared memory, which belong to its thread alone."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import copy
from ...device.warp import fma
from .roles import roles

PIECE = 4  # values that a thread loads and stores at once: two of each of its rows


@dataclass(frozen=True)
class PromotedAcc:
    """What a thread knows of its sums. factors: what those of each row are to be multiplied by. counts: blocks until O
    moves; how often it has moved."""

    smem: cute.Tensor  # (PIECE, pieces)
    factors: cute.Tensor
    counts: cute.Tensor


def allocate(spec, smem):
    """(PIECE, pieces, threads): neighbouring threads at neighbouring places."""
    threads, pieces = 32 * roles(spec).warps("math"), spec.head_dim_vo // 2 // PIECE
    layout = cute.make_layout((PIECE, pieces, threads), stride=(1, PIECE * threads, PIECE))
    return smem.allocate_tensor(Float32, layout, 16)


def make(spec, smem):
    thread = cute.arch.thread_idx()[0] - roles(spec).first_thread("math")
    return PromotedAcc(smem[None, None, thread], *(cute.make_rmem_tensor(2, kind) for kind in (Float32, Int32)))


@cute.jit
def reset(spec: cutlass.Constexpr, x: PromotedAcc):
    """A tile begins."""
    x.factors.fill(1.0)
    x.counts[0], x.counts[1] = Int32(spec.tile.promote), Int32(0)


@cute.jit
def rescale(x: PromotedAcc, factors: cute.Tensor):
    """O was multiplied by `factors`."""
    for k in cutlass.range_constexpr(2):
        x.factors[k] = x.factors[k] * factors[k]


@cute.jit
def advance(spec: cutlass.Constexpr, x: PromotedAcc, o: cute.Tensor, blocks: Int32):
    """As many blocks, at most counts[0], have been added to O, and nothing is in flight: promote, if it is time to."""
    x.counts[0] -= blocks
    if x.counts[0] == 0:
        if x.counts[1] > 0:
            add(x, o)
        piece = cute.make_rmem_tensor(PIECE, Float32)
        for i in cutlass.range_constexpr(cute.size(x.smem, mode=[1])):
            for e in cutlass.range_constexpr(PIECE):
                piece[e] = o[const_expr(PIECE * i + e)]
            copy.vector(piece, x.smem[None, i])
        o.fill(0.0)
        x.factors.fill(1.0)
        x.counts[0], x.counts[1] = Int32(spec.tile.promote), x.counts[1] + 1


@cute.jit
def collect(x: PromotedAcc, o: cute.Tensor):
    """A tile ends."""
    if x.counts[1] > 0:
        add(x, o)


@cute.jit
def add(x: PromotedAcc, o: cute.Tensor):
    """O += sums."""
    for i in cutlass.range_constexpr(cute.size(x.smem, mode=[1])):
        piece = cute.make_rmem_tensor(PIECE, Float32)
        copy.vector(x.smem[None, i], piece)
        for e in cutlass.range_constexpr(PIECE):
            o[const_expr(PIECE * i + e)] = fma(piece[e], x.factors[const_expr(e // 2)], o[const_expr(PIECE * i + e)])
