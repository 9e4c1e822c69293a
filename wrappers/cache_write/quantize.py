"""Quantise to NVFP4 and back, by kernels of the family that writes caches.

Those that quantise rows of a cache write to a tensor instead of a cache; one kernel dequantises.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import ROWS, fields
from cute_kernels.cache_write.request import CacheWriteRequest

from .. import fp4
from ..host import machine
from ..host.plain import traced
from .plan import DTYPES, groups

MOST_BLOCKS = 2**31 - 1  # that the kernel dequantises: it counts them in Int32
ROWS_PER_TOKEN = 8  # of a matrix: groups of lanes work on several rows each, if there are many


class QuantizePlan(NamedTuple):
    """A compiled kernel and its arguments, except those that `launch` gets. at: the position of each in `flat`."""

    fn: Callable[..., Any]
    flat: list[Any]
    at: dict[str, int]
    shape: tuple[int, ...]  # of rows that are quantised: tokens, heads, elements of a row
    device: torch.device
    single_device: bool


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
    scale = fp4.quantizable(x, global_scale)
    if x.dtype not in DTYPES or not x.numel() or traced(x):
        return fp4.nvfp4_quantize(x, scale)
    key = "nvfp4_quantize", x.get_device(), x.dtype, x.shape, x.is_contiguous() or x.stride()
    plan = machine.current.plans.get(key) or plan_for(key, x, quantize_plan)
    if plan is None:
        return fp4.nvfp4_quantize(x, scale)
    tokens, heads, dim = plan.shape
    rows = (x.detach() if x.requires_grad else x).reshape(plan.shape)
    data = torch.empty(*x.shape[:-1], dim // 2, dtype=torch.uint8, device=x.device)
    factors = torch.empty(*x.shape[:-1], dim // fp4.BLOCK, dtype=torch.uint8, device=x.device)
    k_cache, k_sf = data.view(1, tokens, heads, -1), factors.view(1, tokens, heads, -1)
    k = rows if rows.stride(2) == 1 else rows.contiguous()
    launch(plan, scale, k=k, k_cache=k_cache, v_cache=k_cache, k_sf=k_sf, v_sf=k_sf)
    return data, factors.view(torch.float8_e4m3fn)


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
    scales, scale = fp4.dequantizable(data, scales, global_scale)
    if not data.numel() or traced(data) or traced(scales):
        return fp4.nvfp4_dequantize(data, scales, scale)
    key = "nvfp4_dequantize", data.get_device()
    plan = machine.current.plans.get(key) or plan_for(key, data, dequantize_plan)
    if plan is None:
        return fp4.nvfp4_dequantize(data, scales, scale)
    if scales.numel() > MOST_BLOCKS:
        raise NotImplementedError(f"scales: {scales.numel()} scale factors, the kernel takes at most {MOST_BLOCKS}")
    sf = (scales.detach() if scales.requires_grad else scales).contiguous().view(torch.uint8)
    out = torch.empty(*data.shape[:-1], 2 * data.shape[-1], dtype=torch.float32, device=data.device)
    codes, values = data.contiguous().view(-1, fp4.BLOCK // 2), out.view(-1, fp4.BLOCK)
    launch(plan, scale, codes=codes, sf=sf.view(-1), values=values)
    return out


def launch(plan: QuantizePlan, scale: Any, **given: torch.Tensor) -> None:
    """Run a plan. scale: a number or a tensor without dimensions. given: arguments of the kernel."""
    flat, at = plan.flat.copy(), plan.at
    for name, tensor in given.items():
        flat[at[name]] = tensor
    if isinstance(scale, torch.Tensor):
        flat[at["k_scale_ptr"]] = scale.detach().reshape(1)
    else:
        flat[at["k_scale"]] = float(scale)
    if plan.single_device or machine.current.current_device() == plan.device.index:
        plan.fn(*flat)
    else:
        with machine.current.on(plan.device):
            plan.fn(*flat)


def plan_for(key: tuple[Any, ...], x: torch.Tensor, make: Callable[..., QuantizePlan]) -> QuantizePlan | None:
    """Make the plan of a tensor and keep it under `key`; return None if its device has no kernels."""
    device_info = machine.current.device_info(x.device)
    if device_info is None:
        return None
    plan = make(x, device_info[0])
    machine.current.keep(key, plan)
    return plan


def quantize_plan(x: torch.Tensor, arch: str) -> QuantizePlan:
    """Return the plan of a tensor that is quantised. Raises NotImplementedError if no kernel serves it."""
    dim, count = x.shape[-1], x.numel() // x.shape[-1]
    heads = x.shape[-2] if x.ndim > 2 else ROWS_PER_TOKEN
    shape = (count // heads, heads, dim) if count % heads == 0 else (count, 1, dim)
    try:
        op, spec = dispatch.select(CacheWriteRequest(DTYPES[x.dtype], "nvfp4", False, dim), arch)
    except NotImplementedError as error:
        raise NotImplementedError(f"x: {error}") from None
    lanes, empty = rows.lanes(dim, spec.elements), partial(machine.current.empty, x.device)
    none, scales = empty(torch.int32), empty(torch.float32)
    values = dict.fromkeys(fields(spec), none) | dict(
        nhd=1, places=ROWS, wide=0, page_table=empty(torch.int32, 1), lanes_log2=lanes.bit_length() - 1,
        v=empty(x.dtype, 0, dim), k_groups=groups(shape[0], shape[1], lanes), v_groups=0, enable_pdl=1,
        k_scale=1.0, v_scale=1.0,
        k_scale_ptr=scales, v_scale_ptr=scales, v_sf_interleaved=0, scales_multiply=1,
    )  # fmt: skip
    return made(op, spec, arch, values, x.device, shape)


def dequantize_plan(data: torch.Tensor, arch: str) -> QuantizePlan:
    """Return the plan of all codes on a device. Raises NotImplementedError if no kernel serves them."""
    try:
        op, spec = dispatch.select(CacheWriteRequest("nvfp4", "fp32"), arch)
    except NotImplementedError as error:
        raise NotImplementedError(f"data: {error}") from None
    given = dict(enable_pdl=1, k_scale=1.0, k_scale_ptr=machine.current.empty(data.device, torch.float32))
    return made(op, spec, arch, dict.fromkeys(fields(spec)) | given, data.device)


def made(
    op: str, spec: Any, arch: str, values: dict[str, Any], device: torch.device, shape: tuple[int, ...] = ()
) -> QuantizePlan:
    """Return the plan of a kernel. values: its arguments by name, in order."""
    return QuantizePlan(
        fn=machine.current.kernel(op, spec, arch),
        flat=list(values.values()),
        at={name: i for i, name in enumerate(values)},
        shape=shape,
        device=device,
        single_device=machine.current.device_count() == 1,
    )
