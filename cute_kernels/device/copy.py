"""TMA operands: how to copy a tile, where from, and its layout in shared memory. And copies of a vector."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .layout import smem_layout, width

SWIZZLE_BYTES = 128  # most that a row of a box has


@dataclass(frozen=True)
class TmaBox:
    """A TMA box of (rows, cols)."""

    atom: cute.CopyAtom
    gmem: cute.Tensor  # TMA coordinates: (rows, cols, ...)
    rows: cutlass.Constexpr
    cols: cutlass.Constexpr


@dataclass(frozen=True)
class TmaOperand:
    """A tensor that fills stages of shared memory with tiles, in boxes of one or several sizes (ascending)."""

    boxes: tuple[TmaBox, ...]
    layout: cute.ComposedLayout  # (rows, cols, stages) in shared memory
    bytes: cutlass.Constexpr  # of one stage


def box(t, rows):
    """t (rows, cols, ...), last stride of cols 1."""
    bits = t.element_type.width
    shape = rows, width(t.shape[1] * bits // 8) * 8 // bits
    layout = cute.select(smem_layout(shape, 1, t.element_type), mode=[0, 1])
    atom, gmem = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), t, layout, shape)
    return TmaBox(atom, gmem, *shape)


def operand(t, shape, stages, rows):
    """t (rows, cols, ...): stages of `shape`, fetched in boxes of any of `rows`."""
    layout = smem_layout(shape, stages, t.element_type)
    size = cute.size_in_bytes(t.element_type, cute.select(layout, mode=[0, 1]))
    return TmaOperand(tuple(box(t, r) for r in rows), layout, size)


def partition(b: TmaBox, smem, gmem):
    """(smem[box, row tile, col tile, stage], gmem[box, row tile, col tile, ...]) for `cute.copy`."""
    s = cute.local_tile(smem, (b.rows, b.cols), (None,) * cute.rank(smem))
    g = cute.local_tile(gmem, (b.rows, b.cols), (None,) * cute.rank(gmem))
    return cpasync.tma_partition(b.atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))


def allocate(smem, op: TmaOperand, dtype):
    return smem.allocate_tensor(dtype, op.layout.outer, 1024, op.layout.inner)


def vector(src, dst):
    """cute.autovec_copy; of up to 16 bytes, neighbours and aligned, by a tenth of the operations that are traced."""
    n = cute.size(src)
    if n * src.element_type.width > 128:
        return cute.autovec_copy(src, dst)
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), src.element_type, num_bits_per_copy=n * src.element_type.width
    )
    src, dst = (x if isinstance(x.shape, tuple) else cute.make_tensor(x.iterator, (n,)) for x in (src, dst))
    cute.copy_atom_call(atom, src, dst)
