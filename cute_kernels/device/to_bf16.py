"""Codes of 8 and 4 bits become bf16, in registers.

Hopper converts e4m3 to fp16 alone, and from there to bf16 only through fp32, at a quarter of the rate. Here the bits of
a code are put into the fields of a bf16, which is then too small by a power of two that `EXACT` repairs, for
subnormal codes, too. The codes for NaN become plus and minus 480."""

import cutlass.cute as cute
from cutlass import Uint32

BELOW = {"e4m3": 120, "e2m1": 126}  # type -> the exponent of that power of two


def power_pair(exponent: int) -> int:
    """Return a word with 2^exponent as a bf16, twice."""
    return (127 + exponent << 7) * 0x10001


EXACT = {kind: power_pair(exponent) for kind, exponent in BELOW.items()}


def e4m3_words(word, order=(0, 1, 2, 3)):
    """Return the bits of four e4m3 codes as two words of bf16, 2^-120 times their values. order: of the codes."""
    # a code in the low byte of each half, below eight copies of its sign; then all moves up by 4
    text = " ".join(
        f"prmt.b32 {{$w{i}}}, {{$r0}}, 0, {selector}; mul.lo.u32 {{$w{i}}}, {{$w{i}}}, 16; "
        f"and.b32 {{$w{i}}}, {{$w{i}}}, 0x87F087F0;"
        for i, selector in enumerate(f"0x{8 + high:X}{high}{8 + low:X}{low}" for low, high in (order[:2], order[2:]))
    )
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 2, read_only_args=[word])


def e2m1_words(word):
    """Return the bits of eight e2m1 codes, the first in the low bits, as four words of bf16, 2^-126 times their
    values."""
    # a byte times 0x1001 has its codes at 0 and 16; magnitude and sign move up by 6, and the sign on to the top
    lines = (
        f"bfe.u32 t, {{$r0}}, {8 * i}, 8; mul.lo.u32 t, t, {0x1001 << 6}; and.b32 t, t, 0x03C003C0; "
        f"and.b32 s, t, 0x02000200; mad.lo.u32 {{$w{i}}}, s, 63, t;"
        for i in range(4)
    )
    text = f"{{ .reg .b32 s, t; {' '.join(lines)} }}"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[word])


def e2m1_pairs(word):
    """Return the bits of eight e2m1 codes as four words of bf16, 2^-126 times their values: words of code i and of code
    i + 4, the first code being in the low bits."""
    # magnitudes move to bits 6 to 8 of each half, and signs to bit 15
    lines = (
        f"{up} t, {{$r0}}, {abs(6 - 4 * i)}; and.b32 t, t, 0x01C001C0; shl.b32 s, {{$r0}}, {12 - 4 * i}; "
        f"lop3.b32 {{$w{i}}}, s, 0x80008000, t, 0xEA;"  # s & 0x80008000 | t
        for i, up in enumerate(("shl.b32", "shl.b32", "shr.u32", "shr.u32"))
    )
    text = f"{{ .reg .b32 s, t; {' '.join(lines)} }}"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[word])


def multiply(word, factor):
    """Return the product of two words of two bf16 each."""
    text = "{ .reg .b32 f; mov.b32 f, {$r1}; mul.rn.bf16x2 {$w0}, {$r0}, f; }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[word, Uint32(factor)])


def pair(half):
    """Return a word with two copies of the low half of a word, of which the high half is 0."""
    return half * Uint32(0x10001)


def factor_pair(kind, bits, exponent=0):
    """Return a factor times 2^exponent as a bf16, twice. kind: its type, as in `records`. bits: in the low ones of a
    word. A factor of ue8m0 must be less than 2^(128 - exponent)."""
    if kind == "fp32":
        product = f"mul.rn.f32 f, f, 0f{127 + exponent << 23:08X};" if exponent else ""
        text = f"{{ .reg .f32 f; mov.b32 f, {{$r0}}; {product} cvt.rn.bf16x2.f32 {{$w0}}, f, f; }}"
        return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[bits])
    if kind == "ue8m0":
        return pair((bits + exponent) << 7)
    exact = multiply(pair((bits & 0x7F) << 4), EXACT["e4m3"])
    return multiply(exact, power_pair(exponent)) if exponent else exact
