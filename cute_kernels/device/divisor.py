"""Division by a number that is known once a launch."""

import cutlass
from cutlass import Int32, Int64, Uint32, Uint64

SHIFT = 30


def magic_of(value):
    """2^30 / value, rounded up."""
    return ((1 << SHIFT) - 1 + value) // value


def divide(x, y):
    """x // y of x >= 0 and y > 0: half the instructions of a division that looks at signs."""
    if isinstance(x, int) and isinstance(y, int):
        return x // y
    return Int32(Uint32(x) // Uint32(y))


class Divisor:
    """`x // d`, `x % d` and `x * d` of d >= 1 as of an Int32, by a multiplication; for 0 <= x with x * d < 2^30.
    magic: `magic_of` d, where that is known."""

    def __init__(self, value: Int32, magic: Int32 | None = None):
        self.value = value
        self.magic = Int64(magic_of(value) if magic is None else magic)

    def __rfloordiv__(self, x):
        return Int32(Int64(x) * self.magic >> Int64(SHIFT))

    def __rmod__(self, x):
        return x - x // self * self.value

    def __rmul__(self, x):
        return x * self.value


class Quotient:
    """`x // d` and `x % d` of d >= 1, for 0 <= x < 2^31: a multiplication of 32 bits and a shift.

    Exact: with s = ceil(log2 d), the magic floor(2^(31 + s) / d) + 1 fits 32 bits, and times d it exceeds 2^(31 + s)
    by at most 2^s.
    """

    def __init__(self, value: Int32):
        self.value = value
        more = sum((cutlass.min(cutlass.max(value - (1 << k), 0), 1) for k in range(31)), Int32(0))  # s
        self.shift = Uint64(more + 31)
        self.magic = Uint32((Uint64(1) << self.shift) // Uint64(value) + Uint64(1))

    def __rfloordiv__(self, x):
        return Int32(Uint64(Uint32(x)) * Uint64(self.magic) >> self.shift)

    def __rmod__(self, x):
        return x - x // self * self.value
