"""The part of a top-k call that decides which kernel serves it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TopKKernelRequest:
    """A request for a kernel.

    dtype: of the scores, "fp32", "fp16" or "bf16". length: upper bound of the elements of a row. k: how many
    elements to select. sms: multiprocessors of the GPU."""

    dtype: str
    rows: int
    length: int
    k: int = 1
    sms: int = 132
