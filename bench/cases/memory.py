"""Tensors with distant rows: the space between them is reserved address space without memory."""

import mmap

import torch

FAR_BYTES = 1 << 31  # least distance between pages, tokens and rows


def distant(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with a stride of FAR_BYTES in the first dimension. The space in between is address space, not
    memory."""
    step = FAR_BYTES // t.element_size()
    size = len(t) * FAR_BYTES + t.numel() * t.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE; Python has the name from 3.13 on
    whole = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8).view(t.dtype)
    return whole.as_strided(t.shape, (step, *t.contiguous().stride()[1:])).copy_(t)
