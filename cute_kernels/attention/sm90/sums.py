"""The second level of O's accumulation: 8-bit MMAs add up in fewer bits than fp32 has, so that O moves, after every
`tile.promote` blocks, from the accumulators to sums in shared memory, which belong to its thread alone."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device.warp import fma
from .roles import roles

PIECE = 4  # values that a thread loads and stores at once: two of each of its rows


@dataclass(frozen=True)
class Sums:
    """What a thread knows of its sums. factors: what those of each row are to be multiplied by."""

    smem: cute.Tensor  # (PIECE, pieces)
    factors: cute.Tensor


def allocate(spec, smem):
    """(PIECE, pieces, threads): neighbouring threads at neighbouring places."""
    threads, pieces = 32 * roles(spec).warps("math"), spec.head_dim_vo // 2 // PIECE
    layout = cute.make_layout((PIECE, pieces, threads), stride=(1, PIECE * threads, PIECE))
    return smem.allocate_tensor(Float32, layout, 16)


def make(spec, smem):
    thread = cute.arch.thread_idx()[0] - roles(spec).first_thread("math")
    return Sums(smem[None, None, thread], cute.make_rmem_tensor(2, Float32))


@cute.jit
def reset(x: Sums):
    """A tile begins."""
    x.factors.fill(1.0)


@cute.jit
def advance(spec: cutlass.Constexpr, x: Sums, o: cute.Tensor, rescale: cute.Tensor, done: Int32):
    """`done` blocks of a tile have been added to O, which was multiplied by `rescale` for the next, and nothing is in
    flight: promote, if it is time to."""
    for k in cutlass.range_constexpr(2):
        x.factors[k] = x.factors[k] * rescale[k]
    if done % spec.tile.promote == 0:
        if done > spec.tile.promote:
            add(x, o)
        piece = cute.make_rmem_tensor(PIECE, Float32)
        for i in cutlass.range_constexpr(cute.size(x.smem, mode=[1])):
            for e in cutlass.range_constexpr(PIECE):
                piece[e] = o[const_expr(PIECE * i + e)]
            cute.autovec_copy(piece, x.smem[None, i])
        o.fill(0.0)
        x.factors.fill(1.0)


@cute.jit
def collect(spec: cutlass.Constexpr, x: Sums, o: cute.Tensor, done: Int32):
    """A tile ends after `done` times `advance`."""
    if done >= spec.tile.promote:
        add(x, o)


@cute.jit
def add(x: Sums, o: cute.Tensor):
    """O += sums."""
    for i in cutlass.range_constexpr(cute.size(x.smem, mode=[1])):
        piece = cute.make_rmem_tensor(PIECE, Float32)
        cute.autovec_copy(x.smem[None, i], piece)
        for e in cutlass.range_constexpr(PIECE):
            o[const_expr(PIECE * i + e)] = fma(piece[e], x.factors[const_expr(e // 2)], o[const_expr(PIECE * i + e)])
