"""Rows, tokens and heads of a tile, lengths of a request. Plain arithmetic: tested on ints, traced in kernels.

A tile's rows are query tokens of one query head, or, packed, (token, query head of one KV head's group) with the head
fastest: row = token * group + head. pack_factor is 1, or the group size when packed; the tile's head is a query
head, or a KV head when packed.
"""

from itertools import pairwise

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.clamp import clamp
from ..device.divisor import SHIFT, Divisor
from .spec import PACK_GQA_MAX_GROUP, PACK_GQA_MAX_Q


def sequence_queries(a, b):
    """(first query token, query tokens) of request b: rows of q, whatever the offsets hold."""
    tokens = a.query.q.shape[0]
    start, end = clamp(a.query.cu_seqlens_q[b], 0, tokens), clamp(a.query.cu_seqlens_q[b + 1], 0, tokens)
    return start, cutlass.max(end - start, 0)


def ragged(a):
    """Whether K and V are rows of one tensor, without pages, where requests have starts of their own."""
    return a.kv.kv_lens.shape[0] == 0


def table_keys(length, columns, page_size):
    """Keys of a request that says `length`: as many as its row of the page table has room for."""
    return clamp(length, 0, columns * page_size)


def page_keys(pages, last, page_size):
    """Keys in so many pages, `last` of them in the last one."""
    return cutlass.max((cutlass.max(pages, 0) - 1) * page_size + clamp(last, 0, page_size), 0)


@cute.jit
def kv_start(a, b: Int32):
    """Of request b, where requests have starts of their own: its first entry of the page table, or, ragged, row."""
    room = a.kv.page_table.shape[2]
    if ragged(a):
        room = a.kv.k.shape[2]
    return clamp(a.kv.kv_starts[b], 0, room)


@cute.jit
def sequence_keys(a, b: Int32):
    """Keys of request b: as many as its page table or the tensors of rows have room for, whatever lengths and starts
    say, and none without pages."""
    page_size, keys = a.kv.k.shape[2], Int32(0)
    if a.kv.kv_starts.shape[0] == 0:
        keys = table_keys(a.kv.kv_lens[b], a.kv.page_table.shape[2], page_size)
    else:
        keys = cutlass.max(kv_start(a, b + 1) - kv_start(a, b), 0)
        if not ragged(a):
            keys = page_keys(keys, a.kv.kv_lens[b], page_size)
    return keys * cutlass.min(cutlass.min(a.kv.k.shape[0], a.kv.v.shape[0]), 1)


def mask_start(a, b):
    """Byte of the custom mask where that of request b begins."""
    return clamp(a.mask.mask_starts[b], 0, a.mask.custom_mask.shape[0])


def batch_size(a):
    """Requests."""
    return a.query.cu_seqlens_q.shape[0] - 1


def qhead_per_kvhead(a):
    """Query heads of a KV head."""
    return a.query.q.shape[1] // a.kv.k.shape[1]


def pack_factor(spec, a, q_len):
    """Rows that a token of a request of q_len tokens has in a tile: the query heads of a KV head where they are packed,
    else 1."""
    if spec.schedule == "stream_k":
        return qhead_per_kvhead(a)
    few = cutlass.min(cutlass.max(PACK_GQA_MAX_Q + 1 - q_len, 0), 1) * cutlass.min(
        cutlass.max(PACK_GQA_MAX_GROUP + 1 - qhead_per_kvhead(a), 0), 1
    )
    return 1 + few * (qhead_per_kvhead(a) - 1)


def pack_magic(pack_gqa, magic):
    """What makes a `Divisor` of the rows that a token has, which are packed (1) or not (0). magic: of the group."""
    whole = 1 << SHIFT
    return whole + pack_gqa * (magic - whole)


def pack_divisor(w):
    """Rows that a token has, as a divisor of rows of a tile."""
    return Divisor(w.pack_factor, w.pack_magic)


def num_tile_heads(a, pack_gqa):
    """Heads that the tiles of a request are counted by, whose rows are packed (1) or not (0)."""
    heads = a.query.q.shape[1]
    return heads + pack_gqa * (a.kv.k.shape[1] - heads)


def num_rows(q_len, pack_factor):
    """Rows of a request."""
    return q_len * pack_factor


def tile_m(spec, rows):
    """Rows of the tiles of a request that has `rows`: the least of the tile's m_choices that holds them all."""
    m_choices = spec.tile.m_choices
    m = m_choices[0]
    for less, more in pairwise(m_choices):
        m += cutlass.min(cutlass.max(rows - less, 0), 1) * (more - less)
    return m


def tile_tokens(m_block, m, q_len, pack_factor):
    """First and last query token of a tile of m rows."""
    first = m_block * m
    return first // pack_factor, (cutlass.min(first + m, num_rows(q_len, pack_factor)) - 1) // pack_factor


def token_of(row, pack_factor):
    """Query token of a row."""
    return row // pack_factor


def head_of(row, head, pack_factor):
    """Query head of a row of the tile of `head`."""
    return head * pack_factor + row % pack_factor


def kv_head_of(spec, a, w):
    """KV head of a tile."""
    return w.head_idx if spec.schedule == "stream_k" else w.head_idx * w.pack_factor // qhead_per_kvhead(a)
