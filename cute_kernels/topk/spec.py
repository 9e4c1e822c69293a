"""Static facts of a top-k kernel: the compile key, the artifact's name and the test id.

What a call returns (page-table entries, offsets, values), k, windows and ties are arguments; see `args.TopKArgs`.
"""

from dataclasses import dataclass

BITS = {"fp32": 32, "fp16": 16, "bf16": 16}  # of a key
DTYPES = tuple(BITS)


@dataclass(frozen=True)
class TopKSpec:
    """cluster: CTAs that share a row. threads: of a CTA. capacity: keys of its slice of the row that a CTA keeps in
    shared memory; 0, it keeps none and reads the row once a pass."""

    dtype: str = "fp32"
    cluster: int = 1
    threads: int = 512
    capacity: int = 8192

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        held = f"n{self.capacity}" if self.capacity else "stream"
        return f"{self.dtype}_c{self.cluster}t{self.threads}_{held}"
