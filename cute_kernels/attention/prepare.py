"""What a raw stage of K or V, as it is stored, becomes before an MMA reads it.

Warps share the work; each makes its part of an operand stage visible to the MMA by a proxy fence, then arrives.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device import layout, warp
from .quant import permute

TOGETHER = 2  # matrices of 32 columns that a warp has in registers


def order(dim):
    """Column of V that each row of a transposed stage holds: of each 16, those of even places, then those of odd."""
    return [d // 16 * 16 + d % 8 * 2 + d // 8 % 2 for d in range(dim)]


def keys_order(n):
    """Key of a block that each column of a transposed stage holds: of each 16, pairs as accumulators of WGMMA have them
    in a quad, so that two neighbouring pairs of exponentials of a lane are four neighbours of the operand P."""
    return [k // 16 * 16 + k % 4 // 2 * 8 + k % 16 // 4 * 2 + k % 2 for k in range(n)]


@cute.jit
def transpose(raw: cute.Tensor, into: cute.Tensor, valid: Int32, share: Int32, shares: cutlass.Constexpr):
    """One of `shares` warps: an 8-bit stage (n keys, D) becomes (D, n), rows in `order`, columns in `keys_order`; zeros
    for keys from `valid` on."""
    if valid < cute.size(raw, mode=[0]):
        transpose_keys(raw, into, valid, share, shares, True)
    else:
        transpose_keys(raw, into, valid, share, shares, False)


@cute.jit
def transpose_keys(
    raw: cute.Tensor,
    into: cute.Tensor,
    valid: Int32,
    share: Int32,
    shares: cutlass.Constexpr,
    cut: cutlass.Constexpr,
):
    """`transpose` of a block that is `cut`, or not.

    A matrix of 8 keys x 8 pairs of columns, transposed as it is read, gives a lane two keys of a pair; with that of the
    8 keys behind it, bytes of even columns make a word of four keys, and those of odd ones.
    """
    n, dim = const_expr(cute.size(raw, mode=[0])), const_expr(cute.size(raw, mode=[1]))
    lane = cute.arch.lane_idx()
    row, matrix, quad = lane % 8, lane // 8, lane % 4
    width, across = const_expr(layout.width(dim)), const_expr(layout.width(n))
    source, target = raw.iterator.toint(), into.iterator.toint()

    def box(col):  # where a lane reads the matrices from column `col` on
        return col // width * (n * width) + layout.swizzle(width, matrix % 2 * 8 + row, col % width + matrix // 2 * 16)

    for c in cutlass.range_constexpr(n // 16 // shares):
        first = (c * shares + share) * 16  # key
        left = valid - first - 2 * quad
        keep = Uint32(0xFFFFFFFF)
        if const_expr(cut):
            keep = Uint32(0)
            for i, key in enumerate((0, 1, 8, 9)):
                keep |= Uint32(0xFF << 8 * i) if key < left else Uint32(0)
        from_ = source + first * width
        at = layout.swizzle(across, matrix * 8 + row, const_expr(c * shares * 16 % across) + share * 16)
        at += target + const_expr(c * shares * 16 // across * (dim * across))
        for g in cutlass.range_constexpr(0, dim // 32, TOGETHER):
            words = [warp.load_matrices(from_ + box(32 * k)) for k in range(g, min(g + TOGETHER, dim // 32))]
            for k in cutlass.range_constexpr(len(words)):
                w = words[k]
                made = [permute(w[i], w[i + 1], selector) for i in (0, 2) for selector in (0x6420, 0x7531)]
                made = [word & keep for word in made] if const_expr(cut) else made
                warp.store_matrices(at + const_expr((g + k) * 32 * across), made)
