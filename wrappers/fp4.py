"""NVFP4: e2m1 codes, two per byte with the even index in the low nibble, and one e4m3 scale factor per 16 elements.

A scale tensor is either linear, (..., D / 16) for data (..., D / 2), or swizzled for tensor cores: tiles of 128 rows
and 4 scale columns, 512 bytes each (`swizzled_offset`). KV caches use linear scales, outputs swizzled ones. The formats
are those of NVIDIA's PTX ISA (e2m1, cvt.rn.satfinite) and of cuBLAS's 128x4 block-scaling layout.

All functions raise before anything is written: TypeError for a type or dtype, ValueError for a shape, stride, device or
number.
"""

from typing import Any

import torch

from .host.checks import (
    FP32_LEAST,
    FP32_MOST,
    check_apart,
    check_device,
    check_integer,
    check_one_of,
    check_shape,
    check_strided,
    listed,
)
from .host.scalars import integer, scale_of

BLOCK = 16  # elements that share a scale factor
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of codes 0..7; bit 3 is the sign
E4M3_MAX = 448.0
SCALE_TILE = 128, 4  # rows, columns
SCALE_TYPES = (torch.float8_e4m3fn, torch.uint8)  # dtypes of scale factors: e4m3, or its bytes
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # dtypes that can be quantised


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


class FP4Tensor:
    """Packed NVFP4 data with its swizzled scale factors.

    data: uint8 (rows, ..., D / 2). scale: e4m3, or its bytes in uint8, (M, K) in the 128x4 swizzle, M a multiple of
    128, K = round_up(elements of a row / 16, 4); the attribute is e4m3. The factors of row r of data are in row
    scale_start_index + r. original_shape: the unpacked shape. Raises TypeError if an argument is not a tensor, int or
    tuple, ValueError if it does not fit. FlashInfer's class.

    >>> scale = torch.zeros(128, 8, dtype=torch.float8_e4m3fn)
    >>> FP4Tensor(torch.zeros(2, 64, dtype=torch.uint8), scale, original_shape=(2, 128)).shape
    torch.Size([2, 64])
    """

    dtype = "nvfp4"

    def __init__(
        self, data: torch.Tensor, scale: torch.Tensor, scale_start_index: int = 0,
        original_shape: tuple[int, ...] | None = None,
    ):  # fmt: skip
        check_strided("data", data)
        check_strided("scale", scale, 2)
        if data.dtype != torch.uint8:
            raise ValueError(f"data: dtype {data.dtype}, must be torch.uint8")
        if scale.dtype not in SCALE_TYPES:
            raise ValueError(f"scale: dtype {scale.dtype}, must be one of {listed(SCALE_TYPES)}")
        if data.ndim < 2:
            raise ValueError(f"data: shape {tuple(data.shape)}, must have at least 2 dimensions")
        check_device("scale", scale, data.device, "that of data")
        if not scale.is_contiguous():
            raise ValueError(f"scale: strides {scale.stride()}, must be contiguous")
        if scale.shape[0] % SCALE_TILE[0]:
            raise ValueError(f"scale: {scale.shape[0]} rows, must be a multiple of {SCALE_TILE[0]}")
        columns = _scale_columns(data.shape[1:].numel() * 2)
        if scale.shape[1] != columns:
            why = f"one per {BLOCK} elements of a row, rounded up to {SCALE_TILE[1]}"
            raise ValueError(f"scale: {scale.shape[1]} columns, must be {columns} ({why})")
        scale_start_index = check_integer("scale_start_index", integer(scale_start_index))
        if not 0 <= scale_start_index < scale.shape[0]:
            raise ValueError(f"scale_start_index: {scale_start_index}, must be in [0, {scale.shape[0]})")
        if scale_start_index + data.shape[0] > scale.shape[0]:
            most = f"the {data.shape[0]} rows of data from it must be within the {scale.shape[0]} rows of scale"
            raise ValueError(f"scale_start_index: {scale_start_index}, {most}")
        if original_shape is not None:
            _sizes("original_shape", original_shape)
            packed = (*original_shape[:-1], -(-original_shape[-1] // 2))
            if tuple(data.shape) != packed:
                shape = tuple(original_shape)
                raise ValueError(f"original_shape: {shape}, packs to {packed}, must be data's {tuple(data.shape)}")
        self.data = data
        self.scale = as_e4m3(scale)
        self.scale_start_index = scale_start_index
        self.original_shape = original_shape

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the packed data."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device


def _scale_columns(elements: int) -> int:
    """Return the number of columns of a swizzled scale tensor for rows of `elements` elements."""
    return round_up(-(-elements // BLOCK), SCALE_TILE[1])


def _sizes(name: str, value: Any) -> None:
    """Check that value is a shape of at least two dimensions."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name}: {value!r}, must be a tuple of int")
    for size in value:
        check_integer(f"{name}: {tuple(value)}: size", size, 0)
    if len(value) < 2:
        raise ValueError(f"{name}: {tuple(value)}, must have at least 2 dimensions")


def _floats(name: str, x: Any) -> None:
    check_one_of(f"{name}: dtype", check_strided(name, x).dtype, FLOATS)


def _bytes(name: str, x: Any, multiple: int = 1) -> None:
    """Check that x is uint8, with a last dimension that is a multiple of `multiple`."""
    check_one_of(f"{name}: dtype", check_strided(name, x).dtype, (torch.uint8,))
    _check_multiple(name, x, multiple)


def _check_multiple(name: str, x: torch.Tensor, multiple: int) -> None:
    if not x.ndim:
        raise ValueError(f"{name}: shape (), must have at least 1 dimension")
    if x.shape[-1] % multiple:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, the last dimension must be a multiple of {multiple}")


def as_e4m3(scales: Any) -> Any:
    """Return scale factors as e4m3: a view of uint8, in which quantisers return the same bytes.

    Any other value is returned unchanged, for the checks.
    """
    if isinstance(scales, torch.Tensor) and scales.dtype == torch.uint8 and scales.layout is torch.strided:
        return scales.view(torch.float8_e4m3fn)
    return scales


def _check_scales(name: str, scales: Any, ndim: int | None = None) -> torch.Tensor:
    """Return scale factors as e4m3, after a check of their dtype."""
    check_one_of(f"{name}: dtype", check_strided(name, scales, ndim).dtype, SCALE_TYPES)
    return as_e4m3(scales)


def _swizzled(name: str, scales: Any, rows: int, columns: int, start: Any) -> None:
    """Check that a swizzled tensor has room for linear scales (rows, columns) from row `start` on."""
    _check_scales(name, scales, 2)
    if not scales.is_contiguous():
        raise ValueError(f"{name}: strides {scales.stride()}, must be contiguous")
    if scales.shape[0] % SCALE_TILE[0] or scales.shape[1] != round_up(columns, SCALE_TILE[1]):
        needs = f"{round_up(columns, SCALE_TILE[1])} columns and a multiple of {SCALE_TILE[0]} rows"
        raise ValueError(f"{name}: shape {tuple(scales.shape)}, must have {needs}")
    if check_integer("start", start, 0) + rows > scales.shape[0]:
        raise ValueError(f"start: {start}, the {rows} rows from it must be within the {scales.shape[0]} rows of {name}")


def _global(value: Any, other_name: str, other: torch.Tensor) -> Any:
    """Return a checked global scale as a number or a tensor without dimensions. other: the tensor with its device."""
    if value.__class__ is float and FP32_LEAST <= value <= FP32_MOST:
        return value
    number, tensor = scale_of("global_scale", value, other.device, f"that of {other_name}", positive=True)
    return number if tensor is None else tensor.reshape(())


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Convert to e4m3: round to nearest even, saturate at +-448 (torch's own conversion gives NaN there), keep NaN."""
    _floats("x", x)
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the codes 0..15 (uint8) of fp32 x: round to nearest, ties to the even code, saturate at 6.

    NaN becomes +6.
    """
    _floats("x", x)
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for closed, bound in ((True, 0.75), (False, 1.25), (True, 1.75), (False, 2.5), (True, 3.5), (False, 5.0)):
        code += (a >= bound) if closed else (a > bound)  # a tie goes to the even code: up if the lower code is odd
    code = torch.where(x.isnan(), 7, code)
    return code | ((x.signbit() & ~x.isnan()).to(torch.uint8) << 3)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack (..., D) codes into (..., D / 2) bytes."""
    _bytes("codes", codes, 2)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Unpack (..., D / 2) bytes into (..., D) codes."""
    _bytes("data", data)
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def quantizable(x: Any, global_scale: Any) -> Any:
    """Return the global scale as a number or a tensor without dimensions, after a check of both arguments."""
    _floats("x", x)
    _check_multiple("x", x, BLOCK)
    return _global(global_scale, "x", x)


@torch.no_grad()
def nvfp4_quantize(x: torch.Tensor, global_scale: float | torch.Tensor = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Do in torch operations what `cache_write.quantize.nvfp4_quantize` does by a kernel where one serves x."""
    global_scale = quantizable(x, global_scale)
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scales = e4m3(blocks.abs().amax(-1) * global_scale / GRID[-1])
    sf = scales.float().unsqueeze(-1)
    codes = torch.where(sf == 0, 0, e2m1(blocks * global_scale / sf))
    return pack(codes.flatten(-2)), scales


def dequantizable(data: Any, scales: Any, global_scale: Any) -> tuple[torch.Tensor, Any]:
    """Return scale factors as e4m3 and the global scale as in `quantizable`, after a check of all three arguments."""
    _bytes("data", data, BLOCK // 2)
    scales = _check_scales("scales", scales)
    check_shape("scales", scales, (*data.shape[:-1], data.shape[-1] * 2 // BLOCK), f"one per {BLOCK} elements of data")
    check_device("scales", scales, data.device, "that of data")
    return scales, _global(global_scale, "data", data)


@torch.no_grad()
def nvfp4_dequantize(
    data: torch.Tensor, scales: torch.Tensor, global_scale: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Do in torch operations what `cache_write.quantize.nvfp4_dequantize` does by a kernel on CUDA."""
    scales, global_scale = dequantizable(data, scales, global_scale)
    grid = torch.tensor(GRID + tuple(-x for x in GRID), dtype=torch.float32, device=data.device)
    values = grid[unpack(data).long()].unflatten(-1, (-1, BLOCK))
    return (values * scales.float().unsqueeze(-1) / global_scale).flatten(-2)


def swizzled_offset(row: Any, col: Any, columns: int) -> Any:
    """Return the offset of scale (row, col) in a swizzled tensor with `columns` columns, a multiple of 4.

    row and col are ints or integer tensors.
    """
    if check_integer("columns", columns, 0) % SCALE_TILE[1]:
        raise ValueError(f"columns: {columns}, must be a multiple of {SCALE_TILE[1]}")
    for name, value in (("row", row), ("col", col)):
        if not isinstance(value, torch.Tensor):
            check_integer(name, value, 0)
        else:
            check_one_of(f"{name}: dtype", check_strided(name, value).dtype, (torch.int64, torch.int32))
    tile = row // 128 * (columns // 4) + col // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


def _offsets(rows: int, start: int, columns: int, padded: int, device: torch.device) -> torch.Tensor:
    row = torch.arange(start, start + rows, device=device)[:, None]
    return swizzled_offset(row, torch.arange(columns, device=device)[None, :], padded)


def write_scales(scales: torch.Tensor, into: torch.Tensor, start: int = 0) -> None:
    """Write linear scales (rows, K) to rows `start` on of the swizzled contiguous `into`; the rest keeps its bytes."""
    _check_scales("scales", scales, 2)
    _swizzled("into", into, scales.shape[0], scales.shape[1], start)
    check_device("into", into, scales.device, "that of scales")
    check_apart({"into": into}, {"scales": scales})
    offsets = _offsets(len(scales), start, scales.shape[1], into.shape[1], scales.device)
    into.view(torch.uint8).view(-1)[offsets.flatten()] = scales.view(torch.uint8).flatten()


def read_scales(swizzled: torch.Tensor, rows: int, columns: int, start: int = 0) -> torch.Tensor:
    """Return linear scales (rows, columns) from rows `start` on of a swizzled contiguous tensor."""
    check_integer("rows", rows, 0)
    check_integer("columns", columns, 0)
    _swizzled("swizzled", swizzled, rows, columns, start)
    offsets = _offsets(rows, start, columns, swizzled.shape[1], swizzled.device)
    return swizzled.view(torch.uint8).view(-1)[offsets].view(torch.float8_e4m3fn)


def empty(shape: tuple[int, ...], device: torch.device) -> FP4Tensor:
    """Return an FP4Tensor for values of `shape` (rows, ..., D), with at least one tile of scale rows.

    Data and scale factors are uninitialised, but a row's columns of factors that stand for no element are 0: a GEMM
    multiplies whole tiles by them, and NaN there would reach the results of the row.
    """
    _sizes("shape", shape)
    if not isinstance(device, torch.device):
        raise TypeError(f"device: {device!r}, must be a torch.device")
    width = 1
    for extent in shape[1:]:
        width *= extent
    if shape[-1] % 2 or width % BLOCK:
        need = f"a row must have a multiple of {BLOCK} elements, and the last dimension must be even"
        raise ValueError(f"shape: {tuple(shape)}, {need}")
    rows = max(SCALE_TILE[0], round_up(shape[0], SCALE_TILE[0]))
    data = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=device)
    columns = _scale_columns(width)
    new = torch.empty if columns * BLOCK == width else torch.zeros
    return FP4Tensor(data, new(rows, columns, dtype=torch.float8_e4m3fn, device=device), 0, tuple(shape))


def _packed(name: str, value: Any) -> None:
    if not isinstance(value, FP4Tensor):
        raise TypeError(f"{name}: {type(value).__name__}, must be an FP4Tensor")


def store(x: torch.Tensor, out: FP4Tensor, global_scale: float) -> None:
    """Quantise x (rows, ..., D) into `out`, in blocks of 16 of a row's flattened elements."""
    _floats("x", x)
    _packed("out", out)
    check_shape("x", x, (*out.shape[:-1], out.shape[-1] * 2), "the unpacked shape of out")
    check_device("x", x, out.device, "that of out")
    data, scales = nvfp4_quantize(x.flatten(1), global_scale)
    out.data.copy_(data.view(out.data.shape))
    write_scales(scales, out.scale, out.scale_start_index)


def load(t: FP4Tensor, global_scale: float) -> torch.Tensor:
    """Return the fp32 values of `t`, shape (rows, ..., D)."""
    _packed("t", t)
    data = t.data.flatten(1)
    scales = read_scales(t.scale, data.shape[0], data.shape[1] * 2 // BLOCK, t.scale_start_index)
    return nvfp4_dequantize(data, scales, global_scale).view(*t.data.shape[:-1], t.data.shape[-1] * 2)


def deinterleave_v_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return linear V scales (..., P, S) from the layout that interleaves 4 tokens.

    In that layout, scale s of token t is stored at t // 4 * 4S + s * 4 + t % 4.
    """
    check_strided("scales", scales)
    if scales.ndim < 2 or scales.shape[-2] % 4:
        raise ValueError(f"scales: shape {tuple(scales.shape)}, the second-to-last dimension must be a multiple of 4")
    tokens, columns = scales.shape[-2:]
    stored = scales.reshape(*scales.shape[:-2], tokens // 4, columns, 4)
    return stored.transpose(-1, -2).reshape(scales.shape)
