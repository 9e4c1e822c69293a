"""Conversion of fp32 values to NVFP4: e2m1 codes, and an e4m3 scale factor per block of 16.

The result equals that of `wrappers.fp4` bit for bit. The arithmetic is in integers and fp32: Hopper has no conversion
to e2m1.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, const_expr

from . import warp

E2M1_MAX = 6.0  # code 7
E4M3_MAX = 448.0  # largest e4m3 value
EXPONENT_MASK = 0x7F800000  # the exponent bits of an fp32 value
TO_GRID = 0x0B400000  # the bits of 1.5 x 2^22 minus those of 1


class BlockScale(NamedTuple):
    """The scale factor of a block. byte: e4m3, in the low byte. value: the same in fp32. inverse: about 1 / value.
    scale: multiplies the values before the division by `value`; NaN if value is."""

    byte: Uint16
    value: Float32
    inverse: Float32
    scale: Float32


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
        "cvt.f32.f16 {$w0}, lo; }",
        write_only_types=[Float32],
        read_only_args=[byte],
    )
    inverse = cute.arch.inline_ptx("rcp.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])
    return BlockScale(byte, value, inverse, scale + (value - value))


def to_grid(magnitude):
    """Return an Int32, of which the low 3 bits are the code of a magnitude up to E2M1_MAX; NaN counts as E2M1_MAX.

    Let 2^e be the power of two below the magnitude, e = 0, 1, 2 (0 below 1). The e2m1 grid there has steps of
    2^(e - 1). Adding 1.5 x 2^(22 + e) rounds to this grid, and the last bits of the sum are the number of steps; this
    number plus 2 e is the code. The 2 e steps are added before, to the same summand."""
    magnitude = cute.arch.fmin(cute.math.absf(magnitude), Float32(E2M1_MAX))
    exponent = warp.bits(cute.arch.fmax(magnitude, Float32(1.0))) & EXPONENT_MASK
    return warp.bits(magnitude + warp.from_bits(exponent + (exponent >> 22) + (TO_GRID - 254)))


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
    word = Int32(0)
    scaled = [values[i] * f.scale for i in range(n)]
    signs = [warp.bits(x) for x in scaled]
    found = [to_grid(divide(x, f.value, f.inverse)) for x in scaled]
    if const_expr(n == 8):
        # bytes of the even and of the odd codes
        low, high = (bytes_of(found[i::2], 0) for i in range(2))
        low_signs, high_signs = (bytes_of(signs[i::2], 3) for i in range(2))
        word = low & 0x07070707 | high << 4 & 0x70707070
        word = word | low_signs >> 4 & 0x08080808 | high_signs & Int32(-0x7F7F7F80)
    else:
        for i in cutlass.range_constexpr(n):
            word = word | (found[i] & 7 | signs[i] >> 28 & 8) << (4 * i)
    return Int32(0) if f.value == 0.0 else word
