"""Radix sort of short rows, launched after the selection for `top_k(sorted=True)`: facts and limits, in plain
Python.

`supports` is the only statement of what the kernel can do. Nothing here imports the DSL, because a process that
runs a bundle has none."""

from ... import archs
from ..spec import BITS, SMEM_PER_CTA, SMEM_PER_SM, SortSpec

Spec = SortSpec
ARCHS = archs.NAMES
DIGIT = 8  # bits of a key per pass
DIGITS = 1 << DIGIT
THREADS = (256, 512, 1024)  # at least one per digit


def smem_bytes(spec: SortSpec) -> int:
    """Return the bytes of shared memory per CTA, or slightly more: pairs, counts of digits, scratch."""
    return spec.capacity * 8 + spec.threads // 32 * DIGITS * 4 + 1024


def ctas_per_sm(spec: SortSpec) -> int:
    """Return how many CTAs an SM holds at a time; the compiler is told this number."""
    return min(SMEM_PER_SM // (smem_bytes(spec) + 1024), 1536 // spec.threads)


def supports(spec: SortSpec) -> str | None:
    """Return None if the kernel runs `spec`, else the reason why not."""
    if spec.dtype not in BITS:
        return f"dtype {spec.dtype}: the kernel has {', '.join(BITS)}"
    if spec.threads not in THREADS:
        return f"threads {spec.threads}: the kernel has {THREADS}"
    if spec.items < 1:
        return f"items {spec.items}: must be at least 1"
    if smem_bytes(spec) > SMEM_PER_CTA:
        return f"items {spec.items}: needs {smem_bytes(spec)} bytes of shared memory, must be at most {SMEM_PER_CTA}"
    return None
