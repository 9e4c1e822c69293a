"""Arithmetic on Python ints or traced values."""

import cutlass


def clamp(x, low, high):
    return cutlass.min(cutlass.max(x, low), high)
