"""Where a finished tile goes: O in 16 bits and LSE, straight from registers, rows outside the request left alone."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16

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


@cute.jit
def store_piece(a, token: Int32, head: Int32, piece: Int32, values: cute.Tensor):
    """Few fp32 values as piece number `piece` of a row of the output, 16-bit or, where the call has o8, e4m3."""
    n = cute.size(values)
    if a.o8.shape[0] > 0:
        target = cute.local_tile(a.o8[token, head, None], (n,), (piece,))
        out = cute.make_rmem_tensor(n, target.element_type)
        pairs = cute.recast_tensor(out, Uint16)
        for i in cutlass.range_constexpr(n // 2):
            pairs[i] = cute.arch.inline_ptx(
                "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Uint16],
                read_only_args=[values[2 * i + 1], values[2 * i]],
            )
        cute.autovec_copy(out, target)
    else:
        target = cute.local_tile(a.o[token, head, None], (n,), (piece,))
        out = cute.make_rmem_tensor(n, target.element_type)
        warp.convert16(values, out)
        cute.autovec_copy(out, target)


@cute.jit
def sink_of(a, head: Int32):
    """A head's sink, natural-log units, -inf where the call has none."""
    sink = -Float32.inf
    if a.sink.shape[0] > 0:
        sink = a.sink[head]
    return sink
