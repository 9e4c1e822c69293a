"""Floats as unsigned keys of the same order, by bit pattern: +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN.

Memory is read in words of 32 bits: one fp32 or two 16-bit floats. A float in a register is left-aligned in 32 bits, so
a key is always 32 bits wide. The low half of a 16-bit float's key is 0 (positive) or all ones (negative).

The first histogram has BINS / 2 bins per sign. fp32 and bf16: 64 bins per octave over 16 octaves, from 2^-8 on;
smaller and larger magnitudes are in the outermost bins. fp16: 32 bins per octave, over all octaves."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint16, Uint32, const_expr

from ..device import warp
from .spec import BINS, BITS

HALF = BINS // 2  # bins per sign
SIGN = 0x80000000
# (least magnitude, log2 of the width of a bin) of the first histogram
WINDOW = {"fp32": (119 << 23, 17), "bf16": (119 << 23, 17), "fp16": (0, 21)}
FILLER = 0xFFFFFFFF  # a word of -NaN, the lowest float
TYPES = {32: Uint32, 16: Uint16}


def bit_patterns(tensor, bits):
    """Return a tensor of floats as a tensor of their bit patterns."""
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=TYPES[bits]), tensor.layout)


def per_word(spec):
    """Return the number of floats per 32-bit word."""
    return 32 // BITS[spec.dtype]


def extract(word, e, bits):
    """Return float e of a word, left-aligned."""
    if bits == 32:
        return word
    return word << 16 if e == 0 else word & Uint32(0xFFFF0000)


def to_key(x):
    """Return the key of a float x: x with all bits flipped if its sign is set, else with only the sign flipped."""
    return x ^ ((Int32(x) >> 31).to(Uint32) | Uint32(SIGN))


def from_key(key):
    """Return the float of a key: the inverse of `to_key`."""
    return key ^ ((~Int32(key) >> 31).to(Uint32) | Uint32(SIGN))


def xor_mask(min_key):
    """Return the mask m with x ^ m == to_key(x) for all floats x with the sign of `min_key`, a key.

    For floats of the other sign, x ^ m lies on the same side of `min_key` as to_key(x)."""
    return Uint32(SIGN) | ~(Int32(min_key) >> 31).to(Uint32)


def sign_multiplier(min_key):
    """Return the multiplier, 1 or -1, with x * multiplier + xor_mask == x ^ xor_mask.

    The multiply-add runs on another pipe than xor."""
    return Uint32((Int32(min_key) >> 31) * -2 - 1)


def bins_of(word, dtype):
    """Return the bins of a word's floats in the first histogram: a tuple of one (fp32) or two."""
    low, shift = WINDOW[dtype]
    if BITS[dtype] == 32:
        magnitude = cutlass.min(cutlass.max(Int32(word & Uint32(SIGN - 1)) - low, 0), (HALF << shift) - 1)
        return (HALF + ((magnitude >> shift) ^ (Int32(word) >> 31)),)
    both = lambda x: Uint32(x << 16 | x)  # noqa: E731
    low, shift = low >> 16, shift - 16
    magnitude = word & both(0x7FFF)
    if low:
        magnitude = warp.minmax_u16x2("max", magnitude, both(low)) - both(low)
        magnitude = warp.minmax_u16x2("min", magnitude, both((HALF << shift) - 1))
    negative = Uint32(cute.arch.prmt(word, Uint32(0), Uint32(0xBB99)))  # all ones in a half with its sign set
    bins = ((magnitude >> shift) & both(HALF - 1)) ^ both(HALF) ^ (negative & both(BINS - 1))
    return Int32(bins & Uint32(0xFFFF)), Int32(bins >> 16)


@cute.jit
def range_of(b: Int32, dtype: cutlass.Constexpr):
    """Return (least, greatest) key of bin `b` of the first histogram."""
    low, shift = const_expr(WINDOW[dtype][0]), const_expr(WINDOW[dtype][1])
    step = b - HALF if b >= HALF else HALF - 1 - b
    first, last = Uint32(0), Uint32(SIGN - 1)
    if step > 0:
        first = Uint32(low) + (Uint32(step) << shift)
    if step < HALF - 1:
        last = Uint32(low) + (Uint32(step + 1) << shift) - 1
    min_key, max_key = Uint32(SIGN - 1) - last, Uint32(SIGN - 1) - first
    if b >= HALF:
        min_key, max_key = Uint32(SIGN) + first, Uint32(SIGN) + last
    return min_key, max_key
