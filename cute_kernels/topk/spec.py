"""Static facts of the top-k kernels: the compile key, the artifact's name and the test id.

What a call returns (page-table entries, offsets, values), k, windows and ties are arguments; see `args.TopKArgs`.
"""

from dataclasses import dataclass

BITS = {"fp32": 32, "fp16": 16, "bf16": 16}  # of a key
DTYPES = tuple(BITS)
BINS = 2048  # of a histogram
SMEM_PER_CTA = 227 * 1024  # bytes a CTA can have
SMEM_PER_SM = 228 * 1024  # bytes an SM has for its CTAs, of which each takes 1024 more than it asks for
MAX_PULL_CLUSTER = 4  # CTAs of the largest cluster whose threads add up what they need of all histograms themselves


@dataclass(frozen=True)
class TopKSpec:
    """cluster: CTAs that share a row. threads: of a CTA. capacity: keys that a CTA keeps in shared memory: all of its
    slice of the row, or, where it streams the slice, candidates."""

    dtype: str = "fp32"
    cluster: int = 1
    threads: int = 512
    capacity: int = 8192
    stream: bool = False

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        return f"{self.dtype}_c{self.cluster}t{self.threads}_{'s' if self.stream else 'n'}{self.capacity}"


@dataclass(frozen=True)
class SortSpec:
    """Of the kernel that sorts what was selected. threads: of a CTA, which sorts a row. items: pairs of a value and an
    index that a thread holds."""

    dtype: str = "fp32"
    threads: int = 512
    items: int = 4

    @property
    def capacity(self) -> int:
        """Pairs of a row at most."""
        return self.threads * self.items

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        return f"{self.dtype}_t{self.threads}i{self.items}"
