"""Quantise to NVFP4 and back, by kernels of the family that writes caches.

Those that quantise rows of a cache write to a tensor instead of a cache; one kernel dequantises.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import ROWS, CacheWriteArgs, fields
from cute_kernels.cache_write.request import CacheWriteRequest

from .. import fp4
from ..host import machine
from ..host.launch import KernelFamily, run, select
from ..host.plain import traced
from .plan import DTYPES, RowsPlan, arranged, groups

MOST_BLOCKS = 2**31 - 1  # that the kernel dequantises: it counts them in Int32
ROWS_PER_TOKEN = 8  # of a matrix: groups of lanes work on several rows each, if there are many


class QuantizeCall(NamedTuple):
    """A call of `nvfp4_quantize` by a kernel. scale: a number, or a tensor without dimensions."""

    x: torch.Tensor
    scale: Any


class DequantizeCall(NamedTuple):
    """A call of `nvfp4_dequantize` by a kernel."""

    data: torch.Tensor
    scales: torch.Tensor
    scale: Any


@dataclass(slots=True, eq=False, kw_only=True)
class QuantizePlan(RowsPlan):
    """A plan of calls that quantise a tensor."""

    shape: tuple[int, int, int]  # tokens, heads, elements of a row


def nvfp4_quantize(x: torch.Tensor, global_scale: float | torch.Tensor = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x (..., D) to packed NVFP4: data uint8 (..., D / 2) and linear scales e4m3 (..., D / 16).

    For each block of 16 elements, sf = e4m3(global_scale * amax / 6) and code = e2m1(x * global_scale / sf), or 0 if sf
    is 0. One kernel does it for fp16 and bf16 on CUDA; torch operations for other types.

    x: fp16, bf16, fp32 or fp64, D a multiple of 16. global_scale: the forward scale, at most 448 * 6 / amax(x) to avoid
    saturation; a float or an fp32 tensor of one element, on x's device or on the host, where it counts as a float.
    Raises TypeError for a dtype, ValueError for a shape, device or scale. Formats: NVIDIA's PTX ISA.

    >>> data, scales = nvfp4_quantize(torch.arange(16.0))
    >>> nvfp4_dequantize(data, scales).tolist()[:8]  # 15 / 6 is a scale factor
    [0.0, 1.25, 2.5, 2.5, 3.75, 5.0, 5.0, 7.5]
    """
    call = quantize_call(x, global_scale)
    if x.dtype not in DTYPES or not x.numel() or traced(x):
        return fp4.nvfp4_quantize(*call)
    return run(QUANTIZE, call._replace(x=x.detach()) if x.requires_grad else call)


def quantize_call(x: Any, global_scale: Any) -> QuantizeCall:
    """Return the call of `nvfp4_quantize`, after a check."""
    return QuantizeCall(x, fp4.quantizable(x, global_scale))


def nvfp4_dequantize(
    data: torch.Tensor, scales: torch.Tensor, global_scale: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Return the fp32 values (..., D) of packed NVFP4: code * sf / global_scale, rounded once.

    One kernel does it on CUDA. If data or scales are not contiguous, they are copied first.

    data: uint8 (..., D / 2). scales: e4m3, or its bytes in uint8, (..., D / 16), linear. global_scale: as in
    `nvfp4_quantize`. Raises TypeError for a dtype, ValueError for a shape, device or scale, NotImplementedError for
    2^31 or more scale factors on CUDA. Formats: NVIDIA's PTX ISA.

    >>> nvfp4_dequantize(torch.tensor([0x72] * 8, dtype=torch.uint8), torch.ones(1).to(torch.float8_e4m3fn))[:2]
    tensor([1., 6.])
    """
    call = dequantize_call(data, scales, global_scale)
    if not data.numel() or traced(data) or traced(call.scales):
        return fp4.nvfp4_dequantize(*call)
    return run(DEQUANTIZE, call._replace(scales=call.scales.detach()) if call.scales.requires_grad else call)


def dequantize_call(data: Any, scales: Any, global_scale: Any) -> DequantizeCall:
    """Return the call of `nvfp4_dequantize`, after a check."""
    return DequantizeCall(data, *fp4.dequantizable(data, scales, global_scale))


def request_of(call: QuantizeCall | DequantizeCall) -> CacheWriteRequest:
    """Return the request for the kernel of a call; the dtype of its x is one of `DTYPES`."""
    if isinstance(call, DequantizeCall):
        return CacheWriteRequest("nvfp4", "fp32")
    return CacheWriteRequest(DTYPES[call.x.dtype], "nvfp4", False, call.x.shape[-1])


def quantize_plan(call: QuantizeCall, device_info: tuple[str, int]) -> QuantizePlan:
    """Return the plan of a tensor that is quantised. Raises NotImplementedError if no kernel serves it."""
    x, dim = call.x, call.x.shape[-1]
    count, heads = x.numel() // dim, x.shape[-2] if x.ndim > 2 else ROWS_PER_TOKEN
    shape = (count // heads, heads, dim) if count % heads == 0 else (count, 1, dim)
    fn, spec = select(dispatch, request_of(call), device_info[0], "x")
    lanes, empty = rows.lanes(dim, spec.elements), partial(machine.current.empty, x.device)
    none, scales = empty(torch.int32), empty(torch.float32)
    values = dict.fromkeys(fields(spec), none) | dict(
        nhd=1, places=ROWS, wide=0, page_table=empty(torch.int32, 1), lanes_log2=lanes.bit_length() - 1,
        v=empty(x.dtype, 0, dim), k_groups=groups(shape[0], shape[1], lanes), v_groups=0, enable_pdl=1,
        k_scale=1.0, v_scale=1.0,
        k_scale_ptr=scales, v_scale_ptr=scales, v_sf_interleaved=0, scales_multiply=1,
    )  # fmt: skip
    flat, at = arranged(spec, values)
    return QuantizePlan(fn=fn, flat=flat, at=at, shape=shape)


def bind_quantize(plan: QuantizePlan, call: QuantizeCall) -> tuple[list[Any], tuple[torch.Tensor, torch.Tensor]]:
    """Return the arguments of a launch, and the packed values and their scale factors."""
    x, flat, at, (tokens, heads, dim) = call.x, plan.flat.copy(), plan.at, plan.shape
    k = x.reshape(plan.shape)
    data = torch.empty(*x.shape[:-1], dim // 2, dtype=torch.uint8, device=x.device)
    factors = torch.empty(*x.shape[:-1], dim // fp4.BLOCK, dtype=torch.uint8, device=x.device)
    flat[at.k] = k if k.stride(2) == 1 else k.contiguous()
    flat[at.k_cache] = flat[at.v_cache] = data.view(1, tokens, heads, -1)
    flat[at.k_sf] = flat[at.v_sf] = factors.view(1, tokens, heads, -1)
    put_scale(flat, at, call.scale)
    return flat, (data, factors.view(torch.float8_e4m3fn))


def dequantize_plan(call: DequantizeCall, device_info: tuple[str, int]) -> RowsPlan:
    """Return the plan of all codes on a device. Raises NotImplementedError if no kernel serves them."""
    fn, spec = select(dispatch, request_of(call), device_info[0], "data")
    empty = machine.current.empty(call.data.device, torch.float32)
    values = dict.fromkeys(fields(spec)) | dict(enable_pdl=1, k_scale=1.0, k_scale_ptr=empty)
    flat, at = arranged(spec, values)
    return RowsPlan(fn=fn, flat=flat, at=at)


def bind_dequantize(plan: RowsPlan, call: DequantizeCall) -> tuple[list[Any], torch.Tensor]:
    """Return the arguments of a launch, and the values."""
    (data, scales, scale), flat, at = call, plan.flat.copy(), plan.at
    if scales.numel() > MOST_BLOCKS:
        raise NotImplementedError(f"scales: {scales.numel()} scale factors, the kernel takes at most {MOST_BLOCKS}")
    out = torch.empty(*data.shape[:-1], 2 * data.shape[-1], dtype=torch.float32, device=data.device)
    flat[at.codes] = data.contiguous().view(-1, fp4.BLOCK // 2)
    flat[at.sf] = scales.contiguous().view(torch.uint8).view(-1)
    flat[at.values] = out.view(-1, fp4.BLOCK)
    put_scale(flat, at, scale)
    return flat, out


def put_scale(flat: list[Any], at: CacheWriteArgs, scale: Any) -> None:
    """Put the global scale in its place."""
    if isinstance(scale, torch.Tensor):
        flat[at.k_scale_ptr] = scale.detach().reshape(1)
    else:
        flat[at.k_scale] = float(scale)


QUANTIZE = KernelFamily(
    key=lambda call: (
        "nvfp4_quantize",
        call.x.get_device(),
        call.x.dtype,
        call.x.shape,
        call.x.is_contiguous() or call.x.stride(),
    ),  # fmt: skip
    inputs=lambda call: call[:1],
    validate=lambda call: fp4.quantizable(*call),
    plan=quantize_plan,
    bind=bind_quantize,
    reference=lambda call: fp4.nvfp4_quantize(*call),
)
DEQUANTIZE = KernelFamily(
    key=lambda call: ("nvfp4_dequantize", call.data.get_device()),
    inputs=lambda call: call[:1],
    validate=lambda call: fp4.dequantizable(*call),
    plan=dequantize_plan,
    bind=bind_dequantize,
    reference=lambda call: fp4.nvfp4_dequantize(*call),
)
