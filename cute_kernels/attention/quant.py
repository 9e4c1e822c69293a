"""KV storage formats: words of cached rows -> pairs of 16-bit operands of `mma.sync`.

Quantised caches are computed with in fp16, which holds every e4m3 value, and every e2m1 value times its scale factor,
exactly. Nothing is written back: a word is converted where it is used, once for all query rows of a warp. An e2m1 code
becomes an e4m3 number by moving its bits, smaller by 2^6 as the exponents' biases differ, and `cvt` does the
rest.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Uint32


class Format(NamedTuple):
    """elements: of a word; order: in which they come out. pairs(word): two at a time. values(a, b): of each element,
    those of two rows."""

    elements: int
    order: tuple[int, ...]
    pairs: Callable[..., list]
    values: Callable[..., list]


def operand(spec):
    """Type that the MMA multiplies: the query's, or fp16 where the cache is quantised."""
    return "fp16" if spec.kv.dtype else spec.dtype


def permute(x, y, selector):
    """The four bytes of (x, y) that a selector's digits name, the lowest first; those of x are 0 to 3."""
    text = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[x, y])


def times(pair, scale):
    """Product of pairs of fp16."""
    text = "{ .reg .b32 t; mov.b32 t, {$r1}; mul.rn.f16x2 {$w0}, {$r0}, t; }"  # takes no immediate operand
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[pair, scale])


def from_e4m3(word):
    """Two pairs of neighbours."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; "
    text += "cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }"
    return list(cute.arch.inline_ptx(text, write_only_types=[Uint32] * 2, read_only_args=[word]))


def from_e2m1(word):
    """Eight codes as e4m3 bytes, / 2^6: (elements 0, 2, 4, 6; elements 1, 3, 5, 7)."""
    signs, magnitudes = Uint32(0x80808080), Uint32(0x1C1C1C1C)
    return word << 4 & signs | word << 2 & magnitudes, word & signs | word >> 2 & magnitudes


def scale_pairs(word):
    """Four scale factors, bytes of a word, as two pairs of fp16, times 2^6."""
    return [times(pair, Uint32(0x54005400)) for pair in from_e4m3(word)]  # 64, 64


def pairs16(word):
    return [word]


def values16(a, b):
    return [permute(a, b, 0x5410), permute(a, b, 0x7632)]


def values8(a, b):
    return [*from_e4m3(permute(a, b, 0x5140)), *from_e4m3(permute(a, b, 0x7362))]


def pairs4(word):
    return [pair for half in from_e2m1(word) for pair in from_e4m3(half)]


def values4(a, b):
    return [pair for half in zip(from_e2m1(a), from_e2m1(b)) for pair in values8(*half)]


FORMATS = {
    "": Format(2, (0, 1), pairs16, values16),
    "e4m3": Format(4, (0, 1, 2, 3), from_e4m3, values8),
    "nvfp4": Format(8, (0, 2, 4, 6, 1, 3, 5, 7), pairs4, values4),
}
