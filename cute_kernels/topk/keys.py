"""Floats as unsigned keys of the same order: +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN, by bit pattern.

Shared and global memory are read in words of 32 bits, one fp32 or two 16-bit floats; a key is 32 or 16 bits wide.
"""

import cutlass.cute as cute
from cutlass import Int32, Uint16, Uint32

from .spec import BITS

DIGITS = {32: ((21, 11), (10, 11), (0, 10)), 16: ((5, 11), (0, 5))}  # key bits -> (shift, bits) of each radix pass
BINS = 2048
TYPES = {32: Uint32, 16: Uint16}


def raw(tensor, bits):
    """The bit patterns of a tensor of floats."""
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=TYPES[bits]), tensor.layout)


def per_word(spec):
    return 32 // BITS[spec.dtype]


def encode(word, bits):
    """Keys of a word of floats: all bits flipped where the sign is set, else the sign alone."""
    if bits == 32:
        return word ^ ((Int32(word) >> 31).to(Uint32) | Uint32(0x80000000))
    signs = (word >> 15) & Uint32(0x00010001)
    return word ^ (signs * Uint32(0xFFFF) | Uint32(0x80008000))


def part(word, e, bits):
    """Key e of a word of keys."""
    return word if bits == 32 else (word >> (16 * e)) & Uint32(0xFFFF)
