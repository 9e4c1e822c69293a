"""Radix selection. This file is plain Python: what the kernel can do.

`supports` is the only statement of what the kernel can do; it imports no DSL, because a process that runs a bundle has
none.
"""

from ..spec import BINS, BITS, MAX_PULL_CLUSTER, SMEM_PER_CTA, SMEM_PER_SM, TopKSpec

Spec = TopKSpec
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
CLUSTERS = (1, 2, 3, 4, 8, 16)
THREADS = (128, 256, 512, 1024)
GROUP = 256  # places of shared memory that are held or not together
LIST = 256  # keys at the boundary that are listed one by one
CHUNK = 512  # keys that a warp looks at, at once, of a slice that is streamed


def places(spec: TopKSpec) -> int:
    """Of keys in shared memory: those held, and groups that begin before and end behind them."""
    return spec.capacity + 2 * GROUP


def smem_bytes(spec: TopKSpec) -> int:
    """Bytes of shared memory of a CTA, or slightly more."""
    marks, bins = places(spec) // 4, 4 * BINS
    histograms = max(marks, bins) if spec.cluster == 1 else marks + bins
    if spec.cluster > MAX_PULL_CLUSTER:
        histograms += bins // spec.cluster
    lists = LIST * 8 * (1 + (spec.cluster > 1))
    return places(spec) * (BITS[spec.dtype] // 8 + 4 * spec.stream) + histograms + lists + 512


def ctas_per_sm(spec: TopKSpec) -> int:
    """CTAs that an SM holds at a time; the compiler is told so. With more threads, registers would spill."""
    threads = 1536 if spec.cluster == 1 and BITS[spec.dtype] == 32 else 1024
    return min(SMEM_PER_SM // (smem_bytes(spec) + 1024), threads // spec.threads)


def max_k(spec: TopKSpec) -> int:
    """The largest k of a slice that is streamed: the candidates of a warp fit beside it."""
    return spec.capacity - CHUNK


def supports(spec: TopKSpec) -> str | None:
    """None where the kernel runs `spec`, else the reason why not."""
    if spec.dtype not in BITS:
        return f"dtype {spec.dtype}: the kernel has {', '.join(BITS)}"
    if spec.cluster not in CLUSTERS:
        return f"cluster {spec.cluster}: the kernel has {CLUSTERS}"
    if spec.threads not in THREADS:
        return f"threads {spec.threads}: the kernel has {THREADS}"
    if spec.capacity < 1024 or spec.capacity % 1024:
        return f"capacity {spec.capacity}: a multiple of 1024 keys"
    if smem_bytes(spec) > SMEM_PER_CTA:
        return f"capacity {spec.capacity}: {smem_bytes(spec)} bytes of shared memory, a CTA can have {SMEM_PER_CTA}"
    if spec.stream and max_k(spec) < 1:
        return f"capacity {spec.capacity}: no room for candidates"
    return None
