"""exp2 without the special function unit, which Blackwell's MMAs outrun: on pairs, whose arithmetic is packed there."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from . import warp

# 2^f on [0, 1) to 7.5e-5 of its value, which rounding to 16 bits hides: coefficients of 1, f, f^2, f^3.
CUBIC = 0.9999251961708069, 0.6958335638046265, 0.22606715559959412, 0.07802452147006989
LEAST = -125.0  # so that the exponent of the result is none of a denormal
HUGE = 2.0**100  # more than any sum of exponentials of numbers
WHOLE = 1.5 * 2.0**23  # a number of at least -2^22 and less than 2^22, plus this, is rounded to a whole one


def max_nan(x, y):
    """The larger one; NaN where x is."""
    text = "max.NaN.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x, Float32(y)])


def pair(logs):
    """2^x of two values that are not -inf: f, what is left of x beyond the next lower whole number n, goes into the
    cubic, whose exponent n is added to. Of NaN it is the largest fp32 value: more than HUGE, infinite in 16 bits."""
    both = lambda x: (Float32(x), Float32(x))  # noqa: E731
    logs = tuple(max_nan(x, LEAST) for x in logs)
    whole = cute.arch.add_packed_f32x2(logs, both(WHOLE), rnd="rm")
    floor = cute.arch.add_packed_f32x2(whole, both(-WHOLE))
    f = cute.arch.add_packed_f32x2(logs, (-floor[0], -floor[1]))
    value = both(CUBIC[3])
    for c in (2, 1, 0):
        value = cute.arch.fma_packed_f32x2(value, f, both(CUBIC[c]))
    return tuple(warp.from_bits(warp.bits(v) + (warp.bits(w) << Int32(23))) for v, w in zip(value, whole))
