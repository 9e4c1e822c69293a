"""Which bytes of K and V, keys, rows and columns each lane of decode has. Plain arithmetic: tested on ints, traced in
kernels.

The order of k inside a dot product is arbitrary if Q uses the same one. Lane 4 g + t reads quarter t of each chunk (at
most 128 bytes) of a K row, and eighth g of each chunk of a V row, so that its loads are contiguous.
"""

from itertools import pairwise, product
from typing import NamedTuple

import cutlass

from ...device import copy, layout
from ..spec import SF_VEC_SIZE
from . import tile_table

DENSE_CHUNK = 32  # bytes of a dense row of K of which a lane has a quarter, two words


class CachedRow(NamedTuple):
    """A row of K or V as lanes read it from a stage: `chunks` pieces of `width` bytes, which are swizzled TMA boxes
    unless rows are dense (`is_dense`). Dense rows have three numbers more."""

    width: int
    chunks: int
    pitch: int = 0  # bytes from one dense row to the next; 0: rows are padded
    tail: int = 0  # bytes of K behind the last chunk
    valid: int = 0  # bytes of V in the last chunk

    @staticmethod
    def of_k(spec) -> "CachedRow":
        if not is_dense(spec):
            return CachedRow._padded(spec, spec.padded_qk)
        size = spec.head_dim_qk
        return CachedRow(DENSE_CHUNK, size // DENSE_CHUNK, size, size % DENSE_CHUNK)

    @staticmethod
    def of_v(spec) -> "CachedRow":
        row, size = CachedRow._padded(spec, spec.padded_vo), spec.head_dim_vo
        return row._replace(pitch=size, valid=size - (row.chunks - 1) * row.width) if is_dense(spec) else row

    @staticmethod
    def _padded(spec, dim) -> "CachedRow":
        size = dim * spec.kv.bits // 8
        return CachedRow(layout.width(size), size // layout.width(size))

    @property
    def row_bytes(self) -> int:
        """The bytes from one row to the next."""
        return self.pitch or self.width

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage per row."""
        return self.pitch or self.width * self.chunks

    def offset(self, n, key, chunk):
        """Return the offset of a chunk of row `key` in a stage of n rows, apart from the swizzle."""
        return key * self.pitch + chunk * self.width if self.pitch else (chunk * n + key) * self.width


def is_dense(spec):
    """Return whether rows of K and V are contiguous in shared memory, without padding and without a swizzle
    (`copy.DenseOperand`). Rows of 8-bit elements that TMA loads do, if they are no multiple of 64 bytes: swizzled boxes
    would have rows of 32 bytes, or padding."""
    return spec.kv.bits == 8 and spec.kv.source == "tma" and spec.head_dim_vo % 64 != 0


def operands(spec):
    """Return the operands of the main loop. Stages of dense rows have no padding."""
    dims = spec.dims if is_dense(spec) else (spec.padded_qk, spec.padded_vo)
    return tile_table.operands(spec.kv, spec.tile, dims)


def keys(spec):
    """Return the number of keys that a warp computes at a time, a multiple of 16. If all warps have the same rows, they
    compute one KV block at a time, else a part of one."""
    return spec.tile.n // spec.tile.warps


def columns(spec):
    """Return the number of output columns in a lane's piece of a chunk."""
    return CachedRow.of_v(spec).width // spec.kv.bits


def first_column(spec, number, eighth):
    """Return the output column of a lane's column `number`, when the lane has the given `eighth` of each chunk."""
    each = columns(spec)
    return number // each * each * 8 + eighth * each + number % each


def columns_at_once(spec):
    """Return how many of a lane's columns one reduction pass adds up: a power of two."""
    return tile_table.columns_at_once(spec.padded_vo)


def rows_at_once(spec):
    """Return how many of a warp's rows one reduction pass adds up."""
    return tile_table.rows_at_once(spec.padded_vo, spec.tile.rows_per_warp)


def reduction_passes(spec):
    """Return the passes of the reduction over the warps that share rows, in order: (first row within a warp's rows,
    first of a lane's columns)."""
    rows = range(0, spec.tile.rows_per_warp, rows_at_once(spec))
    return tuple(product(rows, range(0, spec.padded_vo // 8, columns_at_once(spec))))


def rows_of_pass(spec, low, left):
    """Return the number of rows, in a tile of `left` rows, of a pass that begins with row `low` of each warp."""
    count, each = rows_at_once(spec), spec.tile.rows_per_warp
    if count == each:
        return left
    return left // each * count + cutlass.min(cutlass.max(left % each - low, 0), count)


def row_of_pass(spec, low, index):
    """Return the tile row of the index-th row of a pass."""
    count = rows_at_once(spec)
    return index // count * spec.tile.rows_per_warp + low + index % count


def row_of_warp(spec, warp, i):
    """Return the tile row of the i-th row that a warp adds up and stores, in ascending order."""
    each = 32 // (2 * columns_at_once(spec))  # rows at once: a lane has 4 columns
    return (i // each * spec.tile.warps + warp) * each + i % each


def sf_lanes(spec):
    """Return the XOR masks of the lanes that together have the 16 columns of an NVFP4 block, 4 columns per lane."""
    count = columns_at_once(spec) // 4  # pieces per lane; the lane's i-th is number eighth * count + i
    return (1, count) if columns(spec) == 8 else (1, 2)


def num_n_tiles(spec):
    """Return the number of MMA n tiles: groups of 8 query rows per warp."""
    return spec.tile.rows_per_warp // 8


def warps_per_group(spec, m):
    """Return the number of warps that share a group of rows in a tile of m rows."""
    each, count = spec.tile.rows_per_warp, spec.tile.warps
    for less, more in pairwise(spec.tile.m_choices):
        fewer = spec.tile.warps * each // less - spec.tile.warps * each // more
        count -= cutlass.min(cutlass.max(m - less, 0), 1) * fewer
    return count


def sf_per_quarter(row: CachedRow):
    """Return the number of scale factors of a quarter of a chunk of a block-scaled row, of two elements per byte."""
    return row.width * 2 // (4 * SF_VEC_SIZE)


def scale_blocks(spec):
    """Return the number of scale factors that a lane needs per row of a block-scaled V."""
    return max(1, spec.padded_vo // (8 * SF_VEC_SIZE))


def num_v_offsets(spec):
    """Return the number of V offsets that a lane keeps: 2 if adjacent keys have different swizzle patterns (128-byte
    rows) or, of dense rows, if the last chunk is shorter than the others, else 1."""
    v = CachedRow.of_v(spec)
    return 2 if (v.valid < v.width if v.pitch else v.width == copy.SWIZZLE_BYTES) else 1


def v_offset_of(spec, chunk, key):
    """Return which of its V offsets a lane adds to read a chunk of a key, and the key to which it adds it."""
    v = CachedRow.of_v(spec)
    if v.pitch:
        return int(chunk + 1 == v.chunks and v.valid < v.width), key
    own = key % 2 if num_v_offsets(spec) == 2 else 0
    return own, key - own


def q_words(spec):
    """Return the words of a row of Q that a lane has, of two columns each."""
    k = CachedRow.of_k(spec)
    return (k.width * k.chunks + k.tail) * 8 // spec.kv.bits // 8
