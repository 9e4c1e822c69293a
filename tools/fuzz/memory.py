"""One block of device memory for the tensors of a call, with guards around each, and images of it."""

from collections.abc import Callable
from typing import Any

import torch

from bench.cases.cache_write import copied
from wrappers import FP4Tensor

GUARD = 1024  # bytes before and after each storage
ALIGN = 256
PATTERN = (0xFF, 0xFF, 0xFF, 0x7F)  # NaN in every float type; as int32 larger than any tensor


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested arguments with `change` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, FP4Tensor):
        return FP4Tensor(change(value.data), change(value.scale), value.scale_start_index)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(part, change) for part in value))
    return type(value)(mapped(part, change) for part in value) if isinstance(value, (tuple, list)) else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors of nested arguments, in order."""
    found: list[torch.Tensor] = []

    def note(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    mapped(value, note)
    return found


def raw(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def own_bytes(t: torch.Tensor, whole: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Return a view of the bytes of a tensor's elements in `whole`, in which its storage begins at `offset`."""
    size = t.element_size()
    shape, strides = (*t.shape, size), (*(stride * size for stride in t.stride()), 1)
    return whole.as_strided(shape, strides, offset + t.storage_offset() * size)


def extracted(tree: Any, placed: Any) -> Any:
    """Return a copy of a tree on the CPU with the bytes that its storages have where the tree was placed."""
    found, pairs = copied(tree, "cpu"), []
    for t, there in zip(tensors_of(found), tensors_of(placed), strict=True):
        if t.numel():
            first = (there.storage_offset() - t.storage_offset()) * t.element_size()
            pairs.append((raw(t), first, raw(there)))
    for data, first, block in pairs:
        data.copy_(block[first : first + len(data)])
    return found


class Memory:
    """A block of bytes on a device that is reused by all calls of a process.

    `place` copies arguments into it: each storage once, so that views of one tensor stay views of one tensor. `image`
    returns the bytes that the block has with other values of the same structure.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.block = torch.empty(0, dtype=torch.uint8, device=device)
        self.used = 0
        self.where: dict[int, int] = {}  # order of a storage in the tree -> its offset
        self.open = torch.empty(0, dtype=torch.bool, device=device)  # bytes that a call may write

    def _layout(self, tree: Any) -> list[tuple[torch.Tensor, int]]:
        """Return (bytes, offset) of each storage of a tree, and set the size in use."""
        found: dict[int, tuple[torch.Tensor, int]] = {}
        at = GUARD
        for t in tensors_of(tree):
            key = t.untyped_storage().data_ptr()
            if key and key not in found:
                data = raw(t)
                found[key] = data, at
                at += -(-len(data) // ALIGN) * ALIGN + GUARD
        self.used = at
        return list(found.values())

    def place(self, tree: Any, written: Callable[[Any], list[torch.Tensor]]) -> Any:
        """Return the arguments with their tensors in this block. written: tensors of a tree that the call may write."""
        layout = self._layout(tree)
        if self.used > len(self.block):
            del self.block
            self.block = torch.empty(max(1 << 20, 2 * self.used), dtype=torch.uint8, device=self.device)
        offsets = {data.data_ptr(): at for data, at in layout}
        storage = self.block.untyped_storage()
        self.spots: dict[int, int] = {}

        def moved(t: torch.Tensor) -> torch.Tensor:
            key = t.untyped_storage().data_ptr()
            if not key:
                return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device)
            empty = torch.empty(0, dtype=t.dtype, device=self.device)
            first = offsets[key] // t.element_size() + t.storage_offset()
            return empty.set_(storage, first, t.shape, t.stride())

        placed = mapped(tree, moved)
        self.open = torch.zeros(self.used, dtype=torch.bool, device=self.device)
        for t in written(placed):
            if t.numel():
                own_bytes(t, self.open).fill_(True)
        return placed

    def image(self, tree: Any) -> torch.Tensor:
        """Return the bytes of the block in use, with the values of a tree that has the structure of the placed one."""
        layout, used = self._layout(tree), self.used
        if used != len(self.open):
            raise AssertionError("the variants of a call differ in their structure")
        pattern = torch.tensor(PATTERN, dtype=torch.uint8).repeat(-(-used // 4))[:used]
        for data, at in layout:
            pattern[at : at + len(data)] = data
        return pattern.to(self.device)

    def restore(self, image: torch.Tensor) -> None:
        self.block[: len(image)].copy_(image)

    def changed(self, image: torch.Tensor, everything: bool = False) -> str:
        """Return "" if all bytes have the values of the image, but for those that the call may write.

        everything: those too.
        """
        apart = self.block[: len(image)] != image
        if not everything:
            apart &= ~self.open
        if not bool(apart.any()):
            return ""
        at = apart.nonzero()
        return f"{len(at)} bytes outside the outputs changed, the first at {int(at[0])} of {len(image)}"
