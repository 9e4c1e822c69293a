"""Run a call that writes rows: look up its plan and launch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import INDICES, PAGES, ROWS, CacheWriteArgs, fields
from cute_kernels.cache_write.request import CacheWriteRequest
from cute_kernels.cache_write.spec import CacheWriteSpec

from .. import machine, overlap, reference
from .call import CacheWriteCall, QueryTransform
from .checks import FP8, block_scaled, reason, validate

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
    k_bytes: int  # from the first to the last, also below
    v_bytes: int
    k_cache_bytes: int
    v_cache_bytes: int
    apart: int  # bytes from K's cache to V's in the call that was validated


def run(call: CacheWriteCall) -> None:
    """Write the rows of a call."""
    (
        function, k, v, k_cache, v_cache, places, slots, batch_indices, positions, page_table, kv_indptr, last,
        cu_seqlens, kv_lens, k_scale, v_scale, k_scale_ptr, v_scale_ptr, k_sf, v_sf, interleaved, transform,
    ) = call  # fmt: skip
    here = machine.current
    try:  # the key omits what compiled code checks itself: ranks, last strides, devices
        if slots is not None:
            where: Any = (slots.dtype, slots.shape)
        elif batch_indices is not None and kv_indptr is not None and last is not None:
            where = (
                batch_indices.dtype, batch_indices.shape, positions.dtype, positions.shape, page_table.dtype,
                page_table.shape, kv_indptr.dtype, kv_indptr.shape, last.dtype, last.shape,
                last.device, last.stride(),  # no kernel sees it
            )  # fmt: skip
        else:
            where = tuple(map(form, (batch_indices, positions, page_table, kv_indptr, last, cu_seqlens, kv_lens)))
        scaled = None if k_sf is None else (
            k_sf.dtype, k_sf.shape, k_sf.stride(), v_sf.dtype, v_sf.shape, v_sf.stride(), interleaved,
        )  # fmt: skip
        key = (
            function, k.get_device(), k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride(), k_cache.dtype,
            k_cache.shape, k_cache.stride(), v_cache.dtype, v_cache.shape, v_cache.stride(), places, where, scaled,
            k_scale_ptr is None or k_scale_ptr.shape, v_scale_ptr is None or v_scale_ptr.shape,
            None if transform is None else tuple(map(form, transform)),
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
        if slots is not None:
            flat[at.slots] = slots.view(_int32) if slots.dtype is _int64 else slots
        elif places == PAGES:
            if page_table.dtype is _int64:
                page_table = page_table.view(_int32)
            flat[at.page_table] = page_table if kv_indptr is None else page_table.unsqueeze(0)
            for where, index in (
                (at.batch_indices, batch_indices), (at.positions, positions), (at.kv_indptr, kv_indptr),
                (at.cu_seqlens, cu_seqlens), (at.kv_lens, kv_lens),
            ):  # fmt: skip
                if index is not None:
                    flat[where] = index.view(_int32) if index.dtype is _int64 else index
        if at.k_scale is not None:
            flat[at.k_scale], flat[at.v_scale] = k_scale, v_scale
            if k_scale_ptr is not None:
                flat[at.k_scale_ptr] = k_scale_ptr
            if v_scale_ptr is not None:
                flat[at.v_scale_ptr] = v_scale_ptr
            if k_sf is not None:
                flat[at.k_sf], flat[at.v_sf] = k_sf.view(_uint8), v_sf.view(_uint8)
        if transform is not None:
            put_transform(flat, at, transform)
        plan.fn(*flat)
    except Exception:
        why = reason(call)  # names the argument that was refused
        if why is None:
            raise
        raise why from None


def form(value: Any) -> Any:
    """Return the properties of a tensor that a plan depends on; of another value, itself."""
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def put_transform(flat: list[Any], at: CacheWriteArgs, transform: QueryTransform) -> None:
    """Put the tensors of a transform into the arguments of a launch."""
    given = transform._asdict()
    out = given.pop("q_out")
    if out is not None:
        flat[at.q_fp8 if out.dtype in FP8 else at.q_out] = out
    if at.q_scale is None:
        del given["q_scale"], given["q_scale_ptr"]
    for name in ("q_weight", "k_weight"):
        if given[name] is not None and given[name].dim() == 1:
            given[name] = given[name].unsqueeze(0)
    if given["rope_positions"] is not None and given["rope_positions"].dtype is _int64:
        given["rope_positions"] = given["rope_positions"].view(_int32)
    for name, value in given.items():
        if value is not None:
            flat[getattr(at, name)] = value


def spec_of(call: CacheWriteCall) -> CacheWriteSpec:
    """Return the spec of a valid call."""
    if call.k.element_size() == 1:
        return CacheWriteSpec("uint8", "uint8")
    cache = "nvfp4" if block_scaled(call) else DTYPES[call.k_cache.dtype]
    return CacheWriteSpec(DTYPES[call.k.dtype], cache, call.transform is not None)


def groups(tokens: int, heads: int, lanes: int) -> int:
    """Return how many groups of lanes share the rows of a token: one per row, unless there are many rows."""
    return max(1, min(heads, THREADS // max(1, tokens * lanes)))


def kernel_of(call: CacheWriteCall, arch: str) -> tuple[str, CacheWriteSpec]:
    """Return (op, spec) of the kernel that serves a valid call. Raises NotImplementedError if there is none."""
    spec, table = spec_of(call), None if call.transform is None else call.transform.rope_table
    head_dim = max(call.k.shape[2], call.v.shape[2])
    request = CacheWriteRequest(
        spec.dtype, spec.cache, spec.transform, head_dim, 0 if table is None else table.shape[1]
    )
    return dispatch.select(request, arch)


def plan_for(call: CacheWriteCall, device_info: tuple[str, int] | None) -> CacheWritePlan:
    """Return the plan of a valid call for a device's (architecture, SM count), None for the reference.

    Raises NotImplementedError if no kernel serves the call.
    """
    k, v, spec, device = call.k, call.v, spec_of(call), call.k.device
    fn: Callable[..., Any] = partial(reference.write_rows, spec)
    given: Callable[[torch.Tensor], Any] = lambda tensor: tensor  # noqa: E731
    if device_info is not None:
        op, spec = kernel_of(call, device_info[0])
        fn, given = machine.current.kernel(op, spec, device_info[0]), machine.current.argument
    lanes = rows.lanes(max(k.shape[2], v.shape[2]), spec.elements)
    queries = 0 if call.transform is None or call.transform.q is None else call.transform.q.shape[1]
    names = fields(spec)

    def empty(dtype: torch.dtype, *shape: int) -> Any:
        return given(torch.empty(0, *shape, dtype=dtype, device=device))

    pages = min(call.k_cache.shape[0], call.v_cache.shape[0])
    listed = call.page_table is not None and call.page_table.numel() > 0
    if call.kv_indptr is not None:
        listed &= call.kv_indptr.shape[0] > 1
    stores = pages and call.k_cache.shape[2] and (k.shape[1] or v.shape[1]) and (call.places != PAGES or listed)
    offsets = call._asdict() | {"rope_positions": call.transform.rope_positions if call.transform else None}
    wide = [i for i, name in enumerate(INDICES) if getattr(offsets[name], "dtype", None) is _int64]
    fp8 = torch.float8_e5m2 if spec.cache == "e5m2" else torch.float8_e4m3fn
    dim = k.shape[2]
    values: dict[str, Any] = dict.fromkeys(names, empty(torch.int32))
    values |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "q_scale_ptr"), empty(torch.float32))
    values |= dict(
        places=call.places if stores else ROWS, wide=sum(1 << i for i in wide), page_table=empty(torch.int32, 1),
        lanes_log2=lanes.bit_length() - 1, k_groups=groups(k.shape[0], max(1, queries + k.shape[1]), lanes),
        v_groups=groups(k.shape[0], v.shape[1], lanes) if v.shape[1] else 0, enable_pdl=1,
        v_sf_interleaved=int(call.v_sf_interleaved), scales_multiply=0,
        q=empty(k.dtype, 0, dim), q_out=empty(k.dtype, queries, dim),
        rope_table=empty(torch.float32, 0), q_weight=empty(k.dtype, dim), k_weight=empty(k.dtype, dim),
        q_fp8=empty(fp8, queries, dim),
    )  # fmt: skip
    return CacheWritePlan(
        fn=fn,
        flat=[values[name] for name in names],
        at=CacheWriteArgs(**{name: names.index(name) if name in names else None for name in CacheWriteArgs._fields}),
        device=device,
        single_device=device_info is None or machine.current.device_count() == 1,
        runs=bool(k.shape[0] and max(dim, v.shape[2]) and (stores or queries)),
        as_bytes=spec.dtype == "uint8",
        k_bytes=overlap.reach(k),
        v_bytes=overlap.reach(v),
        k_cache_bytes=overlap.reach(call.k_cache),
        v_cache_bytes=overlap.reach(call.v_cache),
        apart=call.v_cache.data_ptr() - call.k_cache.data_ptr(),
    )
