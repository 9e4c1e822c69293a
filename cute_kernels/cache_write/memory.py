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
    count, bits = const_expr(cute.size(words)), const_expr(8 * unit)
    size = const_expr(4 * count)
    if valid * unit >= size and address % size == 0:
        copy.vector(view(address, Uint32, count, size), words)
    else:
        narrow = view(address, UNITS[unit], size // unit, unit)
        words.fill(0)
        held = cutlass.min(valid, size // unit)
        for e in cutlass.range(held, unroll=1):
            # from the last element to the first, each pushes the others up
            for i in cutlass.range_constexpr(count - 1, -1, -1):
                below = narrow[held - 1 - e].to(Uint32) if const_expr(i == 0) else words[i - 1] >> (32 - bits)
                words[i] = words[i] << bits | below


@cute.jit
def store(address: Int64, words: cute.Tensor, valid: Int32, unit: cutlass.Constexpr):
    """Store a vector of 32-bit words, of which the first `valid` elements of `unit` bytes belong to the row."""
    count, bits = const_expr(cute.size(words)), const_expr(8 * unit)
    size = const_expr(4 * count)
    if valid * unit >= size and address % size == 0:
        copy.vector(words, view(address, Uint32, count, size))
    else:
        narrow, rest = view(address, UNITS[unit], size // unit, unit), cute.make_rmem_tensor(count, Uint32)
        for i in cutlass.range_constexpr(count):
            rest[i] = words[i]
        for e in cutlass.range(cutlass.min(valid, size // unit), unroll=1):
            narrow[e] = rest[0].to(UNITS[unit])
            for i in cutlass.range_constexpr(count):
                above = Uint32(0) if const_expr(i == count - 1) else rest[i + 1] << (32 - bits)
                rest[i] = rest[i] >> bits | above
