"""Inputs of the cases: values at which an instruction can go wrong, and random ones."""

import numpy as np

from .case import random

KEYS32 = (  # as bits
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F800001),
    *(0x40400000, 0xC0200000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFF812345),
)
KEYS16 = {
    "f16": (
        *(0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x3C01),
        *(0x4200, 0xC100, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFD01),
    ),
    "bf16": (
        *(0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x3F80, 0xBF80, 0x3F81),
        *(0x4040, 0xC020, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFF81),
    ),
}
KEYS_INT = (0, 1, 2, 3, 7, 31, 32, 33, 0x7F, 0x80, 0xFFFF, 0x12345678, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF9, 0xFFFFFFFF)
TIES = (  # values on and beside the limits and midpoints of narrower formats
    *(1.00390625, 1.01171875, 1.0039063692, 0.99804688, 65504.0, 65519.996, 65520.0, 448.0, 464.0, 464.00003, 480.0),
    *(57344.0, 61440.0, 61439.996, 0.0009765625, 0.00146484375, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-16, 2.0**-17),
    *(2.0**-24, 2.0**-25, 3 * 2.0**-25, 5.96e-8, 1.0625, 1.1875, 17.0, 19.0, 0.5, 1.5, 2.5, 3.5),
    *(-0.5, -1.5, 0.49999997),
    *(126.5, 127.5, 128.0, -128.5, 255.5, 32767.5, 65535.5, 2147483520.0, 2147483648.0, 4294967040.0, 4294967296.0),
    *(9.223372e18, 1.8446744e19, 3.4e38, 3.39e38, 3.3961775e38, 1e-40, 1.1754942e-38, 9.2e-41, 1.00048828125, 1.000488),
)


def pairs(keys: tuple[int, ...], dtype: type, name: str, extra: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return every pair of `keys`, then `extra` random ones, as bits of `dtype`."""
    grid = np.array(keys, np.uint64)
    a, b = np.repeat(grid, len(keys)), np.tile(grid, len(keys))
    high = np.iinfo(dtype).max
    rest = random(name).randint(0, high, (2, extra), dtype=dtype)
    return np.concatenate([a.astype(dtype), rest[0]]), np.concatenate([b.astype(dtype), rest[1]])


def pairs32(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return f32 bits: all pairs of special values, and random numbers near one."""
    a, b = pairs(KEYS32, np.uint32, name)
    near = bell(random(name + "near"), 2, 64).astype(np.float32).view(np.uint32)
    a[-64:], b[-64:] = near[0], near[1]
    return a, b


def pairs16(kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return two packed values of "f16" or "bf16" per 32-bit word; a pair in each half, the upper in another order."""
    a, b = pairs(KEYS16[kind], np.uint16, name)
    order = random(name + "order").permutation(len(a))
    return a | a[order].astype(np.uint32) << 16, b | b[order].astype(np.uint32) << 16


def triples(pair: tuple[np.ndarray, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a pair with a third operand: values of the pair in random order."""
    return (*pair, pair[0][random(name + "third").permutation(len(pair[0]))])


def single32(name: str) -> np.ndarray:
    """Return 192 f32 bit patterns: special values, ties, and random ones of all magnitudes."""
    ties = np.array([t for value in TIES for t in (value, -value)], np.float32).view(np.uint32)
    keys = np.array(KEYS32, np.uint32)
    rest = random(name).randint(0, 0xFFFFFFFF, 192 - len(ties) - len(keys), dtype=np.uint32)
    return np.concatenate([keys, ties, rest])


def single16(name: str) -> np.ndarray:
    """Return 16-bit patterns: special ones of both formats and random ones."""
    keys = np.array(KEYS16["f16"] + KEYS16["bf16"], np.uint16)
    return np.concatenate([keys, random(name).randint(0, 0xFFFF, 160, dtype=np.uint16)])


def double16(name: str) -> np.ndarray:
    """Return words of two 16-bit patterns."""
    low = single16(name)
    return low | low[random(name + "order").permutation(len(low))].astype(np.uint32) << 16


def narrow(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the bits of `values` in a 16-bit format; exact if the value is representable."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bell(generator: np.random.RandomState, *shape: int) -> np.ndarray:
    """Return f64 numbers around zero with variance 1: sums of exact steps, so that the bits are the same on every
    machine, unlike randn's."""
    u = generator.rand(4, *shape)
    return ((u[0] + u[1]) + (u[2] + u[3]) - 2.0) * 1.75


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return the f64 values of bits of "f32", "f16" or "bf16". Words of two 16-bit numbers become two numbers."""
    if kind == "f32":
        with np.errstate(invalid="ignore"):
            return np.ascontiguousarray(bits).view(np.float32).astype(np.float64)
    halves = np.ascontiguousarray(bits).view(np.uint16)
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def small(name: str, count: int, kind: str, limit: int = 1) -> np.ndarray:
    """Return `count` random integers from -limit to limit as bytes of a matrix operand's format."""
    values = random(name).randint(-limit, limit + 1, count)
    if kind in ("f16", "bf16"):
        return narrow(values.astype(np.float32), kind).view(np.uint8)
    if kind in ("s8", "u8"):
        return (np.abs(values) if kind == "u8" else values).astype(np.int8).view(np.uint8)
    if kind == "tf32":
        return values.astype(np.float32).view(np.uint8)
    codes = {"e4m3": (0, 0x38, 0x40), "e5m2": (0, 0x3C, 0x40)}[kind]  # 0, 1, 2
    return (np.array(codes, np.uint8)[np.abs(values)] | np.where(values < 0, 0x80, 0)).astype(np.uint8)
