"""Logits in global memory, and the `clean` role, which writes -inf to the columns of keys that a token does not see. No
other role writes to these columns."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ... import abi
from ...device import copy, memory
from ...device.divisor import divide
from . import schedule
from .schedule import Tile

VECTOR = 16  # bytes
WORDS = {"fp32": 0xFF800000, "bf16": 0xFF80FF80}  # of -inf


def element_bytes(spec):
    """Return the bytes of a logit."""
    return abi.DTYPES[spec.out].width // 8


def store(spec, row, column, value):
    """Store a logit of a row that begins at an address."""
    size, dtype = element_bytes(spec), abi.DTYPES[spec.out]
    memory.view(row + Int64(column) * size, dtype, 1, size)[0] = dtype(value)


@cute.jit
def clean(spec: cutlass.Constexpr, a):
    """Fill the columns of every `ctas`-th token. Called by one warp."""
    if a.clean != 0:
        for token in cutlass.range(cute.arch.block_idx()[0], a.q.shape[0], cute.arch.grid_dim()[0], unroll=1):
            seen = schedule.window(a, Tile(divide(token, a.next_n), token, Int32(1)), Int32(0))
            begin, end = seen
            if a.compressed != 0:
                begin, end = Int32(0), seen.end - seen.begin
            row = memory.row_of(a.out, token)
            fill(spec, row, Int32(0), begin)
            fill(spec, row, end, a.out.shape[1])


@cute.jit
def fill(spec: cutlass.Constexpr, row: Int64, begin: Int32, end: Int32):
    """Fill columns [begin, end) of a row: whole vectors, and the elements before and behind them."""
    lane, size = cute.arch.lane_idx(), const_expr(element_bytes(spec))
    each = const_expr(VECTOR // size)
    before = Int32(row % VECTOR) // size  # elements of the row's first vector that are not the row's
    first = (begin + before + (each - 1)) // each * each - before
    last = (end + before) // each * each - before
    if first >= last:
        first, last = end, end
    words = cute.make_rmem_tensor(VECTOR // 4, Uint32)
    words.fill(WORDS[spec.out])
    for column in cutlass.range(first + each * lane, last, 32 * each, unroll=1):
        copy.vector(words, memory.view(row + Int64(column) * size, Uint32, VECTOR // 4, VECTOR))
    for column in cutlass.range(begin + lane, first, 32, unroll=1):
        store(spec, row, column, -Float32.inf)
    for column in cutlass.range(last + lane, end, 32, unroll=1):
        store(spec, row, column, -Float32.inf)
