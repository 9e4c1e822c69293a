"""Rotate Q and K of an attention call: Q to a new tensor, K from the pages of a cache to new pages.

`args` says where rows are and go. A token here is a row of Q or, behind these, a row of a page of K: a group of lanes
handles rows of one head each, so a row of K is read once and written once, wherever its page lies."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from ...device import copy, memory, warp
from ...device.clamp import clamp
from .. import places, rotate


class HeadRows(NamedTuple):
    """The rows of a token, one per head, as addresses of head 0. Strides are in bytes. heads: 0 if none is written."""

    source: Int64
    source_stride: Int64
    target: Int64
    target_stride: Int64
    heads: Int32
    position: Int32


class LanePairs(NamedTuple):
    """The pairs of a row that a lane rotates: 8 elements of the first half, and those of the second half that belong to
    them. first: byte where the first ones begin. apart: bytes between the two. exist: whether the row has them."""

    first: Int32
    apart: Int32
    exist: cutlass.Boolean


class PageEntry(NamedTuple):
    """An entry of a page table. request: -1 for none. column: its number in the request. page: what it holds."""

    request: Int32
    column: Int32
    page: Int32


@cute.jit
def owner(offsets: cute.Tensor, x: Int32):
    """Return the request with offsets[b] <= x < offsets[b + 1], or -1; offsets may be any values."""
    low, high = Int32(0), offsets.shape[0] - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if offsets[middle] <= x:
            low = middle
        else:
            high = middle
    return low if offsets[low] <= x and x < offsets[low + 1] else Int32(-1)


@cute.jit
def key_count(a, request: Int32):
    """Return the number of keys of a request, clamped as attention kernels clamp it."""
    page_size, count = Int32(places.page_size_of(a)), Int32(0)
    if a.kv_indptr.shape[0] > 0:
        entries, last = places.divide(a.k.shape[0], places.page_size_of(a)), page_size  # of all requests
        pages = clamp(a.kv_indptr[request + 1], 0, entries) - clamp(a.kv_indptr[request], 0, entries)
        if a.kv_lens.shape[0] > 0:
            last = clamp(a.kv_lens[request], 0, page_size)
        if pages > 0:
            count = (pages - 1) * page_size + last
    else:
        count = clamp(a.kv_lens[request], 0, a.tables.shape[2] * page_size)
    return count if a.k_cache.shape[0] > 0 else Int32(0)


@cute.jit
def query_position(a, token: Int32):
    """Return the position of a row of Q, which is 0 if it has no request."""
    position, request = Int32(0), owner(a.cu_seqlens, token)
    if request >= 0:
        position = key_count(a, request) - (cutlass.min(a.cu_seqlens[request + 1], a.q.shape[0]) - token)
    return position


@cute.jit
def entry_of(a, entry: Int32) -> PageEntry:
    """Return an entry by its number among those of all requests."""
    request, column, page, columns = Int32(-1), Int32(0), entry, a.tables.shape[2]
    if a.kv_indptr.shape[0] > 0:
        request = owner(a.kv_indptr, entry)
        if request >= 0:
            column = entry - cutlass.max(a.kv_indptr[request], 0)
        if columns > 0:
            page = a.tables[0, 0, entry]
    else:
        request = places.divide(entry, columns)
        column = entry - request * columns
        page = a.tables[request, 0, column]
    return PageEntry(request, column, page)


@cute.jit
def write_entry(a, entry: Int32, page: Int32):
    """Write the pages of K and V of an entry. page: negative if the cache lacks that of K."""
    line, column = Int32(0), entry
    if a.kv_indptr.shape[0] == 0:
        line = places.divide(entry, a.tables.shape[2])
        column = entry - line * a.tables.shape[2]
    a.tables_out[line, 0, column] = entry if page >= 0 else Int32(-1)
    a.tables_out[line, 1, column] = a.tables[line, 1, column]


@cute.jit
def rows_of(a, g) -> HeadRows:
    """Return the rows of a group's token, and write its entry of the page table if it is the first of its page."""
    queries = a.q.shape[0]
    source, source_stride = a.q.iterator.toint(), Int64(a.q.stride[1])
    target, target_stride = a.q_out.iterator.toint(), Int64(a.q_out.stride[1])
    heads, position = a.q.shape[1], Int32(0)
    if g.token < queries:
        source, target = memory.row_of(a.q, g.token, 0), memory.row_of(a.q_out, g.token, 0)
        position = query_position(a, g.token)
    else:
        row, page_size = g.token - queries, Int32(places.page_size_of(a))
        number = places.divide(row, page_size)
        within = row - number * page_size
        entry = entry_of(a, number)
        page = entry.page if 0 <= entry.page and entry.page < a.k_cache.shape[0] else Int32(-1)
        if within == 0 and g.own == 0 and g.lane == 0 and a.tables.shape[2] > 0:
            write_entry(a, number, page)
        position = entry.column * page_size + within
        heads = Int32(0)
        if page >= 0 and entry.request >= 0:
            heads = a.k.shape[1] if position < key_count(a, entry.request) else Int32(0)
        head_stride, row_stride = Int64(a.k_cache.stride[1]), Int64(a.k_cache.stride[2])
        if a.nhd > 0:
            head_stride, row_stride = row_stride, head_stride
        source = a.k_cache.iterator.toint() + 2 * (
            cutlass.max(page, 0) * Int64(a.k_cache.stride[0]) + within * row_stride
        )
        source_stride, target_stride = head_stride, Int64(a.k.stride[1])
        target = memory.row_of(a.k, row, 0)
    return HeadRows(source, 2 * source_stride, target, 2 * target_stride, heads, position)


def vector_at(address):
    """Return a vector of 8 elements as words: all rows are aligned, as attention kernels need them."""
    return memory.view(address, Uint32, 4, 16)


@cute.jit
def load_row(rows: HeadRows, head: Int32, at: LanePairs, words: cute.Tensor):
    """Load a lane's pairs of a row as words (4, 2), unless they are past the row or the last head."""
    if head < rows.heads and at.exist:
        for half in cutlass.range_constexpr(2):
            copy.vector(
                vector_at(rows.source + head * rows.source_stride + half * at.apart + at.first), words[None, half]
            )


@cute.jit
def load_rotation(a, position: Int32, at: LanePairs, cos: cute.Tensor, sin: cute.Tensor):
    """Compute the cosines and sines (8,) of a lane's pairs at a position, from the turns per position."""
    table = a.rope_table.iterator.toint() + 2 * at.first
    if at.exist:
        for part in cutlass.range_constexpr(2):
            high, low = cute.make_rmem_tensor(4, Float32), cute.make_rmem_tensor(4, Float32)
            copy.vector(memory.view(table + 16 * part, Float32, 4, 16), high)
            copy.vector(memory.view(table + 2 * at.apart + 16 * part, Float32, 4, 16), low)
            for e in cutlass.range_constexpr(4):
                radians = rotate.angle(Float32(position), high[e], low[e])
                cos[4 * part + e] = rotate.approximate("cos", radians)
                sin[4 * part + e] = rotate.approximate("sin", radians)


# The loop over the heads of a token: one iteration per row of the group.
#   waits for   the loads of the row, which the iteration before issued
#   computes    the row in fp32 registers: rotary embedding
#   stores      16 bits, in the new Q or K
# All heads of a token have one position, so cosines and sines are computed once. A lane has both elements of its pairs,
# whatever the head_dim: it needs no value of another lane, and half as many cosines and sines as elements.
@cute.jit
def gather_rows(spec: cutlass.Constexpr, a, g):
    """Rotate and write the group's rows of Q or K."""
    at = LanePairs(16 * g.lane, Int32(a.q.shape[2]), 16 * g.lane < a.q.shape[2])
    values = cute.make_rmem_tensor((rotate.HALF, 2), Float32)
    cos, sin = cute.make_rmem_tensor(rotate.HALF, Float32), cute.make_rmem_tensor(rotate.HALF, Float32)
    words, packed = cute.make_rmem_tensor((4, 2), Uint32), cute.make_rmem_tensor((4, 2), Uint32)
    words.fill(0)
    cos.fill(1.0)
    sin.fill(0.0)
    rows, head = rows_of(a, g), g.own
    load_row(rows, head, at, words)
    if head < rows.heads:
        load_rotation(a, rows.position, at, cos, sin)
    while head < rows.heads:
        for half in cutlass.range_constexpr(2):
            memory.unpack(spec.dtype, words[None, half], values[None, half])
        load_row(rows, head + a.k_groups, at, words)
        for e in cutlass.range_constexpr(rotate.HALF):
            first, second = values[e, 0], values[e, 1]
            values[e, 0] = warp.fma(-second, sin[e], first * cos[e])
            values[e, 1] = warp.fma(first, sin[e], second * cos[e])
        for half in cutlass.range_constexpr(2):
            memory.pack(spec.dtype, values[None, half], packed[None, half])
        if at.exist:
            target = rows.target + head * rows.target_stride + at.first
            for half in cutlass.range_constexpr(2):
                copy.vector(packed[None, half], vector_at(target + half * at.apart))
        head += a.k_groups
