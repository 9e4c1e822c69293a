"""Conversion of fp32 values to NVFP4: e2m1 codes, and an e4m3 scale factor per block of 16.

The result equals that of `wrappers.fp4` bit for bit. The arithmetic is in integers and fp32: Hopper has no conversion
to e2m1.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32, const_expr

from . import warp

E2M1_MAX = 6.0  # code 7
E4M3_MAX = 448.0  # largest e4m3 value
COUNTER = 1.5 * 2.0**23  # its last bit counts ones
COUNTER_BITS = 0x4B400000
TO_FP32 = 2.0**126  # exponent biases: 127 of fp32, 1 of e2m1


class BlockScale(NamedTuple):
    """The scale factor of a block. byte: e4m3, in the low byte. value: its magnitude in fp32. inverse: about 1 / value.
    scale: the magnitude of what multiplies the values before the division by `value`; NaN if value is. A negative scale
    makes negative factors, so codes have the signs of the values. keep: the bits of 8 codes that may be set: none if
    value is 0, no sign if it is NaN."""

    byte: Uint16
    value: Float32
    inverse: Float32
    scale: Float32
    keep: Int32


def code_value(byte, i):
    """Return the value of code i, 0 or 1, of a byte.

    Its exponent and its mantissa become those of an fp32 number, subnormal if the code is 0.5."""
    word = byte << (28 - 4 * i) & Uint32(0x80000000) | byte << (22 - 4 * i) & Uint32(0x01C00000)
    return warp.from_bits(word) * Float32(TO_FP32)


def divide(x, by, inverse):
    """Return x / by, correctly rounded. inverse: 1 / by, accurate to one unit in the last place."""
    q = x * inverse
    return warp.fma(warp.fma(-q, by, x), inverse, q)


def max_nan(x, y):
    """Return the maximum of x and |y|; NaN if one of them is."""
    text = "{ .reg .f32 t; abs.f32 t, {$r1}; max.NaN.f32 {$w0}, {$r0}, t; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x, y])


@cute.jit
def block_amax(values: cute.Tensor, sf_lanes: cutlass.Constexpr):
    """Return the largest magnitude in a block. The lanes lane ^ m share the block, for every sum m of `sf_lanes`,
    ascending powers of 2."""
    top = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        top = max_nan(top, values[i])
    lanes = cutlass.const_expr(2 * sf_lanes[-1] if sf_lanes else 1)  # aligned: other lanes may be elsewhere
    mask = Int32(0)
    if cutlass.const_expr(sf_lanes):
        mask = Int32((1 << lanes) - 1) << (cute.arch.lane_idx() & (32 - lanes))
    for m in cutlass.range_constexpr(len(sf_lanes)):
        top = max_nan(top, cute.arch.shuffle_sync_bfly(top, sf_lanes[m], mask))
    return top


@cute.jit
def compute_sf(top: Float32, scale: Float32):
    """Return the `BlockScale` of a block with largest magnitude `top`. scale: the global scale of all blocks."""
    text = "{ .reg .f32 t; mov.f32 t, {$r1}; min.NaN.f32 {$w0}, {$r0}, t; }"
    most = Float32(E2M1_MAX * E4M3_MAX)
    scaled = cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[top * scale, most])
    byte = cute.arch.inline_ptx(
        "{ .reg .f32 zero; mov.f32 zero, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 {$w0}, zero, {$r0}; }",
        write_only_types=[Uint16],
        read_only_args=[divide(scaled, Float32(E2M1_MAX), Float32(1.0 / E2M1_MAX))],
    )
    value = cute.arch.inline_ptx(
        "{ .reg .b32 pair; .reg .b16 lo, hi; cvt.rn.f16x2.e4m3x2 pair, {$r0}; mov.b32 {lo, hi}, pair; "
        "cvt.f32.f16 {$w0}, lo; abs.f32 {$w0}, {$w0}; }",
        write_only_types=[Float32],
        read_only_args=[byte],
    )
    inverse = cute.arch.inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )
    keep = Int32(0) if value == 0.0 else Int32(-1)
    keep = keep if value == value else Int32(0x77777777)
    return BlockScale(byte, value, inverse, cute.math.absf(scale) + (value - value), keep)


def code_plus_counter(magnitude):
    """Return `COUNTER` plus the code of a magnitude, as fp32; NaN counts as E2M1_MAX.

    The e2m1 grid has steps of 0.5 up to 2 (codes 0 to 4), of 1 up to 4 (codes 4 to 6), and of 2 above. The code of a
    magnitude m is therefore 2 m in the first range, m + 2 in the second, and m / 2 + 4 in the third, rounded to an
    integer; and in each range it is the smallest of the three. Adding them to `COUNTER` rounds them, halves to even.
    The fp32 pipe adds, and the integer pipe, which is half as fast, takes only the minima."""
    halves = warp.fma(magnitude, Float32(2.0), Float32(COUNTER))
    ones = magnitude + Float32(COUNTER + 2)
    twos = warp.fma(magnitude, Float32(0.5), Float32(COUNTER + 4))
    return cute.arch.fmin(cute.arch.fmin(halves, ones), cute.arch.fmin(twos, Float32(COUNTER + 7)))


def bytes_of(words, which):
    """Return byte `which` of each of four words, as a word."""

    def two(x, y, selector):
        text = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};"
        return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[x, y])

    low, high = (two(x, y, which | which + 4 << 4) for x, y in (words[:2], words[2:]))
    return two(low, high, 0x5410)


@cute.jit
def codes(values: cute.Tensor, f: BlockScale):
    """Return the codes of at most 8 values in an Int32, the first in the lowest bits."""
    n = cute.size(values)
    word, signs, excess = Int32(0), Int32(0), 0
    for i in cutlass.range_constexpr(n - 1, -1, -1):
        magnitude = divide(cute.math.absf(values[i]) * f.scale, f.value, f.inverse)
        word = word * 16 + warp.bits(code_plus_counter(magnitude))
        excess += COUNTER_BITS << 4 * i
    bits = [warp.bits(values[i]) for i in range(n)]
    if const_expr(n == 8):
        # bytes of the even and of the odd codes
        low, high = (bytes_of(bits[i::2], 3) for i in range(2))
        signs = low >> 4 & 0x08080808 | high & Int32(-0x7F7F7F80)
    else:
        for i in cutlass.range_constexpr(n):
            signs = signs | (bits[i] >> 28 & 8) << (4 * i)
    excess = ((excess & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000  # as Int32
    return (word - excess | signs) & f.keep
