"""Radix selection. This file is plain Python: what the kernel can do.

`supports` is the only statement of what the kernel can do; it imports no DSL, because a process that runs a bundle has
none.
"""

from ..spec import BITS, TopKSpec

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
SHARED = 226 * 1024  # bytes a CTA can have
FIXED = 45 * 1024  # bytes of all but keys
CLUSTERS = (1, 2, 4, 8, 16)


def supports(spec: TopKSpec) -> str | None:
    """None where the kernel runs `spec`, else the reason why not."""
    if spec.dtype not in BITS:
        return f"dtype {spec.dtype}: the kernel has {', '.join(BITS)}"
    if spec.cluster not in CLUSTERS:
        return f"cluster {spec.cluster}: the kernel has {CLUSTERS}"
    if spec.threads % 128 or not 128 <= spec.threads <= 1024:
        return f"threads {spec.threads}: a multiple of 128 up to 1024"
    if spec.capacity % 1024 or spec.capacity * BITS[spec.dtype] // 8 + FIXED > SHARED:
        return f"capacity {spec.capacity}: a multiple of 1024 keys that fit {SHARED - FIXED} bytes"
    return None
