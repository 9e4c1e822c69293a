"""Fetches into the L2 cache."""

import cutlass.cute as cute


def prefetch(address, size):
    """Begin to fetch `size` bytes of global memory; both are multiples of 16. One thread calls it."""
    text = "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};"
    cute.arch.inline_ptx(text, write_only_types=[], read_only_args=[address, size])
