"""Where the scale factors of an NVFP4 output lie: e4m3, one per block of 16 elements, in the 128x4 layout."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, const_expr

from ..device import copy
from ..device.nvfp4 import BlockScale
from .spec import SF_VEC_SIZE

SF_COLUMNS = 4  # scale factors of a row in a tile of the layout


def sf_word_index(a, token, head, block):
    """Return the index in o_sf, in words of 4 bytes, of the word with the scale factor of `block`: the 128x4 layout.
    A head must have whole words."""
    of_head = a.out.o_fp4.shape[2] * 2 // SF_VEC_SIZE // SF_COLUMNS
    row = token + a.out.o_sf_start
    tile = (row >> 7) * (a.out.o_fp4.shape[1] * of_head) + head * of_head + (block >> 2)
    return tile * 128 + (row & 31) * 4 + (row >> 5 & 3)


def sf_index(a, token, head, block):
    """Return the index in o_sf of the scale factor of `block`."""
    blocks = a.out.o_fp4.shape[2] * 2 // SF_VEC_SIZE
    if const_expr(blocks % SF_COLUMNS == 0):
        return 4 * sf_word_index(a, token, head, block) + (block & 3)
    column, row = head * blocks + block, token + a.out.o_sf_start
    tile = (row >> 7) * ((a.out.o_fp4.shape[1] * blocks + SF_COLUMNS - 1) // SF_COLUMNS) + (column >> 2)
    return tile * 512 + (row & 31) * 16 + (row >> 5 & 3) * 4 + (column & 3)


@cute.jit
def store_sf(a, token: Int32, head: Int32, block: Int32, f: BlockScale):
    """Store the scale factor of a row's block."""
    a.out.o_sf[sf_index(a, token, head, block)] = f.byte.to(Uint8)


@cute.jit
def store_sf4(a, token: Int32, head: Int32, block: Any, count: cutlass.Constexpr, word: Int32):
    """Store the scale factors of `count` blocks, at most 4, from `block` on, one byte of `word` each."""
    four = cute.make_rmem_tensor(4, Uint8)
    cute.recast_tensor(four, Int32)[0] = word
    if const_expr(a.out.o_fp4.shape[2] * 2 // SF_VEC_SIZE % SF_COLUMNS == 0):
        copy.vector(four, cute.local_tile(a.out.o_sf, (4,), (sf_word_index(a, token, head, block),)))
    else:
        for i in cutlass.range_constexpr(count):
            a.out.o_sf[sf_index(a, token, head, block + i)] = four[i]
