"""Codes of 8 and 4 bits become bf16, in registers.

Hopper converts e4m3 to fp16 alone, and from there to bf16 only through fp32, at a quarter of the rate. Here the bits of
a code are put into the fields of a bf16, which is then too small by a power of two that `EXACT` repairs, for
subnormal codes, too. The codes for NaN become plus and minus 480."""

import cutlass.cute as cute
from cutlass import Uint32

EXACT = {"e4m3": 0x7B807B80, "e2m1": 0x7E807E80}  # type -> the power of two, twice: 2^120 and 2^126


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


def multiply(word, factor):
    """Return the product of two words of two bf16 each."""
    text = "{ .reg .b32 f; mov.b32 f, {$r1}; mul.rn.bf16x2 {$w0}, {$r0}, f; }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[word, Uint32(factor)])


def pair(half):
    """Return a word with two copies of the low half of a word, of which the high half is 0."""
    return half * Uint32(0x10001)


def pair_of_fp32(word, exact=False):
    """Return an fp32, given by its bits, as a bf16, twice. exact: times `EXACT` of e4m3."""
    product = f"mul.rn.f32 f, f, 0f{EXACT['e4m3'] & 0xFFFF0000:08X};" if exact else ""
    text = f"{{ .reg .f32 f; mov.b32 f, {{$r0}}; {product} cvt.rn.bf16x2.f32 {{$w0}}, f, f; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[word])
