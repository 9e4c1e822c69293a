"""Sums of products as Hopper's tensor cores form them, bit for bit.

The rule was found by fitting: it reproduces all bits of the recorded H200 outputs. The largest exponent is taken
over the accumulator and the products of one instruction along K (a product counts with the sum of its operands'
exponents, not normalised). Every addend is truncated toward zero at a number of bits below it; the sum is exact
and is truncated to the significant bits."""

import numpy as np

from .numbers import NANS

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
    left, right = exponents(a, LEAST[kinds[0]]), exponents(b, LEAST[kinds[1]])
    largest = (left[..., :, None, :] + right[..., None, :, :]).max(-1)
    largest = np.maximum(largest, exponents(total, -126))
    unit = np.ldexp(1.0, np.maximum(largest, -500) - below)
    products = a.astype(np.float64)[..., :, None, :] * b[..., None, :, :]
    whole = np.trunc(products / unit[..., None]).sum(-1) + np.trunc(total / unit)
    scale = np.ldexp(1.0, significant - np.frexp(whole)[1])
    exact = (np.trunc(whole * scale) / scale * unit).astype(np.float32)
    return with_specials(exact, a, b, total)


def with_specials(sums: np.ndarray, a: np.ndarray, b: np.ndarray, total: np.ndarray | None = None) -> np.ndarray:
    """Return `sums` with infinity, or the one NaN of tensor cores, wherever a row of a, a row of b, or total is not
    finite."""
    if all(np.isfinite(operand).all() for operand in (a, b, 0 if total is None else total)):
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
    left, right = (slices(np.where(np.isfinite(operand), operand, 0), bits) for operand in (a, b))
    sums = left[0] @ right[0].T
    for x, y in [(x, y) for x in left for y in right][1:]:
        sums += x @ y.T
    return with_specials(sums, a, b)


def slices(operand: np.ndarray, bits: int) -> list[np.ndarray]:
    """Split `operand` into float64 matrices that add up to it, largest first; each holds multiples of a unit below 2
    ** bits."""
    rest = operand.astype(np.float64)
    found = []
    while True:
        largest = max(rest.max(initial=0), -rest.min(initial=0))
        unit = 2.0 ** (np.frexp(largest)[1] - bits)
        whole = np.trunc(rest / unit) * unit
        found.append(whole)
        rest = rest - whole
        if not rest.any():
            return found
