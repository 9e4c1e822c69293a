"""fp32 values to NVFP4: e2m1 codes of a block of 16 and the block's e4m3 factor, bit by bit as `wrappers.fp4` makes
them. In integers and fp32, as Hopper has no conversion to e2m1.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint16

from ..device import copy, warp
from .spec import SF_VEC_SIZE

E2M1_MAX = 6.0  # code 7
E4M3_MAX = 448.0  # largest e4m3 value
EXPONENT_MASK = 0x7F800000  # bits of an fp32 value's
TO_GRID = 0x0B400000  # of 1.5 x 2^22, behind those of 1


class BlockScale(NamedTuple):
    """Of a block. byte: e4m3, in the low one. value: the same. inverse: nearly 1 / value. scale: what the values are
    multiplied with before they are divided; NaN where value is."""

    byte: Uint16
    value: Float32
    inverse: Float32
    scale: Float32


def divide(x, by, inverse):
    """x / by, rounded once, from 1 / by to a unit in the last place."""
    q = x * inverse
    return warp.fma(warp.fma(-q, by, x), inverse, q)


def max_nan(x, y):
    """Of x and |y|; NaN where one is."""
    text = "{ .reg .f32 t; abs.f32 t, {$r1}; max.NaN.f32 {$w0}, {$r0}, t; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x, y])


@cute.jit
def block_amax(values: cute.Tensor, sf_lanes: cutlass.Constexpr):
    """Magnitude in a block whose values the lanes lane ^ m share, m being any sum of `sf_lanes`, ascending powers of
    2."""
    top = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        top = max_nan(top, values[i])
    lanes = cutlass.const_expr(2 * sf_lanes[-1] if sf_lanes else 1)  # aligned: the others may be elsewhere
    mask = (
        Int32((1 << lanes) - 1) << (cute.arch.lane_idx() & (32 - lanes)) if cutlass.const_expr(sf_lanes) else Int32(0)
    )
    for m in cutlass.range_constexpr(len(sf_lanes)):
        top = max_nan(top, cute.arch.shuffle_sync_bfly(top, sf_lanes[m], mask))
    return top


@cute.jit
def compute_sf(top: Float32, scale: Float32):
    """Factor of a block whose largest magnitude is `top`. scale: the forward one of all blocks."""
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


@cute.jit
def codes(values: cute.Tensor, f: BlockScale):
    """Codes of at most 8 values in the bits of an Int32, the first lowest.

    A magnitude from 2^e on, e = 0, 1, 2, or 0 below 1, lies on a grid of 2^(e - 1): 1.5 x 2^(22 + e) more, and its
    units are the last bits. Their number plus 2 e is the code.
    """
    n = cute.size(values)
    word = Int32(0)
    for i in cutlass.range_constexpr(n):
        x = values[i] * f.scale
        magnitude = cute.arch.fmin(cute.math.absf(divide(x, f.value, f.inverse)), Float32(E2M1_MAX))  # NaN: E2M1_MAX
        exponent = warp.bits(cute.arch.fmax(magnitude, Float32(1.0))) & EXPONENT_MASK
        units = warp.bits(magnitude + warp.from_bits(exponent + TO_GRID)) & 7
        code = units + ((exponent >> 22) - 254) | warp.bits(x) >> 28 & 8
        word = word | code << (4 * i)
    return Int32(0) if f.value == 0.0 else word


def sf_word_index(a, token, head, block):
    """Place in o_sf, in units of 4 bytes, of the factors of 4 blocks of a row, `block` among them: the 128x4 layout."""
    of_head = a.out.o_fp4.shape[2] * 2 // SF_VEC_SIZE // 4
    row = token + a.out.o_sf_start
    tile = (row >> 7) * (a.out.o_fp4.shape[1] * of_head) + head * of_head + (block >> 2)
    return tile * 128 + (row & 31) * 4 + (row >> 5 & 3)


@cute.jit
def store_sf(a, token: Int32, head: Int32, block: Int32, f: BlockScale):
    """The factor of a row's block."""
    a.out.o_sf[4 * sf_word_index(a, token, head, block) + (block & 3)] = f.byte.to(Uint8)


@cute.jit
def store_sf4(a, token: Int32, head: Int32, block: Int32, word: Int32):
    """The factors of 4 blocks from `block` on, a byte each."""
    four = cute.make_rmem_tensor(4, Uint8)
    cute.recast_tensor(four, Int32)[0] = word
    copy.vector(four, cute.local_tile(a.out.o_sf, (4,), (sf_word_index(a, token, head, block),)))
