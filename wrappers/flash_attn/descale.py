"""Factors on queries, keys and values of 8 bits, one per KV head or one for all."""

from typing import Any

import torch

from ..host.checks import check_one_of, check_shape, check_strided


def check_descale(name: str, value: Any, batch: int, heads: int) -> None:
    check_strided(name, value)
    check_one_of(f"{name}: dtype", value.dtype, (torch.float32,))
    if value.shape != (batch, heads) and value.numel() != 1:
        check_shape(name, value, (batch, heads), "requests, KV heads; or one element")


def each_head(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a descale as one element, or as (heads,), one per KV head."""
    if value.numel() == 1:
        return value
    if value.shape[0] > 1 and value.stride(0):
        given = f"shape {tuple(value.shape)} of strides {value.stride()}"
        need = "must be one for all requests, expanded over them"
        raise NotImplementedError(f"{name}: {given}, one per request is not supported, {need}")
    return value[0] if value.stride(1) else value[0, :1]
