"""Scale factors of the values of a row, and the codes that they give."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from ...cache_write import store
from ...device import memory, nvfp4, warp
from ...dtypes import LARGEST

E4M3_MOST = LARGEST["e4m3"]
FP32_MOST, FP32_LEAST = 2.0**128 - 2.0**104, 2.0**-126  # of normal numbers
LEAST_POWER = 1e-4  # of DeepSeek's scales, before they are rounded up to a power of two
LEAST_MAGNITUDE = 1e-4  # of the rows of an indexer's keys
LEAST_QUERY = 1e-10  # of those of its queries
LEAST_E2M1 = 2.0**-9  # factor: the smallest e4m3 number
ALL = 0xFFFFFFFF  # lanes of a warp
INVERSE = 254  # sum of the exponent bits of a power of two and its inverse


@cute.jit
def largest(values: cute.Tensor, lanes: cutlass.Constexpr, mask: Uint32):
    """Return the largest finite magnitude of the values of `lanes` neighbouring lanes; NaN does not count. mask: lanes
    that call it."""
    top = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        top = cute.arch.fmax(top, cute.math.absf(values[i]))
    for i in cutlass.range_constexpr(lanes.bit_length() - 1):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << i, mask))
    return cute.arch.fmin(top, Float32(FP32_MOST))


def power_above(x):
    """Return the smallest power of two that is at least x, a normal positive number."""
    return warp.from_bits((warp.bits(x) + 0x7FFFFF) & 0x7F800000)


@cute.jit
def scale_of(spec: cutlass.Constexpr, a, top: Float32):
    """Return the scale of values of e4m3 with a largest magnitude."""
    form = const_expr(spec.form)
    if const_expr(spec.index):
        top = cute.arch.fmax(top, Float32(LEAST_MAGNITUDE))
    scale = store.divided(top, Float32(E4M3_MOST))
    if const_expr(form.factor == "ue8m0"):
        scale = power_above(cute.arch.fmax(scale, Float32(LEAST_POWER)))
    elif a.power_of_two > 0:
        least = const_expr(FP32_LEAST if spec.index else LEAST_POWER)
        scale = power_above(cute.arch.fmax(scale, Float32(least)))
    else:
        scale = cute.arch.fmax(scale, Float32(FP32_LEAST))
    return scale


@cute.jit
def times_power(values: cute.Tensor, scale: Float32):
    """Return values, divided by a power of two, in words of e4m3."""
    inverse = warp.from_bits((INVERSE << 23) - warp.bits(scale))
    words = cute.make_rmem_tensor(cute.size(values) // 4, Uint32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = store.pack("e4m3", [values[4 * i + e] * inverse for e in range(4)])
    return words


@cute.jit
def e4m3_words(spec: cutlass.Constexpr, a, values: cute.Tensor, scale: Float32):
    """Return values, divided by the scale of `scale_of` or of a launch, in words of e4m3."""
    words = cute.make_rmem_tensor(cute.size(values) // 4, Uint32)
    if const_expr(spec.form.factor == "ue8m0"):
        words = times_power(values, scale)
    elif const_expr(spec.form.factor == "fp32"):
        if a.power_of_two > 0:
            found = times_power(values, scale)
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = found[i]
        else:
            found = store.narrow_words("e4m3", values, scale, store.reciprocal(scale))
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = found[i]
    else:
        words = store.narrow_words("e4m3", values, scale, store.reciprocal(scale))
    return words


@cute.jit
def store_factor(spec: cutlass.Constexpr, address: Int64, scale: Float32):
    """Store a factor of fp32 or ue8m0."""
    if const_expr(spec.form.factor == "fp32"):
        memory.view(address, Float32, 1, 4)[0] = scale
    else:
        memory.view(address, Uint8, 1, 1)[0] = (warp.bits(scale) >> 23).to(Uint8)


def e4m3_value(byte):
    """Return the value of a positive e4m3 number in the low byte of a Uint16."""
    text = "{ .reg .b32 pair; .reg .b16 lo, hi; cvt.rn.f16x2.e4m3x2 pair, {$r0}; mov.b32 {lo, hi}, pair; "
    text += "cvt.f32.f16 {$w0}, lo; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[byte])


def e4m3_byte(x):
    """Return an fp32 number as e4m3, saturated, in the low byte of a Uint16."""
    text = "{ .reg .f32 zero; mov.f32 zero, 0f00000000; cvt.rn.satfinite.e4m3x2.f32 {$w0}, zero, {$r0}; }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint16], read_only_args=[x])


@cute.jit
def block_scale(values: cute.Tensor) -> nvfp4.BlockScale:
    """Return the scale factor of a block of e2m1 codes: the largest magnitude over 6, rounded up to e4m3, so that no
    code saturates. A block with NaN has a factor of NaN."""
    text = "{ .reg .f32 most; mov.f32 most, {$r1}; min.NaN.f32 {$w0}, {$r0}, most; }"
    most = Float32(nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
    top = cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[nvfp4.block_amax(values, ()), most])
    exact = nvfp4.divide(top, Float32(nvfp4.E2M1_MAX), Float32(1.0 / nvfp4.E2M1_MAX))
    exact = nvfp4.max_nan(Float32(LEAST_E2M1), exact)
    byte = e4m3_byte(exact)
    if e4m3_value(byte) < exact and byte < Uint16(0x7E):
        byte = byte + Uint16(1)
    value = e4m3_value(byte)
    text = "rcp.approx.ftz.f32 {$w0}, {$r0};"
    inverse = cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[value])
    keep = Int32(-1) if value == value else Int32(0x77777777)
    return nvfp4.BlockScale(byte, value, inverse, Float32(1.0) + (value - value), keep)


def store_e2m1_factor(spec, address, number, f):
    """Store factor `number` of a row."""
    if spec.form.permuted:
        number = 8 * (number & 3) + (number >> 2)
    memory.view(address + number, Uint8, 1, 1)[0] = f.byte.to(Uint8)


@cute.jit
def e2m1_words(values: cute.Tensor, f: nvfp4.BlockScale):
    """Return the codes of 16 values as two words."""
    words = cute.make_rmem_tensor(2, Uint32)
    for i in cutlass.range_constexpr(2):
        words[i] = Uint32(nvfp4.codes(cute.make_tensor(values.iterator + 8 * i, cute.make_layout(8)), f))
    return words
