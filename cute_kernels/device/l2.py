"""Prefetches into the L2 cache."""

import cutlass.cute as cute


def prefetch(address, size):
    """Start a prefetch of `size` bytes of global memory into L2 (PTX `cp.async.bulk.prefetch.L2`).

    address, size: multiples of 16. One thread calls it."""
    text = "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};"
    cute.arch.inline_ptx(text, write_only_types=[], read_only_args=[address, size])
