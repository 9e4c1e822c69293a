"""Stores to the cache: fp32 values to 16 bits, e4m3, e5m2, int8 or NVFP4."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from ..device import copy, memory, nvfp4, warp
from ..dtypes import LARGEST
from . import rotate
from .places import divide
from .spec import SF_VEC_SIZE

LARGE = 2.0**100  # above any quotient that is not saturated
FP32_MOST, FP32_LEAST = 2.0**128 - 2.0**104, 2.0**-126  # of normal numbers


class TargetRow(NamedTuple):
    """A row of the cache. address: of its first element. sf: address of the scale factors of its page and head, row 0;
    sf_row: bytes from one row of them to the next. row: of the page. interleaved: groups of 4 rows of scale factors
    lie block by block. scale: quantised values are divided by it; NVFP4: multiplied."""

    address: Int64
    sf: Int64
    sf_row: Int64
    row: Int32
    interleaved: Int32
    scale: Float32


@cute.jit
def scale_of(spec: cutlass.Constexpr, a, constant: Float32, tensor: cute.Tensor, head: Int32):
    """Return the scale of a head (`TargetRow.scale`): `constant`, or of a tensor with one scale per head or for all,
    which divides."""
    scale = constant
    if tensor.shape[0] > 0:
        scale = tensor[cutlass.min(head, tensor.shape[0] - 1)]
        if const_expr(spec.cache == "nvfp4"):
            if a.scales_multiply == 0:
                scale = reciprocal(scale)
    return scale


def reciprocal(x):
    """Return 1 / x, correctly rounded."""
    return cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def quotient(x, by, inverse):
    """Return x / by, correctly rounded, or a value that is saturated as x / by is. inverse: of `by`.

    The signs of the remainder are such that -0 stays -0."""
    q = cute.arch.fmax(cute.arch.fmin(x * inverse, Float32(LARGE)), Float32(-LARGE))
    return warp.fma(-warp.fma(q, by, -x), inverse, q)


def pack(kind, values):
    """Convert four fp32 values to a word of a type of 8 bits, saturated. NaN stays NaN; in int8 it becomes 0."""
    if kind == "int8":
        text = "{ .reg .b32 a, b, c, d; " + "".join(f"cvt.rni.s32.f32 {x}, {{$r{i}}}; " for i, x in enumerate("abcd"))
        text += "cvt.pack.sat.s8.s32.b32 c, d, c, 0; cvt.pack.sat.s8.s32.b32 {$w0}, b, a, c; }"
        return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=list(values))
    text = f"{{ .reg .b16 lo, hi; cvt.rn.satfinite.{kind}x2.f32 lo, {{$r1}}, {{$r0}}; "
    text += f"cvt.rn.satfinite.{kind}x2.f32 hi, {{$r3}}, {{$r2}}; mov.b32 {{$w0}}, {{lo, hi}}; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=list(values))


@cute.jit
def narrow_words(kind: cutlass.Constexpr, values: cute.Tensor, scale: Float32, inverse: Float32):
    """Return values, divided by `scale`, in words of a type of 8 bits. inverse: `reciprocal(scale)`."""
    words = cute.make_rmem_tensor(cute.size(values) // 4, Uint32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pack(kind, [quotient(values[4 * i + e], scale, inverse) for e in range(4)])
    return words


@cute.jit
def store_narrow(
    kind: cutlass.Constexpr, address: Int64, first: Int32, dim: Int32, values: cute.Tensor, scale: Float32
):
    """Store values, divided by `scale`, to elements `first` on of a row of `dim` elements of 8 bits."""
    memory.store(address + first, narrow_words(kind, values, scale, reciprocal(scale)), dim - first, 1)


def divided(x, by):
    """Return x / by, correctly rounded."""
    return cute.arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, by])


@cute.jit
def row_scale(kind: cutlass.Constexpr, g, values: cute.Tensor):
    """Return the scale with which the largest magnitude of a row becomes the largest number of its type. Each lane of
    the group has values of the row, zeros past its end. NaN does not count; the scale is a normal number.

    Attention reads it in one of two places: `attention.prepare` multiplies elements of K and V by it, and
    `attention.decode.row_scales` scores and P."""
    top, mask = Float32(0.0), rotate.group_mask(g.lanes)
    for i in cutlass.range_constexpr(cute.size(values)):
        top = cute.arch.fmax(top, cute.math.absf(values[i]))
    for i in cutlass.range_constexpr(5):
        if (1 << i) < g.lanes:
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << i, mask))
    scale = divided(cute.arch.fmin(top, Float32(FP32_MOST)), Float32(LARGEST[kind]))
    return cute.arch.fmax(scale, Float32(FP32_LEAST))


@cute.jit
def store_row_scale(g, address: Int64, scale: Float32):
    """Store the scale of a row, by the first lane of its group."""
    if g.lane == 0:
        memory.view(address, Float32, 1, 4)[0] = scale


@cute.jit
def nvfp4_words(values: cute.Tensor, scale: Float32):
    """Return (words of e2m1, the scale factor) of 8 or 16 values. If they are 8, the lane lane ^ 1 has the other half
    of the block."""
    count = const_expr(cute.size(values))
    f = nvfp4.compute_sf(nvfp4.block_amax(values, () if count == SF_VEC_SIZE else (1,)), scale)
    words = cute.make_rmem_tensor(count // 8, Uint32)
    for i in cutlass.range_constexpr(count // 8):
        words[i] = Uint32(nvfp4.codes(cute.make_tensor(values.iterator + 8 * i, cute.make_layout(8)), f))
    return words, f


@cute.jit
def store_block(address: Int64, sf: Int64, scale: Float32, values: cute.Tensor):
    """Store 8 or 16 values as NVFP4 to an aligned address, and their scale factor to address `sf`; of 8, see
    `nvfp4_words`, lanes of even numbers store it."""
    words, f = nvfp4_words(values, scale)
    copy.vector(words, memory.view(address, Uint32, cute.size(words), 4 * cute.size(words)))
    if cute.size(values) == SF_VEC_SIZE or cute.arch.lane_idx() % 2 == 0:
        memory.view(sf, Uint8, 1, 1)[0] = f.byte.to(Uint8)


@cute.jit
def store_nvfp4(target: TargetRow, first: Int32, dim: Int32, values: cute.Tensor):
    """Store 8 or 16 values (`nvfp4_words`) to elements `first` on of a row."""
    count = const_expr(cute.size(values))
    words, f = nvfp4_words(values, target.scale)
    memory.store(target.address + first // 2, words, Int32(count // 2), 1)
    if const_expr(count == SF_VEC_SIZE):
        store_sf(target, first // SF_VEC_SIZE, dim // SF_VEC_SIZE, f)
    elif first % SF_VEC_SIZE == 0:
        store_sf(target, first // SF_VEC_SIZE, dim // SF_VEC_SIZE, f)


@cute.jit
def store_sf(target: TargetRow, block: Int32, blocks: Int32, f: nvfp4.BlockScale):
    """Store the scale factor of a block of a row with `blocks` blocks."""
    row = target.row
    if target.interleaved > 0:
        # The factors of 4 rows, in the order (block, row), fill these rows.
        index = 4 * block + row % 4
        down = divide(index, blocks)
        row, block = row - row % 4 + down, index - down * blocks
    memory.view(target.sf + row * target.sf_row + block, Uint8, 1, 1)[0] = f.byte.to(Uint8)


@cute.jit
def store(spec: cutlass.Constexpr, target: TargetRow, first: Int32, dim: Int32, values: cute.Tensor):
    """Store values to elements `first` on of a row of the cache, which has `dim` elements."""
    if const_expr(spec.cache == "nvfp4"):
        store_nvfp4(target, first, dim, values)
    elif const_expr(spec.quantised):
        store_narrow(spec.cache, target.address, first, dim, values, target.scale)
    else:
        memory.store_values(spec.cache, target.address, first, dim, values)
