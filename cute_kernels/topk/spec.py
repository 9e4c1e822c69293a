"""Static facts of a top-k kernel: the compile key, the artifact's name and the test id.

What a call returns (page-table entries, offsets, values), k, windows and ties are arguments; see `args.TopKArgs`.
"""

from dataclasses import dataclass

BITS = {"fp32": 32, "fp16": 16, "bf16": 16}  # of a key
DTYPES = tuple(BITS)
BINS = 2048  # of a histogram
PULLED = 4  # CTAs of the largest cluster whose threads add up what they need of all histograms themselves


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
