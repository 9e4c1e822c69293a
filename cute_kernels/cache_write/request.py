"""The part of a call that decides which kernel writes its rows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheWriteRequest:
    """A request for a kernel.

    dtype: of the rows, "bf16", "fp16" or "uint8" for any type of one byte. cache: of the cache, dtype or "e4m3",
    "e5m2", "int8", "nvfp4". transform: the call has Q, a norm or a rotary embedding. head_dim: elements of the longest
    row. rotated: elements of a row that are rotated, 0 for none. gather: Q and K are those of an attention call.
    scales: as in `CacheWriteSpec`."""

    dtype: str
    cache: str
    transform: bool = False
    head_dim: int = 128
    rotated: int = 0
    gather: bool = False
    scales: str = ""
