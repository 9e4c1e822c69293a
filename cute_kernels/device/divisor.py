"""Division by a number that is known once a launch."""

from cutlass import Int32, Int64

SHIFT = 30


class Divisor:
    """`x // d`, `x % d` and `x * d` of d >= 1 as of an Int32, by a multiplication; for 0 <= x with x * d < 2^30."""

    def __init__(self, value: Int32):
        self.value = value
        self.magic = Int64(((1 << SHIFT) - 1 + value) // value)  # 2^30 / d, rounded up

    def __rfloordiv__(self, x):
        return Int32(Int64(x) * self.magic >> Int64(SHIFT))

    def __rmod__(self, x):
        return x - x // self * self.value

    def __rmul__(self, x):
        return x * self.value
