"""What becomes of a selected element: page-table entry, offset index, plain index, value."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import keys
from .spec import BITS


@cute.jit
def translate(a, row: Int32, index: Int32):
    """The index as `out` wants it."""
    result = index
    if a.table.shape[0] > 0:
        batch, place = row, index >> a.page_shift
        if a.row_to_batch.shape[0] > 0:
            batch = a.row_to_batch[row]
        if a.table_starts.shape[0] > 0:
            place += a.table_starts[row]
        result = Int32(-1)
        if place >= 0 and place < a.table.shape[1] and batch >= 0 and batch < a.table.shape[0]:
            result = a.table[batch, place]
            if a.page_shift > 0 and result >= 0:
                result = (result << a.page_shift) | (index & ((Int32(1) << a.page_shift) - 1))
            elif a.page_shift > 0:
                result = Int32(-1)
    if a.offsets.shape[0] > 0:
        result += a.offsets[row]
    return result


@cute.jit
def place(spec: cutlass.Constexpr, a, row: Int32, position: Int32, index: Int32, key):
    """Output `position` of a row is the element `index` of its window."""
    if a.out.shape[0] > 0:
        a.out[row, position] = translate(a, row, index)
    if a.raw.shape[0] > 0:
        a.raw[row, position] = index
    if a.indices.shape[0] > 0:
        a.indices[row, position] = Int64(index)
    if a.values.shape[0] > 0:
        bits = cutlass.const_expr(BITS[spec.dtype])
        keys.raw(a.values, bits)[row, position] = keys.decode(key, bits).to(keys.TYPES[bits])


@cute.jit
def nothing(a, row: Int32, position: Int32):
    """Output `position` of a row is padding."""
    if a.out.shape[0] > 0:
        a.out[row, position] = Int32(-1)
    if a.raw.shape[0] > 0:
        a.raw[row, position] = Int32(-1)
    if a.indices.shape[0] > 0:
        a.indices[row, position] = Int64(-1)
