"""exp2 as a polynomial on the FMA pipe, for pairs of values with packed fp32 arithmetic (`fma.rn.f32x2`).

Blackwell's MMAs outrun the special function unit (MUFU), so its softmax computes a share of the exponentials
here."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from . import warp

# Coefficients of 1, f, f^2, f^3: 2^f on [0, 1) with a relative error of 7.5e-5, which rounding to 16 bits hides.
CUBIC = 0.9999251961708069, 0.6958335638046265, 0.22606715559959412, 0.07802452147006989
MIN_LOG2 = -125.0  # keeps the results normal numbers
HUGE = 2.0**100  # above any sum of exponentials of numbers
ROUND_TO_INT = 1.5 * 2.0**23  # x + this, with -2^22 <= x < 2^22, is rounded to an integer


def max_nan(x, y):
    """Return max(x, y), or NaN if x or y is NaN."""
    text = "max.NaN.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x, Float32(y)])


def pair(logs):
    """Return 2^x for two values that are not -inf.

    x is split into n = floor(x) and f in [0, 1): the cubic gives 2^f, and n is added to its exponent. NaN gives
    the largest finite fp32 value: it is above HUGE, and infinite in 16 bits."""
    both = lambda x: (Float32(x), Float32(x))  # noqa: E731
    # n = floor(x), f = x - n
    logs = tuple(max_nan(x, MIN_LOG2) for x in logs)
    whole = cute.arch.add_packed_f32x2(logs, both(ROUND_TO_INT), rnd="rm")
    floor = cute.arch.add_packed_f32x2(whole, both(-ROUND_TO_INT))
    f = cute.arch.add_packed_f32x2(logs, (-floor[0], -floor[1]))
    # 2^f, by Horner's rule
    value = both(CUBIC[3])
    for c in (2, 1, 0):
        value = cute.arch.fma_packed_f32x2(value, f, both(CUBIC[c]))
    # add n, the low bits of `whole`, to the exponent
    return tuple(warp.from_bits(warp.bits(v) + (warp.bits(w) << Int32(23))) for v, w in zip(value, whole))
