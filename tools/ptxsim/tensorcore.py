"""Sums of products as Hopper's tensor cores form them, bit for bit.

Found by fitting: it reproduces all bits of the recorded H200 outputs. Of the products of one instruction along K and
the accumulator, the largest exponent is taken (of a product: the sum of its operands' exponents, not normalised). Every
addend is cut off, toward zero, at a number of bits below it; the sum is exact and is cut off to the significant bits.
"""

import numpy as np

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
    """Of float32 numbers; whatever it is of infinity and NaN."""
    biased = np.ascontiguousarray(values).view(np.int32) >> 23 & 255
    return np.where(values == 0, NOTHING, np.maximum(biased - 127, least))


def multiply(a: np.ndarray, b: np.ndarray, total: np.ndarray, kinds: tuple[str, str]) -> np.ndarray:
    """a (..., m, k) @ b (..., n, k) transposed + total (..., m, n); all float32, of one instruction."""
    below, significant = BITS[kinds[0]]
    left, right = exponents(a, LEAST[kinds[0]]), exponents(b, LEAST[kinds[1]])
    largest = (left[..., :, None, :] + right[..., None, :, :]).max(-1)
    largest = np.maximum(largest, exponents(total, -126))
    unit = np.ldexp(1.0, np.maximum(largest, -500) - below)
    products = a.astype(np.float64)[..., :, None, :] * b[..., None, :, :]
    whole = np.trunc(products / unit[..., None]).sum(-1) + np.trunc(total / unit)
    scale = np.ldexp(1.0, significant - np.frexp(whole)[1])
    exact = (np.trunc(whole * scale) / scale * unit).astype(np.float32)
    rough = a @ b.swapaxes(-1, -2) + total
    return np.where(np.isfinite(rough), exact, rough)
