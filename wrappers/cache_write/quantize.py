"""Quantisation to NVFP4 by the kernels that write caches: their rows go to a tensor instead of a cache."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import ROWS, fields
from cute_kernels.cache_write.request import CacheWriteRequest

from .. import fp4, machine
from ..plain import traced
from .plan import DTYPES, groups

ROWS_PER_TOKEN = 8  # of a matrix: groups of lanes work on several rows each, if there are many


class QuantizePlan(NamedTuple):
    """A compiled kernel and its arguments, except x and the outputs. at: the positions of these in `flat`, `k_scale`
    and `k_scale_ptr` too."""

    fn: Callable[..., Any]
    flat: list[Any]
    at: dict[str, int]
    shape: tuple[int, int, int]  # tokens, heads, elements of a row
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
    here = machine.current
    key = "nvfp4_quantize", x.get_device(), x.dtype, x.shape, x.is_contiguous() or x.stride()
    plan = here.plans.get(key)
    if plan is None:
        device_info = here.device_info(x.device)
        if device_info is None:
            return fp4.nvfp4_quantize(x, scale)
        plan = plan_for(x, device_info)
        here.keep(key, plan)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):
            return nvfp4_quantize(x, global_scale)
    return launch(plan, x.detach() if x.requires_grad else x, scale)


def launch(plan: QuantizePlan, x: torch.Tensor, scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a plan on a tensor. scale: a number or a tensor without dimensions."""
    tokens, heads, dim = plan.shape
    data = torch.empty(*x.shape[:-1], dim // 2, dtype=torch.uint8, device=x.device)
    factors = torch.empty(*x.shape[:-1], dim // fp4.BLOCK, dtype=torch.uint8, device=x.device)
    flat, at = plan.flat.copy(), plan.at
    k_cache, k_sf = data.view(1, tokens, heads, -1), factors.view(1, tokens, heads, -1)
    rows = x.reshape(plan.shape)
    flat[at["k"]] = rows if rows.stride(2) == 1 else rows.contiguous()
    flat[at["k_cache"]] = flat[at["v_cache"]] = k_cache
    flat[at["k_sf"]] = flat[at["v_sf"]] = k_sf
    if isinstance(scale, torch.Tensor):
        flat[at["k_scale_ptr"]] = scale.reshape(1)
    else:
        flat[at["k_scale"]] = float(scale)
    plan.fn(*flat)
    return data, factors.view(torch.float8_e4m3fn)


def plan_for(x: torch.Tensor, device_info: tuple[str, int]) -> QuantizePlan:
    """Return the plan of a tensor for a device's (architecture, SM count).

    Raises NotImplementedError if no kernel serves it.
    """
    dim, count = x.shape[-1], x.numel() // x.shape[-1]
    heads = x.shape[-2] if x.ndim > 2 else ROWS_PER_TOKEN
    shape = (count // heads, heads, dim) if count % heads == 0 else (count, 1, dim)
    try:
        op, spec = dispatch.select(CacheWriteRequest(DTYPES[x.dtype], "nvfp4", False, dim), device_info[0])
    except NotImplementedError as error:
        raise NotImplementedError(f"x: {error}") from None
    lanes, given = rows.lanes(dim, spec.elements), machine.current.argument

    def empty(dtype: torch.dtype, *more: int) -> Any:
        return given(torch.empty(0, *more, dtype=dtype, device=x.device))

    none, scales = empty(torch.int32), empty(torch.float32)
    values = dict.fromkeys(fields(spec), none) | dict(
        nhd=1, places=ROWS, wide=0, page_table=empty(torch.int32, 1), lanes_log2=lanes.bit_length() - 1,
        v=empty(x.dtype, 0, dim), k_groups=groups(shape[0], shape[1], lanes), v_groups=0, enable_pdl=1,
        k_scale=1.0, v_scale=1.0,
        k_scale_ptr=scales, v_scale_ptr=scales, v_sf_interleaved=0, scales_multiply=1,
    )  # fmt: skip
    return QuantizePlan(
        fn=machine.current.kernel(op, spec, device_info[0]),
        flat=list(values.values()),
        at={name: i for i, name in enumerate(values)},
        shape=shape,
        device=x.device,
        single_device=machine.current.device_count() == 1,
    )
