"""Layouts of elements: swizzles, tensor-map boxes, matrix descriptors, register fragments of matrix instructions."""

from functools import cache, lru_cache
from typing import Any

import numpy as np

from .call import FORMATS, TensorMap

SWIZZLE = {128: 0x70, 64: 0x30, 32: 0x10}  # bits of a byte address that are XORed with the bits three places higher


def swizzle(address: np.ndarray, span: int) -> np.ndarray:
    """Return byte addresses after a swizzle of `span` bytes (PTX ISA, Tensors: Swizzling Modes)."""
    return address ^ ((address >> 3) & SWIZZLE[span]) if span else address


def per_unit(tensor: TensorMap, wide: bool) -> int:
    """Return the number of elements per unit of a box: 1, two of 4 bits, or if `wide` and if no row of the tensor ends
    within them, those of 16 bytes."""
    size = FORMATS[tensor.format]
    return int(16 / size) if wide and tensor.dims[0] * size % 16 == 0 else max(1, int(1 / size))


@cache
def box(tensor: TensorMap, wide: bool = False) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return the layout of a tensor map's box: (indices per dimension (rank, k), byte offsets (k,) in shared memory,
    bytes per unit, bytes in all). wide: as in `per_unit`.

    With a swizzle the pitch of rows is its span, even if they are narrower (seen on an H200); the bytes in all do not
    include such gaps."""
    count = per_unit(tensor, wide)
    unit = int(count * FORMATS[tensor.format])
    shape = (tensor.box[0] // count, *tensor.box[1:])
    flat = np.arange(int(np.prod(shape)))
    index = np.array(np.unravel_index(flat, shape[::-1])[::-1], np.int64)
    pitch = tensor.swizzle or shape[0] * unit
    return index, flat // shape[0] * pitch + index[0] * unit, unit, len(flat) * unit


@lru_cache(1024)
def box_units(tensor: TensorMap, start: int, wide: bool) -> np.ndarray:
    """Return where the units of a box at byte `start` lie in shared memory, in units."""
    _, linear, unit, _ = box(tensor, wide)
    return swizzle(start + linear, tensor.swizzle) // unit


@lru_cache(1024)
def box_words(tensor: TensorMap, start: int) -> Any:
    """Return the words of shared memory that a box at byte `start` touches, as a slice or an array."""
    _, linear, unit, size = box(tensor)
    if int(linear[-1]) + unit == size:  # no gaps
        return slice(start >> 2, (start + size) >> 2)
    return np.unique(swizzle(start + linear, tensor.swizzle) >> 2)


def box_addresses(tensor: TensorMap, at: list[int], store: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return (global address of every unit of the box at coordinates `at`, whether it lies inside the tensor). Units of
    loads are wide.

    A store is cut off at 16 bytes, not at an element: it writes past an inner extent that is not a multiple of 16
    bytes (seen on an H200)."""
    index, _, unit, _ = box(tensor, not store)
    count = per_unit(tensor, not store)
    inside = np.ones(index.shape[1], bool)
    first = tensor.address
    for axis, (start, extent) in enumerate(zip(at, tensor.dims)):
        size = tensor.box[axis]
        if axis == 0:
            extent = -(-extent * unit // count // 16) * 16 // unit if store else extent // count
            start, size = start // count, size // count
        if start < 0 or start + size > extent:
            place = index[axis] + start
            inside &= (place >= 0) & (place < extent)
        first += start * (unit if axis == 0 else tensor.strides[axis - 1])
    return (box_offsets(tensor, not store) + first).view(np.uint64), inside


@cache
def box_offsets(tensor: TensorMap, wide: bool) -> np.ndarray:
    """Return the distance of every unit of a box from the first one in global memory."""
    index, _, unit, _ = box(tensor, wide)
    return np.array([unit, *tensor.strides], np.int64) @ index


@cache
def matrix(rows: int, row_bytes: int, size: int, major: str, span: int, leading: int, stride: int) -> np.ndarray:
    """Return byte offsets (rows, k), before the swizzle, of an MMA operand in shared memory (PTX ISA, Matrix
    Descriptor).

    rows: along M or N. row_bytes: along K. size: of an element. major: "k" or "mn", the contiguous direction.
    leading, stride: byte offsets of the descriptor."""
    i, k = np.arange(rows)[:, None], np.arange(row_bytes // size)[None, :]
    at = k * size
    if major == "k" and span:
        out = i % 8 * span + i // 8 * stride + at
    elif major == "k":  # 8 x 16-byte core matrices
        out = i % 8 * 16 + i // 8 * stride + at // 16 * leading + at % 16
    elif span:
        wide = span // size
        out = i % wide * size + i // wide * leading + k % 8 * span + k // 8 * stride
    else:
        wide = 16 // size
        out = i % wide * size + i // wide * stride + k % 8 * 16 + k // 8 * leading
    return np.broadcast_to(out, (rows, row_bytes // size)).astype(np.int64)


@cache
def accumulator(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of accumulator register i of thread t of a warpgroup, (n / 2, 128) each; 32-bit elements."""
    t, i = np.arange(128)[None, :], np.arange(n // 2)[:, None]
    return 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2


@cache
def fragment(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, first column) of A register i of thread t of a warpgroup, (4, 128); a register holds 4 / size
    elements."""
    t, i = np.arange(128)[None, :], np.arange(4)[:, None]
    per = 4 // size
    return 16 * (t // 32) + t % 32 // 4 + 8 * (i % 2), per * (t % 4) + 4 * per * (i // 2)
