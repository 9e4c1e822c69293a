"""Which tensors have memory in common: exact, from addresses, sizes and strides.

Where a call is known, its outputs are compared with its first input and each other, by bounds of the addresses that
each reaches (storages say less: imported memory has its own); only tensors that may meet are looked at here. All
others of its tensors are compared when its plan is made.
"""

from functools import lru_cache
from typing import NamedTuple

import torch


class MemorySpan(NamedTuple):
    """Bytes of a tensor: `run` of them at every place of a grid. dims: (count, step) of it, the largest step first.
    extent: from the first byte to the last, and one."""

    dims: tuple[tuple[int, int], ...]
    run: int
    extent: int

    @staticmethod
    def of(dims: tuple[tuple[int, int], ...], run: int) -> "MemorySpan":
        return MemorySpan(dims, run, sum((count - 1) * step for count, step in dims) + run)


def reach(t: torch.Tensor) -> int:
    """Bytes from the first to the last of a tensor."""
    return _span(t.shape, t.stride(), t.element_size()).extent if t.numel() else 0


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a byte belongs to both. About 1 us where they lie apart and their forms were seen before."""
    if not a.numel() or not b.numel() or a.is_meta:
        return False
    mine, other = _span(a.shape, a.stride(), a.element_size()), _span(b.shape, b.stride(), b.element_size())
    return _meet(b.data_ptr() - a.data_ptr(), mine, other)


def folded(t: torch.Tensor) -> bool:
    """Whether two elements may have one address: a dimension's step does not leave the dimensions with smaller ones."""
    inside = 0  # from the first element to the last that the dimensions so far lead to
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride <= inside and t.numel():
            return True
        inside += stride * (size - 1)
    return False


@lru_cache(4096)
def _span(shape: torch.Size, strides: tuple[int, ...], size: int) -> MemorySpan:
    run = size
    dims: list[tuple[int, int]] = []
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count == 1 or stride == 0:
            continue
        if not dims and stride * size == run:
            run *= count
        else:
            dims.append((count, stride * size))
    return MemorySpan.of(tuple(reversed(dims)), run)


def _meet(apart: int, a: MemorySpan, b: MemorySpan) -> bool:
    """Whether they do, where b begins `apart` bytes after a."""
    if apart >= a.extent or -apart >= b.extent:
        return False
    if not a.dims and not b.dims:
        return True
    inner_a, inner_b = MemorySpan.of(a.dims[1:], a.run), MemorySpan.of(b.dims[1:], b.run)
    step_a, step_b = (s.dims[0][1] if s.dims else 0 for s in (a, b))
    if step_a == step_b and max(inner_a.extent, inner_b.extent) <= step_a:  # rows of one matrix
        first = max(1 - a.dims[0][0], (-inner_b.extent - apart) // step_a + 1)
        last = min(b.dims[0][0] - 1, -((apart - inner_a.extent) // step_a) - 1)
        return any(_meet(apart + k * step_a, inner_a, inner_b) for k in range(first, last + 1))
    if step_a < step_b:
        return _meet(-apart, b, a)
    first = max(0, (apart - inner_a.extent) // step_a + 1)
    last = min(a.dims[0][0] - 1, -((-apart - b.extent) // step_a) - 1)
    return any(_meet(apart - i * step_a, inner_a, b) for i in range(first, last + 1))
