"""Division by a number that is constant during a launch."""

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64

SHIFT = 30


def magic_of(value):
    """Return ceil(2^SHIFT / value), the multiplier of `Divisor`."""
    return ((1 << SHIFT) - 1 + value) // value


def divide(x, y):
    """Return x // y for x >= 0 and y > 0.

    An unsigned division takes half the instructions of a signed one."""
    if isinstance(x, int) and isinstance(y, int):
        return x // y
    return Int32(Uint32(x) // Uint32(y))


class Divisor:
    """A divisor d >= 1: `x // d`, `x % d` and `x * d`, by a 64-bit multiplication instead of a division.

    Exact for 0 <= x with x * d < 2^SHIFT. magic: `magic_of(d)`, if the host has computed it."""

    def __init__(self, value: Int32, magic: Int32 | None = None):
        self.value = value
        self.magic = Int64(magic_of(value) if magic is None else magic)

    def __rfloordiv__(self, x):
        return Int32(Int64(x) * self.magic >> Int64(SHIFT))

    def __rmod__(self, x):
        return x - x // self * self.value

    def __rmul__(self, x):
        return x * self.value


def quotient_params(value):
    """Return the multiplier and the shift of `Quotient`."""
    more = sum((cutlass.min(cutlass.max(value - (1 << k), 0), 1) for k in range(31)), Int32(0))  # s
    shift = Int32(more + 31)
    return Uint32((Uint64(1) << Uint64(shift)) // Uint64(value) + Uint64(1)), shift


class Quotient:
    """A divisor d >= 1: `x // d` and `x % d` for 0 <= x < 2^31, by a 32-bit multiplication and a shift.

    Exact: with s = ceil(log2 d), the multiplier floor(2^(31 + s) / d) + 1 fits 32 bits, and d times it exceeds
    2^(31 + s) by at most 2^s. magic, shift: of `quotient_params(d)`, if the host has computed them."""

    def __init__(self, value: Int32, magic: Uint32 | None = None, shift: Int32 | None = None):
        self.value = value
        if magic is None or shift is None:
            magic, shift = quotient_params(value)
        self.magic, self.shift = magic, shift

    def __rfloordiv__(self, x):
        return Int32(Uint64(Uint32(x)) * Uint64(self.magic) >> Uint64(self.shift))

    def __rmod__(self, x):
        return x - x // self * self.value
