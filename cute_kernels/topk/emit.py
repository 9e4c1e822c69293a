"""Write selected elements: page-table entry or offset index, plain index, value. Each output has a loop of its own,
so an absent output costs one branch."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..device.divisor import divide
from . import keys
from .spec import BITS


class OutputTarget(NamedTuple):
    """The constants from which the outputs of a row are computed."""

    batch: Int32  # row of the page table
    first: Int32  # entry of that row for the window's first page
    offset: Int32  # added to indices


@cute.jit
def entry(a, table: cute.Tensor, index: Int32, start: Int32):
    """Return the page-table entry of an index, or -1 if the row of the table has none."""
    result, page = Int32(-1), divide(index, a.page_size)
    inside = index - page * a.page_size
    page += start
    if page >= 0 and page < table.shape[0]:
        result = table[page]
        if a.page_size > 1:
            result = result * a.page_size + inside if result >= 0 else Int32(-1)
    return result


@cute.jit
def target(a, row: Int32) -> OutputTarget:
    """Read the target of a row. For absent tensors it is the row's request, 0 and 0."""
    batch, first, offset = divide(row, a.next_n), Int32(0), Int32(0)
    if a.row_to_batch.shape[0] > 0:
        batch = a.row_to_batch[row]
    if a.table_starts.shape[0] > 0:
        first = a.table_starts[row]
    if a.offsets.shape[0] > 0:
        offset = a.offsets[row]
    return OutputTarget(batch, first, offset)


@cute.jit
def write_outputs(spec: cutlass.Constexpr, a, s, x, position: Int32, count: Int32):
    """Write outputs [position, position + count) of row x.row.

    They are the elements of its window with the indices s.staged[0 .. count - 1]."""
    tid, bits = cute.arch.thread_idx()[0], const_expr(BITS[spec.dtype])
    # out: page-table entries, or indices plus an offset
    if a.out.shape[0] > 0:
        out = cute.domain_offset((position,), a.out[x.row, None])
        if a.table.shape[0] > 0:
            batch, start = s.target[0], s.target[1]
            if batch >= 0 and batch < a.table.shape[0]:
                for i in cutlass.range(tid, count, spec.threads, unroll=1):
                    out[i] = entry(a, a.table[batch, None], s.staged[i], start)
            else:
                for i in cutlass.range(tid, count, spec.threads, unroll=1):
                    out[i] = Int32(-1)
        else:
            for i in cutlass.range(tid, count, spec.threads, unroll=1):
                out[i] = s.staged[i] + s.target[2]
    # raw and indices: int32 and int64 indices in the window
    if a.raw.shape[0] > 0:
        raw = cute.domain_offset((position,), a.raw[x.row, None])
        for i in cutlass.range(tid, count, spec.threads, unroll=1):
            raw[i] = s.staged[i]
    if a.indices.shape[0] > 0:
        indices = cute.domain_offset((position,), a.indices[x.row, None])
        for i in cutlass.range(tid, count, spec.threads, unroll=1):
            indices[i] = Int64(s.staged[i])
    # values: gathered from the scores
    if a.values.shape[0] > 0:
        values = cute.domain_offset((position,), keys.bit_patterns(a.values, bits)[x.row, None])
        scores = cute.domain_offset((s.target[3],), keys.bit_patterns(a.scores, bits)[x.row, None])
        for i in cutlass.range(tid, count, spec.threads, unroll=1):
            values[i] = scores[s.staged[i]]


@cute.jit
def pad(spec: cutlass.Constexpr, a, row: Int32, first: Int32):
    """Write the padding, -1, to outputs [first, k) of a row. Values have no padding: no row of `top_k` is padded."""
    for i in cutlass.range(first + cute.arch.thread_idx()[0], a.k, spec.threads, unroll=1):
        if a.out.shape[0] > 0:
            a.out[row, i] = Int32(-1)
        if a.raw.shape[0] > 0:
            a.raw[row, i] = Int32(-1)
        if a.indices.shape[0] > 0:
            a.indices[row, i] = Int64(-1)
