"""Layouts of tiles in shared memory."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hh
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum


def smem_layout(shape, stages, dtype):
    """(rows, cols, stages) row-major tile under the widest swizzle that cols allows."""
    kind = hh.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, shape[1])
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (*shape, stages), order=(0, 1, 2))


def swizzle(width, row, byte):
    """Where TMA puts a byte of a row of a box of `width` bytes, under the widest swizzle that it allows."""
    return row * width + (byte ^ (row * width // 128 % (width // 16) * 16))


def width(cols):
    """Bytes of the rows of a box, under the widest swizzle that rows of `cols` bytes allow."""
    return next(w for w in (128, 64, 32, 16) if cols % w == 0)
