"""Radix selection: the facts and limits of the kernel, in plain Python.

`supports` is the only statement of what the kernel can do. Nothing here imports the DSL, because a process that
runs a bundle has none."""

from ... import archs
from ..spec import BINS, BITS, MAX_PULL_CLUSTER, SMEM_PER_CTA, SMEM_PER_SM, TopKSpec

Spec = TopKSpec
ARCHS = archs.NAMES
CLUSTERS = (1, 2, 3, 4, 8, 16)
THREADS = (128, 256, 512, 1024)
GROUP = 256  # positions of shared memory that a warp marks in one step; slices are padded to whole groups
TIE_LIST = 256  # up to this many keys at the boundary are listed and ranked one by one
CHUNK = 512  # keys of a streamed slice that a warp examines in one step


def num_positions(spec: TopKSpec) -> int:
    """Return the positions of shared memory for keys: `capacity`, and a GROUP on either side for the ends of a slice
    that is not aligned."""
    return spec.capacity + 2 * GROUP


def smem_bytes(spec: TopKSpec) -> int:
    """Return the bytes of shared memory per CTA, or slightly more."""
    marks, bins = num_positions(spec) // 4, 4 * BINS
    histograms = max(marks, bins) if spec.cluster == 1 else marks + bins
    if spec.cluster > MAX_PULL_CLUSTER:
        histograms += bins // spec.cluster
    lists = TIE_LIST * 8 * (1 + (spec.cluster > 1))
    return num_positions(spec) * (BITS[spec.dtype] // 8 + 4 * spec.stream) + histograms + lists + 512


def ctas_per_sm(spec: TopKSpec, smem_per_sm: int = SMEM_PER_SM) -> int:
    """Return how many CTAs an SM holds at a time; the compiler is told the number of an SM with SMEM_PER_SM bytes.
    With more threads per SM, registers would spill."""
    threads = 1536 if spec.cluster == 1 and BITS[spec.dtype] == 32 else 1024
    return min(smem_per_sm // (smem_bytes(spec) + 1024), threads // spec.threads)


def max_k(spec: TopKSpec) -> int:
    """Return the largest k of a streamed slice: k candidates and the new ones of one warp must fit shared memory."""
    return spec.capacity - CHUNK


def supports(spec: TopKSpec) -> str | None:
    """Return None if the kernel runs `spec`, else the reason why not."""
    if spec.dtype not in BITS:
        return f"dtype {spec.dtype}: the kernel has {', '.join(BITS)}"
    if spec.cluster not in CLUSTERS:
        return f"cluster {spec.cluster}: the kernel has {CLUSTERS}"
    if spec.threads not in THREADS:
        return f"threads {spec.threads}: the kernel has {THREADS}"
    if spec.capacity < 1024 or spec.capacity % 1024:
        return f"capacity {spec.capacity}: must be a multiple of 1024 keys"
    if smem_bytes(spec) > SMEM_PER_CTA:
        return (
            f"capacity {spec.capacity}: needs {smem_bytes(spec)} bytes of shared memory, must be at most {SMEM_PER_CTA}"
        )
    if spec.stream and max_k(spec) < 1:
        return f"capacity {spec.capacity}: must be above {CHUNK} keys to stream"
    return None
