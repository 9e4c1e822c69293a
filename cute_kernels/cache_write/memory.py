"""Vectors of a row: at most 16 bytes in registers, loaded and stored at any address.

A whole vector at an aligned address is one access; any other goes element by element, of which only those inside the
row are accessed."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, const_expr

from ..device import copy

UNITS = {1: Uint8, 2: Uint16}  # bytes of an element -> type


def view(address: Int64, dtype, count, align):
    """Return a tensor of `count` elements in global memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def load(address: Int64, words: cute.Tensor, valid: Int32, unit: cutlass.Constexpr):
    """Load a vector, whose first `valid` elements of `unit` bytes exist, into words of 32 bits; others become 0."""
    size, per = const_expr(cute.size(words) * 4), const_expr(4 // unit)
    if valid * unit >= size and address % size == 0:
        copy.vector(view(address, Uint32, size // 4, size), words)
    else:
        narrow = view(address, UNITS[unit], size // unit, unit)
        for i in cutlass.range_constexpr(size // 4):
            word = Uint32(0)
            for e in cutlass.range_constexpr(per):
                if i * per + e < valid:
                    word = word | narrow[i * per + e].to(Uint32) << (8 * unit * e)
            words[i] = word


@cute.jit
def store(address: Int64, words: cute.Tensor, valid: Int32, unit: cutlass.Constexpr):
    """Store a vector of 32-bit words, of which the first `valid` elements of `unit` bytes belong to the row."""
    size, per = const_expr(cute.size(words) * 4), const_expr(4 // unit)
    if valid * unit >= size and address % size == 0:
        copy.vector(words, view(address, Uint32, size // 4, size))
    else:
        narrow = view(address, UNITS[unit], size // unit, unit)
        for i in cutlass.range_constexpr(size // unit):
            if i < valid:
                narrow[i] = (words[i // per] >> (8 * unit * (i % per))).to(UNITS[unit])
