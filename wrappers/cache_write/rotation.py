"""The rotary embedding of a call that writes a cache, and the table of angles of its launch."""

from math import pi
from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write.args import ANGLES, INTERLEAVED

from ..host.plain import traced
from ..host.scratch import constant


class RotaryEmbedding(NamedTuple):
    """Rotary embedding of Q and K. No other library has this class.

    positions: int32 or int64 (N,); None: those of `PageLists` or `BlockTable`. cos_sin_cache: fp32 (L, R), cosines then
    sines of R / 2 pairs at each position; None: angles are computed. Then rotary_dim is R (None: head_dim), and pair i
    turns by theta^(-2 i / R) / scale per position; llama31: (low_freq_factor, high_freq_factor, old_context_len) of
    Llama 3.1's rule, which applies the scale to low frequencies only. With cos_sin_cache, these four must have their
    default values. R: a multiple of 16. interleaved: pairs are neighbours, (2 i, 2 i + 1), instead of (i, i + R / 2).
    Angles of positions below 2^24 are exact to fp32.

    >>> RotaryEmbedding().theta
    10000.0
    """

    positions: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor | None = None
    interleaved: bool = False
    rotary_dim: int | None = None
    scale: float = 1.0
    theta: float = 1e4
    llama31: tuple[float, float, int] | None = None


def turns(device: torch.device, dim: int, theta: float, scale: float, *llama31: float) -> torch.Tensor:
    """Return (1, dim) fp32: the turns per position of dim / 2 pairs, rounded, then what was rounded away."""
    frequency = torch.pow(theta, torch.arange(0, -dim, -2, dtype=torch.float64, device=device) / dim)
    if llama31:
        low, high, length = llama31
        periods = frequency * (length / (2 * pi))  # in the old context
        smooth = ((periods - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (smooth + (1 - smooth) / scale)
    else:
        frequency = frequency / scale
    exact = frequency / (2 * pi)
    rounded = exact.float()
    return torch.cat([rounded, (exact - rounded.double()).float()])[None]


def rope_table(rope: RotaryEmbedding, k: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the arguments `rope_table` and `rope` of a launch."""
    flags = INTERLEAVED if rope.interleaved else 0
    if rope.cos_sin_cache is not None:
        return rope.cos_sin_cache, flags
    dim = k.shape[2] if rope.rotary_dim is None else rope.rotary_dim
    numbers: Any = (dim, float(rope.theta), float(rope.scale), *(rope.llama31 or ()))
    return constant(turns, k.device, not traced(k), *numbers), flags | ANGLES
