"""Two-level accumulation of O. Hopper's 8-bit MMAs accumulate in fewer bits than fp32 has, so after every
`tile.promote_interval` KV blocks a thread adds its accumulators to fp32 sums of its own in shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import copy
from ...device.warp import fma
from .roles import roles

PIECE = 4  # values per load and store: two of each of the thread's rows


@dataclass(frozen=True)
class PromotedAcc:
    """A thread's promoted sums of O. acc_scales: pending scale of the sums of each row. counts: KV blocks until the
    next promotion; promotions so far."""

    smem: cute.Tensor  # (PIECE, pieces)
    acc_scales: cute.Tensor
    counts: cute.Tensor


def allocate(spec, smem) -> Any:
    """Allocate the sums, fp32 (PIECE, pieces, threads), the PIECE values of neighbouring threads side by side. Return
    None in kernels that do not promote O."""
    if spec.tile.promote_interval == 0:
        return None
    threads, pieces = 32 * roles(spec).warps("mma"), spec.padded_vo // spec.tile.o_parts // 2 // PIECE
    layout = cute.make_layout((PIECE, pieces, threads), stride=(1, PIECE * threads, PIECE))
    return smem.allocate_tensor(Float32, layout, 16)


def make(spec, smem) -> Any:
    """Make the thread's `PromotedAcc`. Return None in kernels that do not promote O; the functions below then do
    nothing."""
    if smem is None:
        return None
    thread = cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
    return PromotedAcc(smem[None, None, thread], *(cute.make_rmem_tensor(2, kind) for kind in (Float32, Int32)))


@cute.jit
def reset(spec: cutlass.Constexpr, acc: Any):
    """Begin a tile: no sums so far."""
    if const_expr(acc is not None):
        acc.acc_scales.fill(1.0)
        acc.counts[0], acc.counts[1] = Int32(spec.tile.promote_interval), Int32(0)


@cute.jit
def rescale(acc: Any, acc_scale: cute.Tensor):
    """Apply the scale by which the rows of acc_o were multiplied to the sums, when these are next read."""
    if const_expr(acc is not None):
        for k in cutlass.range_constexpr(2):
            acc.acc_scales[k] = acc.acc_scales[k] * acc_scale[k]


@cute.jit
def promote(spec: cutlass.Constexpr, acc: PromotedAcc, o: cute.Tensor, blocks: Int32):
    """Count `blocks` KV blocks, at most counts[0], and promote O if it is time to. No MMA may be in flight."""
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
def finalize(acc: Any, o: cute.Tensor):
    """End a tile: add the sums to O."""
    if const_expr(acc is not None):
        if acc.counts[1] > 0:
            add_promoted(acc, o)


@cute.jit
def add_promoted(acc: PromotedAcc, o: cute.Tensor):
    """O += sums * acc_scales."""
    for i in cutlass.range_constexpr(cute.size(acc.smem, mode=[1])):
        piece = cute.make_rmem_tensor(PIECE, Float32)
        copy.vector(acc.smem[None, i], piece)
        for e in cutlass.range_constexpr(PIECE):
            o[const_expr(PIECE * i + e)] = fma(
                piece[e], acc.acc_scales[const_expr(e // 2)], o[const_expr(PIECE * i + e)]
            )
