"""Pack the bits of masks, eight per byte, as FlashInfer's `quantization` does. Plain torch operations, on CPU and CUDA.

Attention reads masks with the least significant bit first: "little". The default of numpy and FlashInfer is "big".

All functions raise before anything is written: TypeError for a type or dtype, ValueError for a shape, device, name or
number.
"""

from typing import Any

import torch

from ..host.checks import UnknownName, check_integer, check_one_of, check_operand, check_shape, check_strided, listed
from ..host.scalars import integer

__all__ = ["packbits", "segment_packbits"]
BITORDERS = ("big", "little")
OFFSETS = (torch.int32, torch.int64)


def _shift(bit: Any, bitorder: Any) -> Any:
    """Return the shift of element `bit` of a byte: an int, or a tensor of ints."""
    if bitorder not in BITORDERS:
        raise UnknownName(f"bitorder: {bitorder!r}, must be one of {listed(BITORDERS)}")
    return bit if bitorder == "little" else 7 - bit


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack the bits of x (N,), any dtype, into uint8 (ceil(N / 8),), as `numpy.packbits` does.

    A bit is set if the element is not zero; the last byte is filled with zeros. bitorder "big": the first element is
    the most significant bit of its byte. Attention needs "little". Raises ValueError for a shape or bitorder.
    FlashInfer's function.

    >>> packbits(torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1])).tolist()
    [179, 128]
    """
    bits = check_strided("x", x, 1).to(torch.bool).to(torch.uint8)
    shifts = _shift(torch.arange(8, dtype=torch.uint8, device=x.device), bitorder)
    bits = torch.nn.functional.pad(bits, (0, -x.shape[0] % 8))
    return (bits.view(-1, 8) << shifts).sum(-1, dtype=torch.uint8)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Pack the segments x[indptr[s]:indptr[s + 1]] of x (N,), each from a byte of its own.

    indptr: int32 or int64 (S + 1,), on x's device, rising, within x. Returns uint8 (bytes,) and the segments' int32
    offsets in it (S + 1,). Waits for the device once, because the size of the result depends on values of indptr, which
    are checked at the same time. Raises TypeError for a dtype, ValueError for a shape, device, offset or bitorder.
    FlashInfer's function.

    >>> packed, starts = segment_packbits(torch.tensor([1, 0, 1, 1, 0, 0, 1]), torch.tensor([0, 4, 7]))
    >>> packed.tolist(), starts.tolist()
    ([176, 32], [0, 1, 2])
    """
    check_strided("x", x, 1)
    check_operand("indptr", indptr, 1, OFFSETS, x.device, "that of x")
    if not indptr.shape[0]:
        raise ValueError("indptr: shape (0,), must have at least 1 element")
    starts = [0]
    offsets = indptr.tolist()
    for start, end in zip(offsets, offsets[1:]):
        if not 0 <= start <= end <= x.shape[0]:
            need = f"must rise and lie in [0, {x.shape[0]}], the elements of x"
            raise ValueError(f"indptr: {start} before {end}, {need}")
        starts.append(starts[-1] + -(-(end - start) // 8))
    lengths = (indptr.diff() + 7) // 8
    byte_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    packed = pack_segments(x.to(torch.bool), indptr, byte_starts, starts[-1], bitorder=bitorder)
    return packed, byte_starts.to(torch.int32)


def pack_segments(
    bits: torch.Tensor, element_starts: torch.Tensor, byte_starts: torch.Tensor, size: int,
    out: torch.Tensor | None = None, bitorder: str = "little",
) -> torch.Tensor:  # fmt: skip
    """Pack segments of bits into uint8 (size,).

    Segment s is bits[element_starts[s]:element_starts[s + 1]], and is packed from byte byte_starts[s] on.

    Reads no value on the host, waits for nothing and can be captured. Needs 50 bytes of temporary memory per byte of
    the result.

    bits: bool (N,). element_starts: int32 or int64 (S + 1,). byte_starts: int32 or int64 (S,) or (S + 1,), rising. A
    segment that reaches into the next one, or past `size`, is cut there. Bytes of no segment are 0. out: uint8 (size,),
    written and returned; it may not overlap the other tensors. The offsets may have any values: elements outside bits
    are read as 0.
    """
    check_one_of("bits: dtype", check_strided("bits", bits, 1).dtype, (torch.bool,))
    check_operand("element_starts", element_starts, 1, OFFSETS, bits.device, "that of bits")
    check_operand("byte_starts", byte_starts, 1, OFFSETS, bits.device, "that of bits")
    size = check_integer("size", integer(size), 0)
    segments = element_starts.shape[0] - 1
    if segments < 0 or byte_starts.shape[0] not in (segments, segments + 1):
        shapes = f"{tuple(element_starts.shape)}, byte_starts: {tuple(byte_starts.shape)}"
        raise ValueError(f"element_starts: shape {shapes}, must be (S + 1,) and (S,) or (S + 1,)")
    if out is None:
        out = torch.empty(size, dtype=torch.uint8, device=bits.device)
    else:
        check_operand("out", out, 1, (torch.uint8,), bits.device, "that of bits")
        check_shape("out", out, (size,), "size")
    _shift(0, bitorder)
    out.zero_()
    if not segments or not bits.shape[0] or not size:
        return out
    count = bits.shape[0]
    byte = torch.arange(size, device=bits.device)
    starts = byte_starts[:segments].to(torch.int64)
    segment = torch.searchsorted(starts, byte, right=True) - 1  # the last that starts at or before: never an empty one
    inside = segment >= 0
    segment.clamp_(0, segments - 1)
    end = element_starts[1:].to(torch.int64).clamp(0, count)[segment]
    element = byte.sub_(starts[segment].clamp(0)).mul_(8).add_(element_starts.to(torch.int64)[segment].clamp(0, count))
    end = torch.where(inside, end, 0)
    for bit in range(8):
        found = bits[element.clamp(0, count - 1)] & (element < end) & (element >= 0)
        out |= found.to(torch.uint8) << _shift(bit, bitorder)
        element += 1
    return out
