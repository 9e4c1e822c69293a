"""Where a row of a request is: the only reader of page tables."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from .. import geometry

K, V = 0, 1  # rows of a request's page table


class KVBlock(NamedTuple):
    """One warp's part of a KV block. loader: number of the warp among those that fill a stage together; item: of the
    pipe; j: number of the block; head: KV head."""

    loader: Int32
    item: Int32
    n_block: Int32
    head: Int32
    kv_len: Int32


class SequencePages(NamedTuple):
    """The rows of K, or of V, of a request. pages: page ids of its tokens, in order. start: -1, or, without pages, the
    row of k and v where the request begins."""

    pages: cute.Tensor
    start: Int32


@cute.jit
def of_sequence(a, batch: Int32, which):
    """`SequencePages` of a request, of K or of V."""
    first, start = Int32(0), Int32(-1)
    if a.kv.kv_starts.shape[0] > 0:
        first, batch = geometry.kv_start(a, batch), Int32(0)
        if geometry.ragged(a):
            first, start = Int32(0), first
    return SequencePages(cute.domain_offset((first,), a.kv.page_table[batch, which, None]), start)


def shift(page_size):
    """log2 of a page size that is a power of two."""
    return cute.arch.popc(page_size - 1)


@cute.jit
def page_of(sequence_pages: SequencePages, row: Int32, page_size: Int32):
    """The page of a row of a request, where pages have a power of two of rows."""
    page = Int32(0)
    if sequence_pages.start < 0:
        page = sequence_pages.pages[row >> shift(page_size)]
    return page


@cute.jit
def row_in_page(sequence_pages: SequencePages, row: Int32, page_size: Int32):
    """The row of its page that is a row of a request, where pages have a power of two of rows; without pages, of k and
    v."""
    inside = row & (page_size - 1)
    if sequence_pages.start >= 0:
        inside = sequence_pages.start + row
    return inside
