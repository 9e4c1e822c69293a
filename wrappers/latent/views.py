"""Caches of latent attention as a call holds them."""

from typing import Any

import torch

from ..host.checks import check_strided


def rows_view(name: str, cache: Any) -> Any:
    """Return a cache as (pages, P, elements); it may have a dimension of one head."""
    if cache.__class__ is torch.Tensor and cache.ndim == 3:
        return cache
    if not isinstance(cache, torch.Tensor) or cache.ndim != 4:
        return check_strided(name, cache, 3)
    check_strided(name, cache, 4)
    if cache.shape[2] != 1:
        raise ValueError(f"{name}: shape {tuple(cache.shape)}, must have one head")
    return cache.select(2, 0)
