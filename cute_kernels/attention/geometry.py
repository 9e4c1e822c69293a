"""Rows, tokens and heads of a tile. Plain arithmetic: tested on ints, traced in kernels.

A tile's rows are query tokens of one query head, or, packed, (token, query head of one KV head's group) with the head
fastest: row = token * group + head. `fold` is the number of rows a token has: 1, or the group size when packed.
"""

import cutlass

MMA_ROWS = 16  # of the instruction that decoding uses


def fold(spec, a):
    """Rows that a token has in a tile: the query heads of a KV head where they are packed, else 1."""
    return a.q.shape[1] // a.k.shape[1] if spec.pack_gqa else 1


def tile_rows(q_len, fold):
    return q_len * fold


def tile_m(spec, rows):
    """Rows of the tiles of a request that has `rows`: with spec.split 16, 32 or 64, the least that holds them all."""
    if not spec.split:
        return spec.tile.m
    most = spec.tile.m // MMA_ROWS
    groups = cutlass.max(1, cutlass.min((rows + MMA_ROWS - 1) // MMA_ROWS, most))
    return cutlass.min(groups + groups // 3, most) * MMA_ROWS


def tile_tokens(m_block, m, q_len, fold):
    """First and last query token of a tile of m rows."""
    first = m_block * m
    return first // fold, (cutlass.min(first + m, tile_rows(q_len, fold)) - 1) // fold


def token_of(row, fold, pack):
    """Query token of a row."""
    return row // fold if pack else row


def head_of(row, head, fold, pack):
    """Query head of a row of the tile of `head` (a query head, or a KV head when packed)."""
    return head * fold + row % fold if pack else head


def kv_head_of(head, group, pack):
    return head if pack else head // group
