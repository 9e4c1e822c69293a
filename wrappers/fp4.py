"""NVFP4: e2m1 codes, two a byte with the even index in the low nibble, and one e4m3 scale factor per 16 elements.

A scale tensor is linear, (..., D / 16) beside data (..., D / 2), or swizzled for tensor-core use: rows in tiles of 128,
scale columns in tiles of 4, 512 bytes a tile (`swizzled_offset`). KV caches carry linear scales, outputs swizzled ones.
Formats: spec of NVIDIA's PTX ISA (e2m1, cvt.rn.satfinite) and cuBLAS's 128x4 block-scaling layout.
"""

from typing import Any

import torch

BLOCK = 16  # elements that share a scale factor
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of code 0..7; bit 3 is the sign
E4M3_MAX = 448.0
SCALE_TILE = 128, 4  # rows, columns


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


class FP4Tensor:
    """Packed data with its swizzled scale factors.

    data: uint8 (rows, ..., D / 2). scale: e4m3 (M, K), M a multiple of 128, K = round_up(elements of a row / 16, 4), in
    the 128x4 swizzle; row r of data has its factors in row scale_start_index + r. original_shape: the unpacked shape.
    ValueError names what does not fit.
    """

    dtype = "nvfp4"

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        scale_start_index: int = 0,
        original_shape: tuple[int, ...] | None = None,
    ):
        if data.dtype != torch.uint8:
            raise ValueError(f"data: dtype {data.dtype}, must be torch.uint8")
        if scale.dtype != torch.float8_e4m3fn:
            raise ValueError(f"scale: dtype {scale.dtype}, must be torch.float8_e4m3fn")
        if scale.shape[0] % SCALE_TILE[0]:
            raise ValueError(f"scale: {scale.shape[0]} rows, must be a multiple of {SCALE_TILE[0]}")
        if not 0 <= scale_start_index < scale.shape[0]:
            raise ValueError(f"scale_start_index: {scale_start_index}, must be in [0, {scale.shape[0]})")
        if scale_start_index + data.shape[0] > scale.shape[0]:
            raise ValueError(
                f"scale_start_index: {scale_start_index} + {data.shape[0]} rows exceed scale's {scale.shape[0]}"
            )
        if original_shape is not None:
            packed = (*original_shape[:-1], -(-original_shape[-1] // 2))
            if tuple(data.shape) != packed:
                raise ValueError(f"original_shape: {tuple(original_shape)} packs to {packed}, not {tuple(data.shape)}")
        self.data = data
        self.scale = scale
        self.scale_start_index = scale_start_index
        self.original_shape = original_shape

    @property
    def shape(self) -> torch.Size:
        """Shape of the packed data."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """To e4m3, round to nearest even, saturating at +-448 (torch's own conversion gives NaN there); NaN stays."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) of fp32 x: round to nearest, ties to the even code, saturating at 6; NaN becomes +6."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for closed, bound in ((True, 0.75), (False, 1.25), (True, 1.75), (False, 2.5), (True, 3.5), (False, 5.0)):
        code += (a >= bound) if closed else (a > bound)  # a tie goes to the even code: up from an odd one
    code = torch.where(x.isnan(), 7, code)
    return code | ((x.signbit() & ~x.isnan()).to(torch.uint8) << 3)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """(..., D) codes -> (..., D / 2) bytes."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """(..., D / 2) bytes -> (..., D) codes."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


@torch.no_grad()
def nvfp4_quantize(x: torch.Tensor, global_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., D), D % 16 == 0 -> packed data (..., D / 2) uint8, linear scales (..., D / 16) e4m3.

    sf = e4m3(global_scale * amax / 6) of each block of 16; code = e2m1(x * global_scale / sf), 0 where sf is 0. So
    `global_scale` is the forward one, at most 448 * 6 / amax(x) to avoid saturation.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"x: last dimension {x.shape[-1]}, must be a multiple of {BLOCK}")
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = e4m3(blocks.abs().amax(-1) * global_scale / GRID[-1])
    factor = scales.float().unsqueeze(-1)
    codes = torch.where(factor == 0, 0, e2m1(blocks * global_scale / factor))
    return pack(codes.flatten(-2)), scales


@torch.no_grad()
def nvfp4_dequantize(data: torch.Tensor, scales: torch.Tensor, global_scale: float = 1.0) -> torch.Tensor:
    """data (..., D / 2), linear scales (..., D / 16) -> fp32 (..., D): code * sf / global_scale."""
    grid = torch.tensor(GRID + tuple(-x for x in GRID), dtype=torch.float32, device=data.device)
    values = grid[unpack(data).long()].unflatten(-1, (-1, BLOCK))
    return (values * scales.float().unsqueeze(-1) / global_scale).flatten(-2)


def swizzled_offset(row: Any, col: Any, columns: int) -> Any:
    """Offset of scale (row, col) in a swizzled tensor of `columns` (a multiple of 4); ints or integer tensors."""
    tile = row // 128 * (columns // 4) + col // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


def _offsets(rows: int, start: int, columns: int, padded: int, device: torch.device) -> torch.Tensor:
    row = torch.arange(start, start + rows, device=device)[:, None]
    return swizzled_offset(row, torch.arange(columns, device=device)[None, :], padded)


def write_scales(scales: torch.Tensor, into: torch.Tensor, start: int = 0) -> None:
    """Linear scales (rows, K) into rows start.. of the swizzled contiguous tensor `into`; the rest keeps its bytes."""
    offsets = _offsets(len(scales), start, scales.shape[1], into.shape[1], scales.device)
    into.view(torch.uint8).view(-1)[offsets.flatten()] = scales.view(torch.uint8).flatten()


def read_scales(swizzled: torch.Tensor, rows: int, columns: int, start: int = 0) -> torch.Tensor:
    """Linear scales (rows, columns) out of rows start.. of a swizzled contiguous tensor."""
    offsets = _offsets(rows, start, columns, swizzled.shape[1], swizzled.device)
    return swizzled.view(torch.uint8).view(-1)[offsets].view(torch.float8_e4m3fn)


def empty(shape: tuple[int, ...], device: torch.device) -> FP4Tensor:
    """An uninitialised FP4Tensor for values of `shape` (rows, ..., D); at least one tile of scale rows."""
    rows = max(SCALE_TILE[0], round_up(shape[0], SCALE_TILE[0]))
    width = 1
    for extent in shape[1:]:
        width *= extent
    data = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=device)
    columns = round_up(width // BLOCK, SCALE_TILE[1])
    return FP4Tensor(data, torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device), 0, tuple(shape))


def store(x: torch.Tensor, out: FP4Tensor, global_scale: float) -> None:
    """Quantise x (rows, ..., D) into `out`, blocks of 16 along a row's flattened elements."""
    data, scales = nvfp4_quantize(x.flatten(1), global_scale)
    out.data.copy_(data.view(out.data.shape))
    write_scales(scales, out.scale, out.scale_start_index)


def load(t: FP4Tensor, global_scale: float) -> torch.Tensor:
    """The fp32 values of `t`, shape (rows, ..., D)."""
    data = t.data.flatten(1)
    scales = read_scales(t.scale, data.shape[0], data.shape[1] * 2 // BLOCK, t.scale_start_index)
    return nvfp4_dequantize(data, scales, global_scale).view(*t.data.shape[:-1], -1)


def deinterleave_v_scales(scales: torch.Tensor) -> torch.Tensor:
    """Linear V scales (..., P, S) from the layout that interleaves 4 tokens: stored[t // 4 * 4S + s * 4 + t % 4]."""
    tokens, columns = scales.shape[-2:]
    stored = scales.reshape(*scales.shape[:-2], tokens // 4, columns, 4)
    return stored.transpose(-1, -2).reshape(scales.shape)
