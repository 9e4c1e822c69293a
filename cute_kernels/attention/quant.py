"""Conversion of the words of K and V, in their storage format, to pairs of 16-bit operands of `mma.sync`.

Quantised caches are computed in fp16, which holds every e4m3 value, and every e2m1 value times its scale factor,
exactly. Nothing is written back: a word is converted where it is used, once for all query rows of a warp. Blackwell has
a `cvt` of two e2m1 codes (`tile.e2m1`). Elsewhere the bits of a code are moved to make an e4m3 number, too small by 2^6
because the exponent biases differ (`KVFormat.dequant_scale`), and `cvt` converts that to fp16.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..device import warp


class KVFormat(NamedTuple):
    """How a 32-bit word of a cached row becomes pairs of 16-bit operands (`unpack_row`, `unpack_two_rows`).

    elements: per word. order: the order in which conversion returns them. dequant_scale: what the results of MMAs must
    be multiplied by. The scale factors of blocks multiply the pairs: `scale_pairs`. zeroes_codes: whether words of V
    past the last key must become zeros, because they may be NaN.
    """

    name: str
    elements: int
    order: tuple[int, ...]
    dequant_scale: float
    zeroes_codes: bool = True


FORMATS = (
    KVFormat("16-bit", 2, (0, 1), 1.0),
    KVFormat("e4m3", 4, (0, 1, 2, 3), 1.0),
    KVFormat("e5m2", 4, (0, 1, 2, 3), 1.0),
    KVFormat("int8", 4, (0, 1, 2, 3), 1.0, False),
    # converted by way of e4m3; no e2m1 code is NaN, but Hopper's decode zeroes them: 16 of its 692 instructions
    KVFormat("nvfp4", 8, (0, 2, 4, 6, 1, 3, 5, 7), 64.0),
    KVFormat("e2m1", 8, tuple(range(8)), 1.0, False),  # NVFP4 on architectures with a `cvt` of its codes
)


def kv_format(spec) -> KVFormat:
    """Return the format of the spec's cache."""
    name = "16-bit" if spec.kv.bits == 16 else spec.kv.dtype
    if name == "nvfp4" and spec.tile.e2m1:
        name = "e2m1"
    return next(fmt for fmt in FORMATS if fmt.name == name)


def permute(x, y, selector):
    """Return four bytes of (x, y), `prmt`: the selector's digits name them, lowest first; those of x are 0 to 3."""
    text = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[x, y])


def broadcast(pair, half):
    """Return the low or high half of an f16x2 word in both halves: an operand of `mul_f16x2` that costs no
    instruction."""
    text = f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, {{$r0}}; mov.b32 {{$w0}}, {{{('lo, lo', 'hi, hi')[half]}}}; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[pair])


def mul_f16x2(pair, scale):
    """Multiply two pairs of fp16."""
    text = "{ .reg .b32 t; mov.b32 t, {$r1}; mul.rn.f16x2 {$w0}, {$r0}, t; }"  # takes no immediate operand
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[pair, scale])


def scale_pairs(pairs, factors, i):
    """Multiply pairs by the i-th scale factor, itself a pair; return them unchanged if there are none (None)."""
    return pairs if factors is None else [mul_f16x2(pair, factors[i]) for pair in pairs]


def scale_row(pairs, factor, dtype):
    """Multiply pairs of fp16 by a number in fp32, and return them as pairs of a 16-bit type."""
    to = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    text = "{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, {$r0}; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
    text += f"mul.f32 a, a, {{$r1}}; mul.f32 b, b, {{$r1}}; cvt.rn.{to}.f32 {{$w0}}, b, a; }}"
    return [
        cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[pair, Float32(factor)]) for pair in pairs
    ]


def from_e4m3(word):
    """Convert four e4m3 values to two pairs of neighbours."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; "
    text += "cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 2, read_only_args=[word]))


def from_e5m2(word):
    """Convert four e5m2 values to two pairs of neighbours: they become the high bytes of fp16 values."""
    return [permute(word, Uint32(0), 0x1404), permute(word, Uint32(0), 0x3424)]


def from_int8(word):
    """Convert four int8 values to two pairs of neighbours.

    A byte x + 128 below the high byte of 1024 is the fp16 number 1024 + x + 128: one subtraction gives x."""
    text = "{ .reg .b32 t, lo, hi; xor.b32 t, {$r0}, 0x80808080; prmt.b32 lo, t, 0x64646464, 0x4140; "
    text += "prmt.b32 hi, t, 0x64646464, 0x4342; mov.b32 t, 0x64806480; sub.rn.f16x2 {$w0}, lo, t; "
    text += "sub.rn.f16x2 {$w1}, hi, t; }"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 2, read_only_args=[word]))


def select(a, b, mask):
    """Return the bits of a where the mask has ones, else those of b."""
    text = "{ .reg .b32 t; mov.b32 t, {$r2}; lop3.b32 {$w0}, {$r0}, {$r1}, t, 0xE4; }"  # takes no immediate operand
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[a, b, mask])


def from_e2m1(word):
    """Convert eight e2m1 codes to e4m3 bytes, divided by 2^6: (elements 0, 2, 4, 6; elements 1, 3, 5, 7)."""
    signs, magnitudes = select(word, Uint32(0), Uint32(0x88888888)), Uint32(0x1C1C1C1C)  # opaque, so that it is shared
    return select(word << 2, signs << 4, magnitudes), select(word >> 2, signs, magnitudes)


def from_codes(word):
    """Convert the four bytes of a word, two e2m1 codes each, to pairs (`cvt` of Blackwell)."""
    text = "{ .reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, {$r0}; "
    text += " ".join(f"cvt.rn.f16x2.e2m1x2 {{$w{i}}}, b{i};" for i in range(4)) + " }"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[word]))


def unpack_row(fmt, word):
    """Convert a word of one row to pairs of its elements, in `fmt.order`."""
    if fmt.name == "16-bit":
        return [word]
    if fmt.name == "e4m3":
        return from_e4m3(word)
    if fmt.name == "e5m2":
        return from_e5m2(word)
    if fmt.name == "int8":
        return from_int8(word)
    if fmt.name == "e2m1":
        return from_codes(word)
    return [pair for half in from_e2m1(word) for pair in from_e4m3(half)]


def unpack_neighbours(fmt, word):
    """Convert a word of one row to pairs of neighbouring elements, in memory order."""
    if fmt.order == tuple(range(fmt.elements)):
        return unpack_row(fmt, word)
    even, odd = from_e2m1(word)
    return [pair for selector in (0x5140, 0x7362) for pair in from_e4m3(permute(even, odd, selector))]


def unpack_two_rows(fmt, a, b):
    """Convert the words `a` and `b` of two rows; for each element, in `fmt.order`, return the pair (a's, b's)."""
    if fmt.name == "16-bit":
        return [permute(a, b, 0x5410), permute(a, b, 0x7632)]
    if fmt.elements == 4:
        return [pair for selector in (0x5140, 0x7362) for pair in unpack_row(fmt, permute(a, b, selector))]
    if fmt.name == "e2m1":
        # bytes of two codes, one per row: first those of the even elements, then those of the odd ones
        low = Uint32(0x0F0F0F0F)
        even, odd = from_codes(select(a, b << 4, low)), from_codes(select(a >> 4, b, low))
        return [pair for two in zip(even, odd) for pair in two]
    # elements 0, 2, 1, 3 of both rows, then 4, 6, 5, 7
    pairs = [unpack_row(fmt, permute(a, b, selector)) for selector in (0x5140, 0x7362)]
    return [pair for half in (0, 2) for four in pairs for pair in four[half : half + 2]]


def sf_pair(byte):
    """Return the e4m3 scale factor in the low byte of a word, in both halves of a pair."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; }"
    return broadcast(cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[byte]), 0)


@cute.jit
def to_fp16(words: cute.Tensor, lanes: cutlass.Constexpr = 4):
    """Convert the bf16 pairs of a row to fp16 in place. `lanes` neighbouring lanes share the row.

    The row is divided by a power of two near its largest magnitude, which is returned.
    """
    values = cute.make_rmem_tensor(2 * cute.size(words), Float32)
    values.store(cute.recast_tensor(words, cutlass.BFloat16).load().to(Float32))
    top = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        top = cute.arch.fmax(top, cute.math.absf(values[i]))
    top = cute.arch.warp_reduction_max(top, threads_in_group=lanes)
    power, inverse = powers(top)
    values.store(values.load() * power)
    warp.convert16(values, cute.recast_tensor(words, cutlass.Float16))
    return inverse


def powers(top, largest=0):
    """Return a power of two that brings numbers of a magnitude `top` near 2^largest, and its inverse. fp16 lacks bf16's
    range, and a row does not need it after the product."""
    exponent = cutlass.max(Int32(27 + largest), cutlass.min(Int32(253), warp.bits(top) >> 23))
    return warp.from_bits((254 + largest - exponent) << 23), warp.from_bits((exponent - largest) << 23)
