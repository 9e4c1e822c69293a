"""Who has what in decode: bytes of cached rows, and the columns and keys of a warp's lanes. Plain arithmetic: tested on
ints, traced in kernels.

The k order inside a dot product is arbitrary as long as Q uses the same one. Lane 4 g + t reads quarter t of each (at
most 128-byte) chunk of a K row, and eighth g of each chunk of a V row, so its loads are contiguous.
"""

from itertools import pairwise, product
from typing import NamedTuple

import cutlass

from ...device import copy
from ..spec import SF_VEC_SIZE


class CachedRow(NamedTuple):
    """A row of K or V as TMA boxes see it: chunks of `width` bytes."""

    width: int
    chunks: int

    @staticmethod
    def of(spec, dim) -> "CachedRow":
        size = dim * spec.kv.bits // 8
        return CachedRow(min(size, copy.SWIZZLE_BYTES), max(1, size // copy.SWIZZLE_BYTES))


def keys(spec):
    """Keys that a warp computes at a time, a multiple of 16: all warps of a row together a KV block, or part of it."""
    return spec.tile.n // spec.tile.warps


def columns(spec):
    """Columns of the output that a lane's piece of a chunk has."""
    return CachedRow.of(spec, spec.head_dim_vo).width // spec.kv.bits


def first_column(spec, number, eighth):
    """Of the output, of a lane's column `number` on, in the `eighth` of its chunks."""
    each = columns(spec)
    return number // each * each * 8 + eighth * each + number % each


def columns_at_once(spec):
    """Columns of a lane that the warps of a row add up at a time."""
    return min(16, spec.head_dim_vo // 8)


def rows_at_once(spec):
    """Rows of a warp that the warps of a row add up at a time."""
    return 8 if columns_at_once(spec) == 16 else spec.tile.rows_per_warp


def reduction_passes(spec):
    """What the warps of a row add up one after the other: (first row of a warp, first column of a lane)."""
    rows = range(0, spec.tile.rows_per_warp, rows_at_once(spec))
    return tuple(product(rows, range(0, spec.head_dim_vo // 8, columns_at_once(spec))))


def rows_of_pass(spec, low, left):
    """Of a tile of `left` rows, those of the pass whose first row of a warp is `low`."""
    count, each = rows_at_once(spec), spec.tile.rows_per_warp
    if count == each:
        return left
    return left // each * count + cutlass.min(cutlass.max(left % each - low, 0), count)


def row_of_pass(spec, low, index):
    """Row of the tile that is the index-th of a pass."""
    count = rows_at_once(spec)
    return index // count * spec.tile.rows_per_warp + low + index % count


def row_of_warp(spec, warp, i):
    """Row of a tile that is the i-th of those that a warp adds up and stores, from lower rows to higher ones."""
    each = 32 // (2 * columns_at_once(spec))  # at once: a lane has 4 columns
    return (i // each * spec.tile.warps + warp) * each + i % each


def sf_lanes(spec):
    """Masks of lanes whose pieces, of 4 columns, make 16 neighbours."""
    count = columns_at_once(spec) // 4  # pieces of a lane, number eighth * count + i
    return (1, count) if columns(spec) == 8 else (1, 2)


def num_n_tiles(spec):
    """Columns of 8 query rows that a warp's operands of K and V are multiplied with."""
    return spec.tile.rows_per_warp // 8


def warps_per_group(spec, m):
    """Warps that share a group of rows of a tile of m rows."""
    each, count = spec.tile.rows_per_warp, spec.tile.warps
    for less, more in pairwise(spec.tile.m_choices):
        fewer = spec.tile.warps * each // less - spec.tile.warps * each // more
        count -= cutlass.min(cutlass.max(m - less, 0), 1) * fewer
    return count


def scale_blocks(spec):
    """Scale factors of a row of V that a lane needs."""
    return max(1, spec.head_dim_vo // (8 * SF_VEC_SIZE)) if spec.kv.block_scaled else 1


def num_v_offsets(spec):
    """Offsets of V that a lane keeps: 2 where adjacent keys use different swizzle patterns (128-byte rows), else 1."""
    return 2 if CachedRow.of(spec, spec.head_dim_vo).width == copy.SWIZZLE_BYTES else 1
