"""The part of a call that decides which kernel computes its logits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexerRequest:
    """A request for a kernel.

    heads, dim: of the indexer's queries. rows: query tokens that see the same keys, as far as their number is known:
    those of a request. out: type of the logits, "fp32" or "bf16". tokens, keys: of the whole call."""

    heads: int = 64
    dim: int = 128
    rows: int = 1
    out: str = "fp32"
    tokens: int = 1
    keys: int = 1
