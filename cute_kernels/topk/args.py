"""Arguments of the top-k launches: the only statement of the kernels' launch ABI.

An absent optional tensor has size 0 in its first mode; it is never None. The kernel writes every output that is
present."""

from typing import Any, NamedTuple

FULL, LENGTHS, ENDS, DECODE, ABSOLUTE = range(5)  # meaning of `lengths`; n is the number of elements in a row's window


class TopKArgs(NamedTuple):
    """The arguments of the selection, with R rows of L scores."""

    scores: Any  # (R, L)             any row stride, last stride 1, any element-aligned address
    starts: Any  # (R | 0,)           int32: first element of the window of each row, default 0
    lengths: Any  # (R | R / next_n | 0,)  int32: FULL none, n = L - start; LENGTHS n; ENDS n + start;
    #                                 DECODE n of row r is lengths[r // next_n] - next_n + r % next_n + 1; ABSOLUTE
    #                                 as ENDS, and `out` has indices in the row, not in its window
    out: Any  # (R | 0, k)            int32: table entry, or index + offset; last stride 1
    raw: Any  # (R | 0, k)            int32: index relative to the window's start
    values: Any  # (R | 0, k)         the scores' dtype
    indices: Any  # (R | 0, k)        int64: as raw
    table: Any  # (B | 0, M)          int32: page table; last stride 1
    row_to_batch: Any  # (R | 0,)     int32: row of `table`, default r // next_n of row r
    table_starts: Any  # (R | 0,)     int32: added to the page, index // page_size, default 0
    offsets: Any  # (R | 0,)          int32: added to the index
    window: Any  # Int32              one of these
    next_n: Any  # Int32              rows per request
    page_size: Any  # Int32           of the entries of `table`
    k: Any  # Int32
    last_ties: Any  # Int32           among equal keys at the boundary, select the highest indices instead of the lowest
    enable_pdl: Any  # Int32          launch with programmatic stream serialisation


class SortArgs(NamedTuple):
    """The arguments of the sort: rows that are sorted in place and stably, by descending value in the order of bit
    patterns."""

    values: Any  # (R, k)             the scores' dtype; any row stride, last stride 1
    indices: Any  # (R, k)            int64
    enable_pdl: Any  # Int32          launch with programmatic stream serialisation
