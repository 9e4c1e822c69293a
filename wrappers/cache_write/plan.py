"""Run a call that writes rows: look up its plan and launch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import INDICES, PAGES, SLOTS, CacheWriteArgs, fields
from cute_kernels.cache_write.request import CacheWriteRequest
from cute_kernels.cache_write.spec import CacheWriteSpec

from .. import machine, overlap, reference
from .call import CacheWriteCall
from .checks import block_scaled, reason, validate

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
THREADS = 1 << 19  # about as many threads as two GPUs hold: with fewer, each group has one row
_K, _V, _K_CACHE, _V_CACHE = (CacheWriteArgs._fields.index(name) for name in ("k", "v", "k_cache", "v_cache"))
_uint8, _int32, _int64 = torch.uint8, torch.int32, torch.int64


@dataclass(slots=True, eq=False)
class CacheWritePlan:
    """A compiled kernel and all that a launch needs beyond the call's own tensors."""

    fn: Callable[..., Any]  # the compiled kernel, or the reference
    flat: list[Any]  # its arguments; optional ones are empty, in the form that `fn` converts fastest
    at: CacheWriteArgs  # position of each argument in `flat`
    device: torch.device
    single_device: bool  # it is the only device of the process
    runs: bool  # there are rows, and places for them
    as_bytes: bool  # rows and caches of one byte are passed as uint8
    wide: frozenset[str]  # index tensors of int64
    k_bytes: int  # from the first to the last, also below
    v_bytes: int
    k_cache_bytes: int
    v_cache_bytes: int
    apart: int  # bytes from K's cache to V's in the call that was validated


def run(call: CacheWriteCall) -> None:
    """Write the rows of a call."""
    (
        function, k, v, k_cache, v_cache, places, slots, batch_indices, positions, page_table, kv_indptr, last,
        k_scale, v_scale, k_scale_ptr, v_scale_ptr, k_sf, v_sf, interleaved,
    ) = call  # fmt: skip
    here = machine.current
    try:  # the key omits what compiled code checks itself: ranks, last strides, devices
        if places == PAGES:
            where: Any = (
                batch_indices.dtype, batch_indices.shape, positions.dtype, positions.shape, page_table.dtype,
                page_table.shape, kv_indptr.dtype, kv_indptr.shape, last.dtype, last.shape,
                last.device, last.stride(),  # no kernel sees it
            )  # fmt: skip
        else:
            where = (slots.dtype, slots.shape)
        scaled = None if k_sf is None else (
            k_sf.dtype, k_sf.shape, k_sf.stride(), v_sf.dtype, v_sf.shape, v_sf.stride(), interleaved,
            k_scale_ptr is None or k_scale_ptr.shape, v_scale_ptr is None or v_scale_ptr.shape,
        )  # fmt: skip
        key = (
            function, k.get_device(), k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride(), k_cache.dtype,
            k_cache.shape, k_cache.stride(), v_cache.dtype, v_cache.shape, v_cache.stride(), where, scaled,
        )  # fmt: skip
        plan = here.plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        why = reason(call)
        if why is None:
            raise
        raise why from None
    if plan is None:
        validate(call)
        device_info = here.device_info(k.device)
        plan = plan_for(call, device_info)
        if device_info is not None:  # the reference checks nothing: its calls are validated each time
            here.keep(key, plan)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):
            return run(call)
    if not plan.runs:
        return None
    flat, at = plan.flat.copy(), plan.at
    try:
        at_k, at_v, at_k_cache, at_v_cache = k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        apart = at_v_cache - at_k_cache
        if (-plan.k_bytes < at_k - at_k_cache < plan.k_cache_bytes
                or -plan.v_bytes < at_v - at_v_cache < plan.v_cache_bytes
                or -plan.v_cache_bytes < apart < plan.k_cache_bytes and apart != plan.apart):  # fmt: skip
            validate(call)  # rare: memory may be shared
        if plan.as_bytes:
            k, v, k_cache, v_cache = k.view(_uint8), v.view(_uint8), k_cache.view(_uint8), v_cache.view(_uint8)
        flat[_K], flat[_V], flat[_K_CACHE], flat[_V_CACHE] = k, v, k_cache, v_cache
        if places == SLOTS:
            flat[at.slots] = slots.view(_int32) if slots.dtype == _int64 else slots
        else:
            if plan.wide:
                batch_indices, positions, page_table, kv_indptr = (
                    t.view(_int32) if t.dtype == _int64 else t
                    for t in (batch_indices, positions, page_table, kv_indptr)
                )
            flat[at.batch_indices], flat[at.positions] = batch_indices, positions
            flat[at.page_table], flat[at.kv_indptr] = page_table.unsqueeze(0), kv_indptr
        if k_sf is not None:
            flat[at.k_scale], flat[at.v_scale] = k_scale, v_scale
            if k_scale_ptr is not None:
                flat[at.k_scale_ptr] = k_scale_ptr
            if v_scale_ptr is not None:
                flat[at.v_scale_ptr] = v_scale_ptr
            flat[at.k_sf], flat[at.v_sf] = k_sf.view(_uint8), v_sf.view(_uint8)
        plan.fn(*flat)
    except Exception:
        why = reason(call)  # names the argument that was refused
        if why is None:
            raise
        raise why from None


def spec_of(call: CacheWriteCall) -> CacheWriteSpec:
    """Return the spec of a valid call."""
    dtype = DTYPES[call.k.dtype] if call.k.element_size() == 2 else "uint8"
    return CacheWriteSpec(dtype, "nvfp4" if block_scaled(call) else dtype)


def groups(tokens: int, heads: int, lanes: int) -> int:
    """Return how many groups of lanes share the rows of a token: one per row, unless there are many rows."""
    return max(1, min(heads, THREADS // max(1, tokens * lanes)))


def plan_for(call: CacheWriteCall, device_info: tuple[str, int] | None) -> CacheWritePlan:
    """Return the plan of a valid call for a device's (architecture, SM count), None for the reference.

    Raises NotImplementedError if no kernel serves the call.
    """
    k, v, spec = call.k, call.v, spec_of(call)
    tokens, heads, device = k.shape[0], k.shape[1], k.device
    head_dim = max(k.shape[2], v.shape[2])
    fn: Callable[..., Any] = partial(reference.write_rows, spec)
    given: Callable[[torch.Tensor], Any] = lambda tensor: tensor  # noqa: E731
    if device_info is not None:
        request = CacheWriteRequest(spec.dtype, spec.cache, spec.transform, head_dim)
        op, spec = dispatch.select(request, device_info[0])
        fn, given = machine.current.kernel(op, spec, device_info[0]), machine.current.argument
    lanes = rows.lanes(head_dim, spec.elements)
    each = groups(tokens, heads, lanes)
    names = fields(spec)

    def empty(dtype: torch.dtype, *shape: int) -> Any:
        return given(torch.empty(0, *shape, dtype=dtype, device=device))

    wide = frozenset(name for name in INDICES if getattr(getattr(call, name, None), "dtype", None) == torch.int64)
    values: dict[str, Any] = dict.fromkeys(names, empty(torch.int32))
    values |= dict(
        places=call.places, wide=sum(1 << INDICES.index(name) for name in wide), page_table=empty(torch.int32, 1),
        lanes_log2=lanes.bit_length() - 1, k_groups=each, v_groups=each, enable_pdl=1,
        k_scale=call.k_scale, v_scale=call.v_scale, k_scale_ptr=empty(torch.float32),
        v_scale_ptr=empty(torch.float32), v_sf_interleaved=int(call.v_sf_interleaved),
    )  # fmt: skip
    pages = min(call.k_cache.shape[0], call.v_cache.shape[0])
    exists = call.places == SLOTS or (call.kv_indptr.shape[0] > 1 and call.page_table.shape[0] > 0)
    return CacheWritePlan(
        fn=fn,
        flat=[values[name] for name in names],
        at=CacheWriteArgs(**{name: names.index(name) if name in names else None for name in CacheWriteArgs._fields}),
        device=device,
        single_device=device_info is None or machine.current.device_count() == 1,
        runs=bool(tokens and heads and head_dim and pages and call.k_cache.shape[2] and exists),
        as_bytes=spec.dtype == "uint8",
        wide=wide,
        k_bytes=overlap.reach(k),
        v_bytes=overlap.reach(v),
        k_cache_bytes=overlap.reach(call.k_cache),
        v_cache_bytes=overlap.reach(call.v_cache),
        apart=call.v_cache.data_ptr() - call.k_cache.data_ptr(),
    )
