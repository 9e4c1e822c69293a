"""Static facts of the kernels of an indexer: the compile key, the artifact's name and the test id.

Everything else is an argument of the launch (`args.IndexerArgs`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexerSpec:
    """A kernel that computes logits.

    heads: of a query token, those with which it is padded included. dim: of a head and of a key. rows: query
    tokens of a tile, which read a key together. out: type of the logits, "fp32" or "bf16". keys: of queries and keys,
    "e4m3" or "bf16"."""

    heads: int = 64
    dim: int = 128
    rows: int = 1
    out: str = "fp32"
    keys: str = "e4m3"

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        return f"{self.keys}_h{self.heads}_d{self.dim}_r{self.rows}_{self.out}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, without its scale."""
        return self.dim * (1 if self.keys == "e4m3" else 2)
