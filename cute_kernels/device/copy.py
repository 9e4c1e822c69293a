"""TMA operands: how to copy a tile, where from, and its layout in shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .wgmma import smem_layout


@dataclass(frozen=True)
class Operand:
    atom: cute.CopyAtom  # copies one box
    gmem: cute.Tensor  # TMA coordinates: (rows, cols, ...)
    layout: cute.ComposedLayout  # (rows, cols, stages) in shared memory
    bytes: cutlass.Constexpr  # of one stage


def operand(t, shape, stages, box):
    """t (rows, cols, ...), last stride of cols 1: stages of `shape`, fetched in boxes of (box rows, 64 cols)."""
    layout = smem_layout(shape, stages, t.element_type)
    tiler = (box, 64)  # 64 16-bit columns: the 128 bytes of a swizzle row
    atom, gmem = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), t, cute.select(smem_layout(tiler, 1, t.element_type), mode=[0, 1]), tiler
    )
    return Operand(atom, gmem, layout, cute.size_in_bytes(t.element_type, cute.select(layout, mode=[0, 1])))


def boxes(op: Operand, smem, gmem, box):
    """(smem[box, row tile, col tile, stage], gmem[box, row tile, col tile, ...]) partitions for `cute.copy`."""
    s = cute.local_tile(smem, (box, 64), (None,) * cute.rank(smem))
    g = cute.local_tile(gmem, (box, 64), (None,) * cute.rank(gmem))
    return cpasync.tma_partition(
        op.atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
    )


def allocate(smem, op: Operand, dtype):
    return smem.allocate_tensor(dtype, op.layout.outer, 1024, op.layout.inner)
