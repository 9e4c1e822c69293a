"""What a call of a top-k function asks for, as far as it decides which kernel serves it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TopKKernelRequest:
    """dtype: of the scores, "fp32", "fp16" or "bf16". length: upper bound of the elements of a row. k: how many to
    select. sms: multiprocessors of the GPU."""

    dtype: str
    rows: int
    length: int
    k: int = 1
    sms: int = 132
