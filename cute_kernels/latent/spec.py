"""Static facts of the kernels of latent caches: the compile key, the artifact's name and the test id.

Everything else is an argument of the launch (`args.LatentArgs`)."""

from dataclasses import dataclass

from .records import INDEX, RECORDS, LatentRecord


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
