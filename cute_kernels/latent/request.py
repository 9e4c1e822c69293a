"""The part of a call that decides which kernel serves it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentRequest:
    """A request for a kernel. dtype: of the rows, "bf16" or "fp16". record: a key of `records.RECORDS`. latent,
    rotated: values of both parts of a row. of_query: those of a query beside it. rows: of keys and queries together.
    joined: as in `LatentSpec`."""

    dtype: str = "bf16"
    record: str = "rows"
    latent: int = 512
    rotated: int = 64
    of_query: tuple[int, int] = (0, 0)
    rows: int = 1
    joined: bool = False


@dataclass(frozen=True)
class ReadRequest:
    """A request for a kernel that reads rows. dtype, record: as in `ReadSpec`. rows: of the output."""

    dtype: str = "bf16"
    record: str = "656"
    rows: int = 1
