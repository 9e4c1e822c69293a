"""The part of a call that decides which kernel computes its logits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexerRequest:
    """A request for a kernel.

    heads, dim: of the indexer's queries. rows: query tokens that see the same keys, as far as their number is known:
    those of a request. out: type of the logits, "fp32" or "bf16". tokens, count: query tokens and keys of the whole
    call. keys: type of queries and keys, "e4m3" or "bf16"."""

    heads: int = 64
    dim: int = 128
    rows: int = 1
    out: str = "fp32"
    tokens: int = 1
    count: int = 1
    keys: str = "e4m3"
