"""Layouts of tiles in shared memory, under the swizzles of TMA and wgmma."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hh
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum


def smem_layout(shape, stages, dtype):
    """Return the layout of `stages` row-major tiles of `shape` (rows, cols), under the widest swizzle that cols
    allows: (rows, cols, stages)."""
    kind = hh.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, shape[1])
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (*shape, stages), order=(0, 1, 2))


def swizzle(width, row, byte):
    """Return the offset at which TMA stores byte `byte` of row `row` of a box with rows of `width` bytes.

    The swizzle is the widest that `width` allows."""
    return row * width + (byte ^ (row * width // 128 % (width // 16) * 16))


def is_chosen(boxes, box):
    """Return whether a box of columns is one of some, or whether there are none, which stands for all."""
    return not boxes or box in boxes


def width(cols):
    """Return the bytes per row of a box: the widest swizzle that divides rows of `cols` bytes."""
    return next(w for w in (128, 64, 32, 16) if cols % w == 0)
