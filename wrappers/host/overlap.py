"""Report which tensors have memory in common: exact, from addresses, sizes and strides.

If the plan of a call is known, its outputs are compared with its other tensors by bounds of the addresses that each
tensor reaches (storages say less: imported memory has its own), see `AddressBounds`. Only a call in which such bounds
overlap is compared exactly again.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import torch


class MemorySpan(NamedTuple):
    """The bytes of a tensor: `run` consecutive bytes at each point of a grid.

    dims: (count, step in bytes) of each dimension of the grid, the largest step first. extent: bytes from the first
    byte to the last, both included.
    """

    dims: tuple[tuple[int, int], ...]
    run: int
    extent: int

    @staticmethod
    def of(dims: tuple[tuple[int, int], ...], run: int) -> "MemorySpan":
        return MemorySpan(dims, run, sum((count - 1) * step for count, step in dims) + run)


class AddressBounds(NamedTuple):
    """The addresses of the tensors of a valid call, for a comparison with other calls of the same shapes and strides.

    pairs: two tensors of which one is written: their positions in `addresses`, and the bytes that each reaches.
    """

    addresses: list[int]
    pairs: tuple[tuple[int, int, int, int], ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor | None], written: set[int]) -> "AddressBounds":
        """Return the bounds of tensors, some of them absent. written: the positions of those that the call writes."""
        sizes = [0 if t is None else reach(t) for t in tensors]
        pairs = [(a, b) for a, b in combinations(range(len(sizes)), 2) if {a, b} & written and sizes[a] and sizes[b]]
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        return AddressBounds(addresses, tuple((a, b, sizes[a], sizes[b]) for a, b in pairs))

    def may_overlap(self, addresses: list[int]) -> bool:
        """Return whether a tensor that is written may share memory with another one, at another distance than in the
        call that is known to be valid. addresses: of all tensors; those of that call need no question."""
        known = self.addresses
        for a, b, a_bytes, b_bytes in self.pairs:
            apart = addresses[b] - addresses[a]
            if -b_bytes < apart < a_bytes and apart != known[b] - known[a]:
                return True
        return False


def reach(t: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last of a tensor."""
    return _span(t.shape, t.stride(), t.element_size()).extent if t.numel() else 0


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether any byte belongs to both; about 1 us if they are apart and both layouts were seen before, and a
    third of that if both are dense."""
    if not a.numel() or not b.numel() or a.is_meta:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return -b.nbytes < b.data_ptr() - a.data_ptr() < a.nbytes
    mine, other = _span(a.shape, a.stride(), a.element_size()), _span(b.shape, b.stride(), b.element_size())
    return _meet(b.data_ptr() - a.data_ptr(), mine, other)


def folded(t: torch.Tensor) -> bool:
    """Return whether two elements may have one address: a stride does not leave the dimensions with smaller strides."""
    inside = 0  # distance from the first element to the last one within the dimensions so far
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
    """Return whether a and b share a byte, b beginning `apart` bytes after a."""
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
