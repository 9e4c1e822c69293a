"""Which page holds a row of a request: the only reader of page tables. Pages have a power of two of rows."""

import cutlass.cute as cute

K, V = 0, 1  # rows of a request's page table


def of_request(a, batch, which):
    """(M,): page ids of a request, of K or of V."""
    return a.kv.page_table[batch, which, None]


def shift(page_size):
    """log2 of a page size."""
    return cute.arch.popc(page_size - 1)


def page_of(pages, row, page_size):
    """The page of a row of a request."""
    return pages[row >> shift(page_size)]


def row_in_page(row, page_size):
    return row & (page_size - 1)
