"""The part of a call that decides which kernel merges its states."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MergeRequest:
    """A request for a kernel.

    dtype: of V, "bf16", "fp16" or "fp32". pair: the states are two tensors instead of one. rows: tokens * heads."""

    dtype: str
    pair: bool = False
    rows: int = 1
