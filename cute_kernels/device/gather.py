"""Rows of global memory, gathered into a stage of shared memory by cp.async."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from . import layout

NO_ROW = -16  # address of a row that does not exist: aligned as cp.async wants even the address of no bytes
PIECES = {16: "cg", 8: "ca", 4: "ca"}  # bytes per lane and copy -> cache operator of cp.async


@cute.jit
def copy_rows(
    stored: cutlass.Constexpr, count: cutlass.Constexpr, starts: cutlass.Constexpr, stage: cute.Tensor, first: Int32,
    most: cutlass.Constexpr = 16, boxes: cutlass.Constexpr = (), begin: cutlass.Constexpr = 0,
):  # fmt: skip
    """Copy `count` rows into a stage (n, D), from row `first` on, a multiple of 8. Called by one warp. 32 / across rows
    at a time, box by box: `across` lanes copy a row of a box, and get its address once.

    stored: elements of a row in global memory, of each tensor that has a part of its columns. starts: likewise,
    addresses of rows, of row c, c + 32, ... in lane c; a row becomes zeros if it is negative. most: bytes of the
    largest copy; addresses are multiples of it. boxes: of columns that are copied, none for all. begin: the first of
    these rows that is copied.
    """
    n, lane, bits = const_expr(cute.size(stage, mode=[0])), cute.arch.lane_idx(), const_expr(stage.element_type.width)
    row_bytes = const_expr(cute.size(stage, mode=[1]) * bits // 8)
    sizes = const_expr([columns * bits // 8 for columns in stored])  # the last one is less than its boxes, if padded
    box = const_expr(layout.width(row_bytes))
    piece = const_expr(next(size for size in PIECES if size <= most and all(part % size == 0 for part in sizes)))
    across = const_expr(box // piece)
    rows, mine, byte = const_expr(32 // across), lane // across, lane % across * piece
    period = const_expr(max(1, 8 // rows))  # steps after which the swizzle repeats
    into = [stage.iterator.toint() + first * box + layout.swizzle(box, rows * i + mine, byte) for i in range(period)]
    text = f"cp.async.{PIECES[piece]}.shared.global [{{$r0}}], [{{$r1}}], {piece}, {{$r2}};"
    for c in cutlass.range_constexpr(begin // rows, count // rows):
        for part in cutlass.range_constexpr(len(sizes)):
            before, size = const_expr(sum(sizes[:part])), const_expr(sizes[part])
            end = const_expr(row_bytes if part + 1 == len(sizes) else before + size)
            start = cute.arch.shuffle_sync(starts[part][const_expr(rows * c // 32)], rows * c % 32 + mine)
            written = Int32(piece) if start >= 0 else Int32(0)
            target = into[const_expr(c % period)] + const_expr(c // period * period * rows * box)
            for k in cutlass.range_constexpr((end - before) // box):
                if const_expr(layout.is_chosen(boxes, before // box + k)):
                    at = target + const_expr((before // box + k) * n * box), start + byte + const_expr(k * box)
                    if const_expr((k + 1) * box > size):
                        written = written if byte < size - k * box else Int32(0)
                    cute.arch.inline_ptx(text, read_only_args=[*at, written])
