"""Number formats as bits in numpy arrays, and PTX arithmetic that numpy lacks."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy._core.multiarray import count_nonzero  # np.count_nonzero without its wrapper, which takes longer

FLOATS: dict[str, Any] = {  # operand formats narrower than 32 bits
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e2m3": np.dtype(ml_dtypes.float6_e2m3fn),
    "e3m2": np.dtype(ml_dtypes.float6_e3m2fn),
    "e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
    "ue8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "e4m3": 448.0, "e5m2": 57344.0}
LARGEST |= {"e2m3": 7.5, "e3m2": 28.0, "e2m1": 6.0}
TINY = np.float32(2.0**-126)  # smallest normal


def decode(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return float32 values of bit patterns (uint16 or uint8, the format in the low bits)."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "tf32":  # the tensor core drops the low bits of a float32
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return _table(kind)[bits]


_TABLES: dict[str, np.ndarray] = {}


def _table(kind: str) -> np.ndarray:
    """Return the values of all bytes; formats below 8 bits ignore the high bits."""
    if kind not in _TABLES:
        bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(kind, 8)
        patterns = (np.arange(256) % (1 << bits)).astype(np.uint8)
        _TABLES[kind] = patterns.view(FLOATS[kind]).astype(np.float32)
    return _TABLES[kind]


def encode(values: np.ndarray, kind: str, saturate: bool = False) -> np.ndarray:
    """Convert float32 to bits, rounding to nearest even. saturate: to the largest finite value (.satfinite), NaN
    stays NaN."""
    values = np.asarray(values, np.float32)
    if saturate:
        values = np.clip(values, np.float32(-LARGEST[kind]), np.float32(LARGEST[kind]))
    if kind == "bf16":  # in a third of the time of ml_dtypes
        bits = values.view(np.uint32)
        bits = ((bits + (bits >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)
        nan = np.isnan(values)
        return np.where(nan, np.uint16(0x7FFF), bits) if count_nonzero(nan) else bits
    out = values.astype(FLOATS[kind])
    bits = out.view(f"u{out.dtype.itemsize}")
    if kind in ("f16", "e4m3", "e5m2"):
        nan = {"f16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F}[kind]
        return np.where(np.isnan(values), bits.dtype.type(nan), bits)
    return bits


def truncate(values: np.ndarray, kind: str) -> np.ndarray:
    """Convert float32 to bits of "bf16" or "f16", rounding toward zero."""
    values = np.asarray(values, np.float32)
    if kind == "bf16":
        bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FFF), bits)
    near = values.astype(np.float16)
    past = np.abs(near.astype(np.float32)) > np.abs(values)
    near = np.where(past, np.nextafter(near, np.float16(0)), near)
    return np.where(np.isnan(values), np.uint16(0x7FFF), near.view(np.uint16))


NANS = {  # the NaN that arithmetic returns for any NaN operand
    np.dtype(np.float16): np.uint16(0x7FFF).view(np.float16),
    np.dtype(np.float32): np.uint32(0x7FFFFFFF).view(np.float32),
}


def one_nan(values: Any, operands: tuple[Any, ...] = ()) -> Any:
    """Return `values` with every NaN replaced by the device's NaN. In float64, where payloads survive, it is the
    first NaN of the operands: numpy's own choice depends on the processor's vector code."""
    flat = values if values.ndim < 2 else values.reshape(-1)
    squares = np.dot(flat, flat)  # NaN if any value is; this takes half the time of np.isnan and any
    if squares == squares:
        return values
    nan = np.isnan(values)
    for operand in reversed(operands if values.dtype == np.float64 else ()):
        values = np.where(nan & np.isnan(operand), operand, values)
    return values if values.dtype == np.float64 else np.where(nan, NANS[values.dtype], values)


def flush(values: np.ndarray) -> np.ndarray:
    """Flush denormals to zero of their sign (.ftz)."""
    return np.where(np.abs(values) < TINY, np.copysign(np.float32(0), values), values)


def to_odd(near: Any, error: Any) -> Any:
    """Round to odd: a result inexact by `error` gets an odd last bit, which makes a second rounding harmless."""
    signed = np.dtype(f"i{near.dtype.itemsize}")
    bits = np.atleast_1d(near).view(signed).reshape(np.shape(near))
    even = (error != 0) & np.isfinite(near) & (bits & 1 == 0)
    toward = np.where(error > 0, near.dtype.type(np.inf), near.dtype.type(-np.inf))
    return np.where(even, np.nextafter(near, toward), near)


def sum_to_odd(a: Any, b: Any) -> Any:
    """Return float64 a + b, rounded to odd."""
    total = np.asarray(a + b)
    back = total - a
    return to_odd(total, (a - (total - back)) + (b - back))


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32 with one rounding."""
    product = np.asarray(a, np.float64) * b  # exact
    total = product + np.asarray(c, np.float64)
    bits = total.view(np.uint64)
    # The second rounding is harmless unless `total` lies in the middle between two float32, or is denormal as one.
    middle = bits & np.uint64(0x1FFFFFFF) == np.uint64(0x10000000)
    denormal = (bits << np.uint64(1)) - np.uint64(1) < np.uint64(897 << 53)
    if count_nonzero(middle | denormal):
        total = sum_to_odd(product, np.asarray(c, np.float64))
    return total.astype(np.float32)


def fma_to_odd(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c as float32 rounded to odd, for a second rounding to a 16-bit format."""
    total = sum_to_odd(np.asarray(a, np.float64) * b, np.asarray(c, np.float64))
    near = total.astype(np.float32)
    return to_odd(near, total - near)


def rounded(exact: np.ndarray, mode: str) -> np.ndarray:
    """Round float64 to float32 in a PTX rounding mode: rn, rz, rm (down), rp (up)."""
    near = exact.astype(np.float32)
    if mode == "rn":
        return near
    wide = near.astype(np.float64)
    above, below = wide > exact, wide < exact
    if mode == "rz":
        above, below = (wide > exact) & (exact > 0), (wide < exact) & (exact < 0)
    elif mode == "rm":
        below = np.zeros_like(above)
    else:
        above = np.zeros_like(below)
    out = np.where(above, np.nextafter(near, np.float32(-np.inf)), near)
    return np.where(below, np.nextafter(near, np.float32(np.inf)), out)


def pair(bits: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 values of the low and the high half of 32-bit registers that hold two 16-bit floats."""
    bits = np.asarray(bits, np.uint32)
    low, high = (bits & np.uint32(0xFFFF)).astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)
    return decode(low, kind), decode(high, kind)


def unpair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Pack two 16-bit patterns into one register."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
