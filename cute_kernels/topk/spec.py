"""Static facts of the top-k kernels: the compile key, the artifact's name and the test id.

Everything else is an argument of the launch (`args.TopKArgs`): the outputs (page-table entries, offsets, values),
k, windows and the choice between ties."""

from dataclasses import dataclass

from ..archs import TABLE

BITS = {"fp32": 32, "fp16": 16, "bf16": 16}  # per key
DTYPES = tuple(BITS)
BINS = 2048  # per histogram
SMEM_PER_CTA = max(arch.smem_per_cta for arch in TABLE)  # bytes that a CTA can have on some architecture
SMEM_PER_SM = max(arch.smem_per_sm for arch in TABLE)  # bytes for the CTAs of an SM
MAX_PULL_CLUSTER = 4  # largest cluster in which each thread sums the bins of all CTAs itself (topk/scope.py)


@dataclass(frozen=True)
class TopKSpec:
    """A selection kernel.

    cluster: CTAs per row. threads: per CTA. capacity: keys that a CTA keeps in shared memory. They are its whole
    slice of the row, or, if stream is set, candidates from a slice of any length."""

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
    """A kernel that sorts the selected elements, one CTA per row.

    threads: per CTA. items: pairs of a value and an index per thread."""

    dtype: str = "fp32"
    threads: int = 512
    items: int = 4

    @property
    def capacity(self) -> int:
        """The longest row, in pairs."""
        return self.threads * self.items

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        return f"{self.dtype}_t{self.threads}i{self.items}"
