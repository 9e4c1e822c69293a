"""Sums of products as Hopper's tensor cores form them, bit for bit.

The rule was found by fitting: it reproduces all bits of the recorded H200 outputs. The largest exponent is taken
over the accumulator and the products of one instruction along K (a product counts with the sum of its operands'
exponents, not normalised). Every addend is truncated toward zero at a number of bits below it; the sum is exact
and is truncated to the significant bits."""

import math

import numpy as np

from .numbers import NANS, count_nonzero

BITS = {  # format -> (bits kept below the largest exponent, significant bits of the sum)
    "f16": (25, 24),
    "bf16": (25, 24),
    "tf32": (25, 24),
    "e4m3": (13, 14),
    "e5m2": (13, 14),
}
LEAST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}  # exponent of denormals
NOTHING = -10_000  # exponent of a zero


def exponents(values: np.ndarray, least: int) -> np.ndarray:
    """Return the exponents of float32 numbers; those of infinity and NaN are arbitrary."""
    biased = np.ascontiguousarray(values).view(np.int32) >> 23 & 255
    return np.where(values == 0, NOTHING, np.maximum(biased - 127, least))


def multiply(a: np.ndarray, b: np.ndarray, total: np.ndarray, kinds: tuple[str, str]) -> np.ndarray:
    """Return a (..., m, k) @ b (..., n, k) transposed + total (..., m, n); all float32, of one instruction."""
    below, significant = BITS[kinds[0]]
    exact_in = np.float32 if below < 24 else np.float64  # numbers that hold the products and their sums
    columns, rows = along(a)[..., None], along(b)[..., None, :]
    left, right = exponents(columns, LEAST[kinds[0]]), exponents(rows, LEAST[kinds[1]])
    step = max(1, 16384 // max(1, total.size))  # along K, so that temporary arrays stay in the cache
    parts = [slice(i, i + step) for i in range(0, len(left), step)]
    largest = exponents(total, -126)
    for part in parts:
        largest = np.maximum(largest, (left[part] + right[part]).max(0))
    unit = power(np.maximum(largest, -500) - below)
    whole = np.trunc(total / unit)
    per_unit = (1 / np.maximum(unit, 2.0**-100) if exact_in == np.float32 else 1 / unit).astype(exact_in)
    left, right = columns.astype(exact_in), rows.astype(exact_in)
    for part in parts:
        products = left[part] * right[part]
        products *= per_unit
        whole += np.trunc(products, out=products).sum(0)
    scale = power(significant - np.maximum((whole.view(np.int64) >> 52 & 2047) - 1022, 0))
    exact = (np.trunc(whole * scale) / scale * unit).astype(np.float32)
    return with_specials(exact, a, b, total)


def along(operand: np.ndarray) -> np.ndarray:
    """Return an operand with K first."""
    return np.ascontiguousarray(operand.transpose(operand.ndim - 1, *range(operand.ndim - 1)))


def power(exponent: np.ndarray) -> np.ndarray:
    """Return 2 ** exponent, from -1022 to 1023."""
    return (exponent.astype(np.int64) + 1023 << 52).view(np.float64)


def with_specials(sums: np.ndarray, a: np.ndarray, b: np.ndarray, total: np.ndarray | None = None) -> np.ndarray:
    """Return `sums` with infinity, or the one NaN of tensor cores, wherever a row of a, a row of b, or total is not
    finite."""
    if all(map(finite, (a, b) if total is None else (a, b, total))):
        return sums
    with np.errstate(invalid="ignore"):
        rough = a.astype(np.float64) @ b.swapaxes(-1, -2) + (0 if total is None else total)
    special = np.where(np.isnan(rough), NANS[np.dtype(np.float32)], rough.astype(sums.dtype))
    return np.where(np.isfinite(rough), sums, special)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return float64 a (m, k) @ b (n, k) transposed, with the same bits for every order in which BLAS adds.

    Each float32 operand is cut into slices of so few bits that every sum of k products of two slices is exact in
    float64; in most cases one slice suffices."""
    bits = (53 - (a.shape[1] - 1).bit_length()) // 2
    plain = [finite(operand) for operand in (a, b)]
    left, right = (slices(x if good else np.where(np.isfinite(x), x, 0), bits) for x, good in zip((a, b), plain))
    sums = left[0] @ right[0].T
    for x, y in [(x, y) for x in left for y in right][1:]:
        sums += x @ y.T
    return sums if all(plain) else with_specials(sums, a, b)


def finite(values: np.ndarray) -> bool:
    return count_nonzero(np.isfinite(values)) == values.size


def slices(operand: np.ndarray, bits: int) -> list[np.ndarray]:
    """Split `operand` into float64 matrices that add up to it, largest first; each holds multiples of a unit below 2
    ** bits."""
    rest = operand.astype(np.float64)
    found = []
    while True:
        unit = 2.0 ** (math.frexp(np.abs(rest).max(initial=0))[1] - bits)
        whole = np.trunc(rest * (1 / unit))
        whole *= unit
        found.append(whole)
        rest = rest - whole
        if not count_nonzero(rest):
            return found
