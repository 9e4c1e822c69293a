"""KV storage formats: words of cached rows -> pairs of 16-bit operands of `mma.sync`.

Quantised caches are computed with in fp16, which holds every e4m3 value, and every e2m1 value times its scale factor,
exactly. Nothing is written back: a word is converted where it is used, once for all query rows of a warp. Blackwell has
a `cvt` of two e2m1 codes (`Tile.e2m1`). Elsewhere a code becomes an e4m3 number by moving its bits, smaller by 2^6 as
the exponents' biases differ (KVFormat.unit), and `cvt` does the rest.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..device import warp


class KVFormat(NamedTuple):
    """elements: of a word; order: in which they come out; unit: what operands are to be multiplied by. pairs(word): two
    at a time. values(a, b): of each element, those of two rows. Factors of blocks multiply pairs: `scale`."""

    elements: int
    order: tuple[int, ...]
    dequant_scale: float
    pairs: Callable[..., list]
    values: Callable[..., list]


def mma_sync_dtype(spec):
    """Type that the MMA multiplies: the query's, or fp16 where the cache is quantised."""
    return spec.q if spec.kv.bits == 16 else "fp16"


def kv_format(spec) -> "KVFormat":
    if spec.kv.dtype == "nvfp4":
        return FORMATS["e2m1" if spec.tile.e2m1 else "nvfp4"]
    return FORMATS["" if spec.kv.bits == 16 else spec.kv.dtype]


def permute(x, y, selector):
    """The four bytes of (x, y) that a selector's digits name, the lowest first; those of x are 0 to 3."""
    text = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[x, y])


def broadcast(pair, half):
    """The low or high half of an f16x2 word in both halves: an operand of `times` that costs no instruction."""
    text = f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, {{$r0}}; mov.b32 {{$w0}}, {{{('lo, lo', 'hi, hi')[half]}}}; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[pair])


def mul_f16x2(pair, scale):
    """Product of pairs of fp16."""
    text = "{ .reg .b32 t; mov.b32 t, {$r1}; mul.rn.f16x2 {$w0}, {$r0}, t; }"  # takes no immediate operand
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[pair, scale])


def scale_pairs(pairs, factors, i):
    """Pairs times the i-th factor, itself a pair; as they are where the format has none (None)."""
    return pairs if factors is None else [mul_f16x2(pair, factors[i]) for pair in pairs]


def from_e4m3(word):
    """Two pairs of neighbours."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; "
    text += "cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 2, read_only_args=[word]))


def from_e5m2(word):
    """Two pairs of neighbours: fp16 whose low bytes are zeros."""
    return [permute(word, Uint32(0), 0x1404), permute(word, Uint32(0), 0x3424)]


def select(a, b, mask):
    """The bits of a where the mask has ones, of b elsewhere."""
    text = "{ .reg .b32 t; mov.b32 t, {$r2}; lop3.b32 {$w0}, {$r0}, {$r1}, t, 0xE4; }"  # takes no immediate operand
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[a, b, mask])


def from_e2m1(word):
    """Eight codes as e4m3 bytes, / 2^6: (elements 0, 2, 4, 6; elements 1, 3, 5, 7)."""
    signs, magnitudes = select(word, Uint32(0), Uint32(0x88888888)), Uint32(0x1C1C1C1C)  # opaque, so that it is shared
    return select(word << 2, signs << 4, magnitudes), select(word >> 2, signs, magnitudes)


def from_codes(word):
    """The four bytes of a word, two codes each, as pairs."""
    text = "{ .reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, {$r0}; "
    text += " ".join(f"cvt.rn.f16x2.e2m1x2 {{$w{i}}}, b{i};" for i in range(4)) + " }"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[word]))


def pairs16(word):
    return [word]


def values16(a, b):
    return [permute(a, b, 0x5410), permute(a, b, 0x7632)]


def values8(from_word):
    return lambda a, b: [*from_word(permute(a, b, 0x5140)), *from_word(permute(a, b, 0x7362))]


def pairs4(word):
    return [pair for half in from_e2m1(word) for pair in from_e4m3(half)]


def neighbours(fmt, word):
    """Pairs of neighbours of a word's elements, in their order."""
    if fmt.order == tuple(range(fmt.elements)):
        return fmt.pairs(word)
    even, odd = from_e2m1(word)
    return [pair for selector in (0x5140, 0x7362) for pair in from_e4m3(permute(even, odd, selector))]


def sf_pair(byte):
    """The scale factor in the low byte of a word, as a pair."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; }"
    return broadcast(cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[byte]), 0)


def values4(a, b):
    pairs = [pairs4(permute(a, b, selector)) for selector in (0x5140, 0x7362)]  # of elements 0, 2, 1, 3 and 4, 6, 5, 7
    return [pair for half in (0, 2) for four in pairs for pair in four[half : half + 2]]


def values_of_codes(a, b):
    """Codes of the two rows become bytes first: of even elements, then of odd ones."""
    low = Uint32(0x0F0F0F0F)
    even, odd = from_codes(select(a, b << 4, low)), from_codes(select(a >> 4, b, low))
    return [pair for two in zip(even, odd) for pair in two]


@cute.jit
def to_fp16(words: cute.Tensor, lanes: cutlass.Constexpr = 4):
    """bf16 pairs of a row, which as many neighbouring lanes share, to fp16 in place, divided by the returned power of
    two, near the largest: fp16 has neither bf16's range nor needs it then."""
    values = cute.make_rmem_tensor(2 * cute.size(words), Float32)
    values.store(cute.recast_tensor(words, cutlass.BFloat16).load().to(Float32))
    top = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        top = cute.arch.fmax(top, cute.math.absf(values[i]))
    top = cute.arch.warp_reduction_max(top, threads_in_group=lanes)
    exponent = cutlass.max(Int32(27), cutlass.min(Int32(227), warp.bits(top) >> 23))
    values.store(values.load() * warp.from_bits((254 - exponent) << 23))
    warp.convert16(values, cute.recast_tensor(words, cutlass.Float16))
    return warp.from_bits(exponent << 23)


FORMATS = {  # "": 16-bit; "e2m1": NVFP4 where `cvt` takes its codes
    "": KVFormat(2, (0, 1), 1.0, pairs16, values16),
    "e4m3": KVFormat(4, (0, 1, 2, 3), 1.0, from_e4m3, values8(from_e4m3)),
    "e5m2": KVFormat(4, (0, 1, 2, 3), 1.0, from_e5m2, values8(from_e5m2)),
    "nvfp4": KVFormat(8, (0, 2, 4, 6, 1, 3, 5, 7), 64.0, pairs4, values4),
    "e2m1": KVFormat(8, tuple(range(8)), 1.0, from_codes, values_of_codes),
}
