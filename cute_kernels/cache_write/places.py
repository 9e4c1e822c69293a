"""Where the rows of a token go: its request and position, and its page and row. Values of index tensors may be any:
what does not lie in the cache names no row."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..device.clamp import clamp
from ..device.divisor import divide
from .args import ANGLES, FROM_FIRST, INDICES, PAGES, SLOTS

MOST = 0x7FFFFFFF  # the largest value of an index


class TokenPosition(NamedTuple):
    """The request and the position of a token; negative if it has none."""

    request: Int32
    position: Int32


class CachePlace(NamedTuple):
    """The page and the row of a token; the page is negative if it has none."""

    page: Int32
    row: Int32


def wide(a, name):
    """Return 1 if an index tensor holds int64 values, else 0."""
    return a.wide >> INDICES.index(name) & 1


class IndexWords(NamedTuple):
    """A value of an index tensor as it is stored: one word, or two of int64."""

    low: Int32
    high: Int32


@cute.jit
def request_element(values: cute.Tensor, i: Int32, words: Int32) -> IndexWords:
    """Load element i of an index tensor. Nothing waits for it before `clamped`. words: from `wide`."""
    low, high = values[i << words], Int32(0)
    if words > 0:
        high = values[(i << 1) + 1]
    return IndexWords(low, high)


@cute.jit
def clamped(x: IndexWords, words: Int32):
    """Return a value of an index tensor, clamped to [-1, 2^31)."""
    value = x.low
    if words > 0:
        if x.high > 0 or (x.high == 0 and value < 0):
            value = Int32(MOST)
        elif x.high < 0:
            value = Int32(-1)
    return cutlass.max(value, -1)


@cute.jit
def element(values: cute.Tensor, i: Int32, words: Int32):
    """Return element i of an index tensor, clamped to [-1, 2^31)."""
    return clamped(request_element(values, i, words), words)


@cute.jit
def request_slot(a, token: Int32) -> IndexWords:
    """Load the slot of a token if it has one, else return -1. Nothing waits for it before `place_of`."""
    slot, words = IndexWords(Int32(-1), Int32(-1)), wide(a, "slots")
    if a.places == SLOTS and token < (a.slots.shape[0] >> words):
        slot = request_element(a.slots, token, words)
    return slot


@cute.jit
def position_of(a, token: Int32) -> TokenPosition:
    """Return the request and the position of a token: as given, or from the offsets of the requests and either their
    lengths or the positions of their first tokens."""
    request, position = Int32(-1), Int32(-1)
    if a.batch_indices.shape[0] > 0:
        request = element(a.batch_indices, token, wide(a, "batch_indices"))
        position = element(a.positions, token, wide(a, "positions"))
    elif (a.cu_seqlens.shape[0] >> wide(a, "cu_seqlens")) > 1:
        # the last request that begins at or before the token
        words = wide(a, "cu_seqlens")
        low, high = Int32(0), (a.cu_seqlens.shape[0] >> words) - 1
        while high - low > 1:
            middle = (low + high) >> 1
            if element(a.cu_seqlens, middle, words) <= token:
                low = middle
            else:
                high = middle
        first, left = element(a.cu_seqlens, low, words), element(a.cu_seqlens, low + 1, words) - token
        if left > 0 and token >= first:
            given = element(a.kv_lens, low, wide(a, "kv_lens"))
            request, position = low, given - left
            if const_expr(a.rope is not None):
                if (a.rope & FROM_FIRST) != 0:
                    # a sum past 2^31 - 1 is negative, and so names no row
                    position = given + (token - first) if given >= 0 else Int32(-1)
    return TokenPosition(request, position)


@cute.jit
def page_entry(a, request: Int32, column: Int32):
    """Return entry `column` of the pages of a request, or -1 if it has none. Both may be any values."""
    entry = Int32(-1)
    if request >= 0 and column >= 0:
        if a.kv_indptr.shape[0] > 0:
            words, indptr_words = wide(a, "kv_indices"), wide(a, "kv_indptr")
            if request < (a.kv_indptr.shape[0] >> indptr_words) - 1:
                entries = a.kv_indices.shape[0] >> words
                begin = clamp(element(a.kv_indptr, request, indptr_words), 0, entries)
                end = clamp(element(a.kv_indptr, request + 1, indptr_words), 0, entries)
                if column < end - begin:
                    entry = element(a.kv_indices, begin + column, words)
        elif request < a.page_table.shape[0]:
            words = wide(a, "page_table")
            if column < (a.page_table.shape[1] >> words):
                entry = element(a.page_table[request, None], column, words)
    return entry


def page_size_of(a):
    """Return the rows of a page."""
    return cutlass.select_(a.nhd > 0, a.k_cache.shape[1], a.k_cache.shape[2])


class PagePool(NamedTuple):
    """The pages of a cache. size: rows of a page."""

    pages: Int32
    size: Int32


def pool_of(a) -> PagePool:
    """Return the pages that the caches of K and of V have in common."""
    return PagePool(cutlass.min(a.k_cache.shape[0], a.v_cache.shape[0]), page_size_of(a))


@cute.jit
def place_of(a, pool: PagePool, token: Int32, at: TokenPosition, requested: IndexWords) -> CachePlace:
    """Return the place of a token's rows. at: its request and position, which only PAGES reads. requested: its slot."""
    page, row, page_size = Int32(-1), Int32(0), Int32(pool.size)
    if a.places == SLOTS:
        slot = clamped(requested, wide(a, "slots"))
        if slot >= 0:
            page = divide(slot, page_size)
            row = slot - page * page_size
    elif a.places == PAGES:
        if at.position >= 0:
            column = divide(at.position, page_size)
            row = at.position - column * page_size
            page = page_entry(a, at.request, column)
    elif token < page_size:
        page, row = Int32(0), token
    if page >= pool.pages:
        page = Int32(-1)
    return CachePlace(page, row)


def rotation_rows(a):
    """Return the positions of which a launch has cosines and sines, 0 if it rotates nothing; of ANGLES: 1."""
    if a.rope_cos is None:
        return a.rope_table.shape[0]
    return cutlass.max(a.rope_table.shape[0], a.rope_cos.shape[0])


@cute.jit
def request_rope_position(a, token: Int32) -> IndexWords:
    """Load the rope position of a token if it has one, else return -1. Nothing waits for it before `rope_position`."""
    position, words = IndexWords(Int32(-1), Int32(-1)), wide(a, "rope_positions")
    if token < (a.rope_positions.shape[0] >> words):
        position = request_element(a.rope_positions, token, words)
    return position


@cute.jit
def rope_position(a, at: TokenPosition, requested: IndexWords):
    """Return the position at which a token's rows are rotated, or -1 if it is not a row of the table. at: its request
    and position, which serve if there are no `rope_positions`. requested: its rope position. Without a table: 0."""
    position, table_rows = Int32(0), rotation_rows(a)
    if table_rows > 0:
        position = at.position
        if a.rope_positions.shape[0] > 0:
            position = clamped(requested, wide(a, "rope_positions"))
        if (a.rope & ANGLES) == 0 and position >= table_rows:
            position = Int32(-1)
    return position
