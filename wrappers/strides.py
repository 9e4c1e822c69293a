"""Strides of dimensions of size 1: they address nothing, so any value is right, but compiled code checks them all."""

from collections.abc import Callable
from typing import Any

import torch


def ordinary(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides that a dense one has in its dimensions of size 1; itself if they are its own."""
    strides, inner = list(t.stride()), 1  # inner: elements from the first to the last of the dimensions behind
    for dim in range(t.dim() - 1, -1, -1):
        if t.shape[dim] == 1:
            strides[dim] = inner
        inner = max(inner, strides[dim] * t.shape[dim])
    return t if tuple(strides) == t.stride() else t.as_strided(t.shape, strides)


def launch(fn: Callable[..., Any], flat: list[Any]) -> None:
    """Launch a kernel, whatever the strides of dimensions of size 1."""
    try:
        fn(*flat)
    except Exception:
        if not launch_ordinary(fn, flat):
            raise


def launch_ordinary(fn: Callable[..., Any], flat: list[Any]) -> bool:
    """Launch a kernel that refused its arguments again, with ordinary strides in dimensions of size 1.

    Return whether it was launched: not if all strides are ordinary, or if it refuses these, too. Calls come here only
    after a refusal, so all others take no time for it.
    """
    changed = [ordinary(t) if isinstance(t, torch.Tensor) else t for t in flat]
    if all(a is b for a, b in zip(changed, flat)):
        return False
    try:
        fn(*changed)
    except Exception:
        return False
    return True
