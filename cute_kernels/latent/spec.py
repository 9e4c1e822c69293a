"""Static facts of the kernels of latent caches: the compile key, the artifact's name and the test id.

Everything else is an argument of the launch (`args.LatentArgs`, `args.ReadArgs`)."""

from dataclasses import dataclass

from ..records import BYTES, INDEX, RECORDS, LatentRecord


@dataclass(frozen=True)
class LatentSpec:
    """A kernel that writes rows of latent attention, and joins the parts of queries.

    dtype: of the rows, "bf16" or "fp16". record: a key of `records.RECORDS`. joined: the same launch writes the rows of
    an indexer."""

    dtype: str = "bf16"
    record: str = "rows"
    joined: bool = False

    @property
    def form(self) -> LatentRecord:
        """The record."""
        return RECORDS[self.record]

    @property
    def index(self) -> bool:
        """Whether the rows are those of an indexer alone."""
        return self.record == INDEX

    @property
    def indexer(self) -> "LatentSpec":
        """The kernel that writes the rows of an indexer alone."""
        return LatentSpec(self.dtype, INDEX)

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        return f"{self.dtype}_{self.record}{'_index' if self.joined else ''}"


@dataclass(frozen=True)
class ReadSpec:
    """A kernel that reads rows of latent attention.

    dtype: of the output, "bf16" or "fp16"; "uint8" if nothing is dequantised. record: a key of `records.RECORDS` but
    ROWS, or BYTES."""

    dtype: str = "bf16"
    record: str = "656"

    @property
    def form(self) -> LatentRecord:
        """The record; of BYTES, one without codes."""
        return LatentRecord(codes="e4m3", rotated_as="e4m3") if self.record == BYTES else RECORDS[self.record]

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        return f"read_{self.dtype}_{self.record}"
