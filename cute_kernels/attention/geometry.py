"""Rows, tokens and heads of a tile. Plain arithmetic: tested on ints, traced in kernels.

A tile's rows are query tokens of one query head, or, packed, (token, query head of one KV head's group) with the head
fastest: row = token * group + head. `fold` is the number of rows a token has: 1, or the group size when packed.
"""

from itertools import pairwise

import cutlass


def fold(spec, a):
    """Rows that a token has in a tile: the query heads of a KV head where they are packed, else 1."""
    return a.q.shape[1] // a.k.shape[1] if spec.pack_gqa else 1


def tile_rows(q_len, fold):
    return q_len * fold


def warps(spec):
    """Math warps."""
    return 4 * spec.tile.warpgroups


def groups(spec):
    """With spec.split, how many groups of `spec.warp_rows` a tile may have: each has as many warps."""
    return [n for n in range(1, warps(spec) + 1) if warps(spec) % n == 0 and spec.warp_rows * n <= spec.tile.m]


def tile_m(spec, rows):
    """Rows of the tiles of a request that has `rows`: with spec.split those of the fewest groups that hold them all."""
    if not spec.split:
        return spec.tile.m
    each = m = spec.warp_rows
    for less, more in pairwise(groups(spec)):
        m += cutlass.min(cutlass.max(rows - less * each, 0), 1) * (more - less) * each
    return m


def shares(spec, m):
    """Warps of each group of a tile of m rows."""
    count = warps(spec)
    for less, more in pairwise(groups(spec)):
        fewer = warps(spec) // less - warps(spec) // more
        count -= cutlass.min(cutlass.max(m - less * spec.warp_rows, 0), 1) * fewer
    return count


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
