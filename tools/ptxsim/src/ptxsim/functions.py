"""Functions of float32 numbers that give the same bits on every processor.

numpy computes exp2, log2, tanh, sin and cos with the vector code that it has for the processor, and the last bits
of the results differ. The functions here use only additions, multiplications, divisions and comparisons of
float64: IEEE 754 defines their results to the bit, and a separate numpy call for each leaves nothing to contract
into an FMA. The results are rounded to float32 once; before that their error is below 2**-36 (relative, but
absolute for sin and cos), so that about one in a million is not the nearest float32."""

from decimal import Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np

from .numbers import count_nonzero, rounded

F64 = np.float64
LN2 = float.fromhex("0x1.62e42fefa39efp-1")
HALF_PI = float.fromhex("0x1.921fb54442d18p+0")
STEPS = 4096  # entries of the table of powers: one per step of 2**(1/4096)
CENTRES = 512  # entries of the table of logarithms; its lower half is not used


@cache
def powers() -> np.ndarray:
    """Return the bits of 2 ** (i / STEPS), built from square roots of 2 alone."""
    table, root = np.ones(1), F64(2)
    while len(table) < STEPS:
        root = np.sqrt(root)
        table = np.stack([table, table * root], 1).ravel()
    return table.view(np.int64)


@cache
def logarithms() -> np.ndarray:
    """Return log2(i / CENTRES) for i up to CENTRES, rounded once; entry 0 is a placeholder."""
    with localcontext() as context:
        context.prec = 40
        ln2 = Decimal(2).ln()
        return np.array([0.0] + [float((Decimal(i) / CENTRES).ln() / ln2) for i in range(1, CENTRES + 1)])


def power_of_two(y: Any) -> Any:
    """Return 2 ** y of float64 numbers; y is clamped to +-1000."""
    rest = np.maximum(np.minimum(y, 1000.0), -1000.0)
    rest *= STEPS
    whole = np.rint(rest)
    rest -= whole
    index = whole.astype(np.int64)
    bits = powers()[index & (STEPS - 1)]
    index &= -STEPS
    index <<= 40
    bits += index
    near = bits.view(F64)  # 2 ** (index / STEPS)
    more = near * rest
    rest *= LN2 * LN2 / (2 * STEPS * STEPS)
    rest += LN2 / STEPS
    more *= rest
    more += near
    return more


def exp2(x: Any) -> Any:
    return power_of_two(np.asarray(x, F64)).astype(np.float32)


def exp2_with_denormals(x: Any) -> Any:
    """Return 2 ** x without .ftz.

    Below 2**-126 the result is the square of 2 ** (x / 2), as ptxas computes it; the root is rounded toward zero,
    which gives the bits of an H200 there."""
    result, low = exp2(x), x < np.float32(-126)
    if not count_nonzero(low):
        return result
    root = rounded(power_of_two(np.asarray(x, F64) * 0.5), "rz")
    return np.where(low, root * root, result)


def log2(x: Any) -> Any:
    x = np.asarray(x, F64)
    inside = (x > 0) & (x < np.inf)
    mantissa, exponent = np.frexp(np.where(inside, x, 1.0))
    near = np.rint(mantissa * CENTRES)
    centre = near / CENTRES
    u = (mantissa - centre) / centre
    series = u * (1.0 - u * (0.5 - u * (1 / 3 - u * 0.25))) / LN2
    found = exponent + logarithms()[near.astype(np.int64)] + series
    return np.where(inside, found, np.where(x == 0, -np.inf, np.where(x > 0, np.inf, np.nan))).astype(np.float32)


def tanh(x: Any) -> Any:
    x = np.asarray(x, F64)
    square = np.minimum(x * x, 1.0)
    small = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    power = power_of_two(np.abs(x) * (2 / LN2))
    return np.where(square < 2.0**-12, small, np.copysign(1.0 - 2.0 / (power + 1.0), x)).astype(np.float32)


def turned(x: Any, quarter: int) -> Any:
    """Return sin(x + quarter * pi / 2)."""
    quarters = np.asarray(x, F64) * (1 / HALF_PI)
    whole = np.rint(quarters)
    r = (quarters - whole) * HALF_PI
    square = r * r
    sine = r * series(square, (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800))
    cosine = series(square, (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600))
    which = (whole - 4.0 * np.floor(whole * 0.25)).astype(np.int64) + quarter
    found = np.where(which & 1, cosine, sine)
    return np.where(which & 2, -found, found).astype(np.float32)


def series(x: Any, terms: tuple[float, ...]) -> Any:
    """Return terms[0] + terms[1] * x + terms[2] * x**2 + ..."""
    total = terms[-1]
    for term in terms[-2::-1]:
        total = total * x + term
    return total


def sin(x: Any) -> Any:
    return np.where(np.asarray(x) == 0, x, turned(x, 0))  # keeps the sign of a zero


def cos(x: Any) -> Any:
    return turned(x, 1)
