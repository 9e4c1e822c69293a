"""A kernel launch as the simulator takes it: PTX, global memory, parameters, tensor maps, grid."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .faults import Fault
from .numbers import count_nonzero

FIRST = 0x7F00_0000_0000  # address of the first buffer
GUARD = 1 << 20  # minimum of unmapped bytes between buffers: a stray address hits no other buffer
FORMATS = {  # CU_TENSOR_MAP_DATA_TYPE_* of cuTensorMapEncodeTiled: bytes per element in global memory
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "tf32": 4,
    "16u4_align8": 0.5,
}

BEYOND = {
    "exit": "work that is left over at exit, such as a barrier that waits for bytes, is harmless",
    "init": "an async operation sees the initialisation of an mbarrier that no fence.mbarrier_init has made visible",
    "lanes": "a tensor memory lane below 32 in tcgen05.ld and st counts from the first lane that the warp may access",
    "relaxed": "a thread that waits for a relaxed arrival sees what happened before that arrival",
}


class Global:
    """Global memory: numpy arrays at 64-bit addresses with gaps between them. Kernels read and write the arrays."""

    def __init__(self) -> None:
        self.bases = np.zeros(0, np.uint64)
        self.starts: list[int] = []  # the same numbers
        self.buffers: list[np.ndarray] = []
        self.names: list[str] = []
        self._next = FIRST

    def add(self, array: np.ndarray, name: str = "") -> int:
        """Add `array`, which must be C-contiguous, and return its address. An empty array has an address, but no
        bytes."""
        if not array.flags.c_contiguous:
            raise ValueError(f"array {name}: must be C-contiguous, pass the buffer that it is a view of")
        address = self._next
        self.bases = np.append(self.bases, np.uint64(address))
        self.starts.append(address)
        self.buffers.append(array.reshape(-1).view(np.uint8))
        self.names.append(name or f"buffer {len(self.names)}")
        self._next += (array.nbytes + 2 * GUARD) // GUARD * GUARD
        return address

    def locate(self, address: np.ndarray, size: int, what: object) -> list[tuple[int, np.ndarray, Any]]:
        """Return (number of the buffer, offsets, indices into `address`) per buffer. Raise Fault if an access of
        `size` bytes is out of bounds or misaligned."""
        if not address.size:
            return []
        if count_nonzero(address & np.uint64(size - 1)):  # sizes are powers of two
            raise Fault(
                f"{what}: address {int(address[address % np.uint64(size) != 0][0]):#x} is not aligned to {size} B"
            )
        low, high = int(np.minimum.reduce(address)), int(np.maximum.reduce(address))
        index = bisect_right(self.starts, low) - 1
        if index >= 0 and high + size <= self.starts[index] + self.buffers[index].size:
            return [(index, (address - self.bases[index]).view(np.int64), slice(None))]
        owner = np.searchsorted(self.bases, address, "right") - 1
        found = []
        for index in [int(owner[0])] if not count_nonzero(owner != owner[0]) else np.unique(owner).tolist():
            which = slice(None) if not count_nonzero(owner != index) else np.flatnonzero(owner == index)
            if index < 0:
                raise Fault(f"{what}: address {int(address[which][0]):#x} lies below every buffer")
            offset = (address[which] - self.bases[index]).astype(np.int64)
            outside = offset + size > self.buffers[index].size
            if count_nonzero(outside):
                raise Fault(
                    f"{what}: {size} B at offset {int(offset[outside][0])} of {self.names[index]}, "
                    f"which has {self.buffers[index].size} B"
                )
            found.append((index, offset, which))
        return found

    def load(self, address: np.ndarray, dtype: Any, what: object = "load", check: Any = None) -> np.ndarray:
        """Return elements of `dtype` at byte addresses (n,). check: called with each item of `locate`."""
        dtype = np.dtype(dtype)
        out = np.empty(address.shape, dtype)
        for index, offset, which in self.locate(address, dtype.itemsize, what):
            if check:
                check(index, offset, which)
            out[which] = elements(self.buffers[index], dtype)[offset // dtype.itemsize]
        return out

    def store(self, address: np.ndarray, values: np.ndarray, what: object = "store", note: Any = None) -> None:
        """Write elements to byte addresses (n,); if two share an address, the last one wins. note: called with each
        item of `locate` and the elements (before, after, written)."""
        dtype = values.dtype
        for index, offset, which in self.locate(address, dtype.itemsize, what):
            memory, at = elements(self.buffers[index], dtype), offset // dtype.itemsize
            before = memory[at] if note else None
            memory[at] = values[which]
            if note:
                note(index, offset, which, (before, memory[at], values[which]))


def elements(buffer: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """View bytes as `dtype`; a remainder at the end is cut off."""
    return buffer[: buffer.size // dtype.itemsize * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled. All lists begin with the innermost dimension.

    address: of element 0, 16-byte aligned. dims: in elements. strides: in bytes, one per dimension after the
    innermost, multiples of 16. box: in elements. format: a key of FORMATS. swizzle: bytes of the span, 0, 32, 64
    or 128. fill: the value of elements outside the tensor, "zero" or "nan". element_strides are 1, there is no
    interleave."""

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    format: str
    swizzle: int = 0
    fill: str = "zero"

    def __post_init__(self) -> None:
        inner = self.box[0] * FORMATS[self.format]
        checks = (
            (self.address % 16 == 0, f"address {self.address:#x}: must be a multiple of 16"),
            (all(stride % 16 == 0 for stride in self.strides), f"strides {self.strides}: must be multiples of 16"),
            (len(self.strides) == len(self.dims) - 1, f"strides {self.strides}: one per dimension after the first"),
            (len(self.box) == len(self.dims) <= 5, f"box {self.box}: as many entries as dims {self.dims}, at most 5"),
            (all(0 < b <= 256 for b in self.box), f"box {self.box}: entries from 1 to 256"),
            (inner % 16 == 0, f"box {self.box}: the inner row of {inner} B is no multiple of 16 B"),
            (not self.swizzle or inner <= self.swizzle, f"box {self.box}: inner row wider than swizzle {self.swizzle}"),
        )
        for good, problem in checks:
            if not good:
                raise ValueError(f"tensor map: {problem}")


@dataclass
class KernelLaunch:
    """One launch. params: for each PTX parameter the bytes of its value, or a TensorMap. shared: dynamic shared
    memory in bytes per CTA. before: the last action of the preceding launch, called at each griddepcontrol.wait
    with the set of warps of a CTA that have reached it. beyond: keys of BEYOND, behaviour that kernels of other
    projects rely on and the ISA does not guarantee; without the key it is a fault.

    The block shape is the kernel's .reqntid, or `block`."""

    ptx: str
    params: list[bytes | TensorMap]
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    block: tuple[int, int, int] | None = None
    memory: Global = field(default_factory=Global)
    before: Callable[[set[int]], None] | None = None
    beyond: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.beyond) - set(BEYOND):
            raise ValueError(f"beyond: {', '.join(sorted(unknown))}, must be among {', '.join(BEYOND)}")
