"""The second level of O's accumulation: 8-bit MMAs add up in fewer bits than fp32 has, so that O moves, after every
`tile.promote_interval` blocks, from the accumulators to sums in shared memory, which belong to its thread alone."""

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
    acc_scales: cute.Tensor
    counts: cute.Tensor


def allocate(spec, smem):
    """(PIECE, pieces, threads): neighbouring threads at neighbouring places."""
    threads, pieces = 32 * roles(spec).warps("mma"), spec.head_dim_vo // 2 // PIECE
    layout = cute.make_layout((PIECE, pieces, threads), stride=(1, PIECE * threads, PIECE))
    return smem.allocate_tensor(Float32, layout, 16)


def make(spec, smem):
    thread = cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
    return PromotedAcc(smem[None, None, thread], *(cute.make_rmem_tensor(2, kind) for kind in (Float32, Int32)))


@cute.jit
def reset(spec: cutlass.Constexpr, acc: PromotedAcc):
    """A tile begins."""
    acc.acc_scales.fill(1.0)
    acc.counts[0], acc.counts[1] = Int32(spec.tile.promote_interval), Int32(0)


@cute.jit
def rescale(acc: PromotedAcc, factors: cute.Tensor):
    """O was multiplied by `factors`."""
    for k in cutlass.range_constexpr(2):
        acc.acc_scales[k] = acc.acc_scales[k] * factors[k]


@cute.jit
def promote(spec: cutlass.Constexpr, acc: PromotedAcc, o: cute.Tensor, blocks: Int32):
    """As many blocks, at most counts[0], have been added to O, and nothing is in flight: promote, if it is time to."""
    acc.counts[0] -= blocks
    if acc.counts[0] == 0:
        if acc.counts[1] > 0:
            add_promoted(acc, o)
        piece = cute.make_rmem_tensor(PIECE, Float32)
        for i in cutlass.range_constexpr(cute.size(acc.smem, mode=[1])):
            for e in cutlass.range_constexpr(PIECE):
                piece[e] = o[const_expr(PIECE * i + e)]
            copy.vector(piece, acc.smem[None, i])
        o.fill(0.0)
        acc.acc_scales.fill(1.0)
        acc.counts[0], acc.counts[1] = Int32(spec.tile.promote_interval), acc.counts[1] + 1


@cute.jit
def finalize(acc: PromotedAcc, o: cute.Tensor):
    """A tile ends."""
    if acc.counts[1] > 0:
        add_promoted(acc, o)


@cute.jit
def add_promoted(acc: PromotedAcc, o: cute.Tensor):
    """O += sums."""
    for i in cutlass.range_constexpr(cute.size(acc.smem, mode=[1])):
        piece = cute.make_rmem_tensor(PIECE, Float32)
        copy.vector(acc.smem[None, i], piece)
        for e in cutlass.range_constexpr(PIECE):
            o[const_expr(PIECE * i + e)] = fma(
                piece[e], acc.acc_scales[const_expr(e // 2)], o[const_expr(PIECE * i + e)]
            )
