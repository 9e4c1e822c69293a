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
from ..checks import checking
from .call import CacheWriteCall, QueryTransform
from .checks import FP8, block_scaled, reason, validate

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
THREADS = 1 << 19  # about as many threads as two GPUs hold: with fewer, each group has one row
_AT = CacheWriteArgs(*range(len(CacheWriteArgs._fields)))  # position of each argument that all specs have
_K, _V, _K_CACHE, _V_CACHE, _SLOTS, _BATCH_INDICES, _POSITIONS = (
    _AT.k, _AT.v, _AT.k_cache, _AT.v_cache, _AT.slots, _AT.batch_indices, _AT.positions
)  # fmt: skip
_PAGE_TABLE, _KV_INDICES, _KV_INDPTR = _AT.page_table, _AT.kv_indices, _AT.kv_indptr
_CU_SEQLENS, _KV_LENS = _AT.cu_seqlens, _AT.kv_lens
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
    checked: bool  # every call is checked as if it had no plan
    as_bytes: bool  # rows and caches of one byte are passed as uint8
    wide: int  # bits of the index tensors of int64
    k_bytes: int  # from the first to the last, also below
    v_bytes: int
    q_bytes: int  # of Q, and of its output
    in_place: bool  # if the output of Q begins where Q does, it is Q
    k_cache_bytes: int
    v_cache_bytes: int
    apart: int  # bytes from K's cache to V's in the call that was validated
    k_apart: int  # from K's cache to K
    q_apart: int  # from K's cache to the output of Q


def run(call: CacheWriteCall) -> None:
    """Write the rows of a call."""
    (
        function, k, v, k_cache, v_cache, nhd, places, slots, batch_indices, positions, page_table, kv_indices,
        kv_indptr, last, cu_seqlens, kv_lens, k_scale, v_scale, k_scale_ptr, v_scale_ptr, k_sf, v_sf, interleaved, t,
    ) = call  # fmt: skip
    here = machine.current
    try:  # the key omits what compiled code checks itself: ranks, last strides, devices, most dtypes
        if slots is not None:
            where: Any = (slots.dtype, slots.numel())
        elif kv_indices is not None and last is not None:
            where = (
                batch_indices.dtype, batch_indices.numel(), positions.dtype, positions.numel(), kv_indices.dtype,
                kv_indices.numel(), kv_indptr.dtype, kv_indptr.numel(), last.dtype, last.numel(),
                last.device, last.stride(),  # no kernel sees it
            )  # fmt: skip
        else:
            where = tuple(map(form, (batch_indices, positions, page_table, kv_indices, kv_indptr, cu_seqlens, kv_lens)))
        scaled = None if k_sf is None else (
            k_sf.dtype, k_sf.shape, k_sf.stride(), v_sf.dtype, v_sf.shape, v_sf.stride(), interleaved,
        )  # fmt: skip
        key = (
            function, k.get_device(), k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride(), k_cache.dtype,
            k_cache.shape, k_cache.stride(), v_cache.dtype, v_cache.shape, v_cache.stride(), nhd, places, where, scaled,
            k_scale_ptr is None or k_scale_ptr.numel(), v_scale_ptr is None or v_scale_ptr.numel(),
            None if t is None else transform_key(t),
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
    elif plan.checked:
        validate(call)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):
            return run(call)
    if not plan.runs:
        return None
    flat, at = plan.flat.copy(), plan.at
    try:
        at_k, at_v, at_k_cache, at_v_cache = k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        apart = at_v_cache - at_k_cache
        if (-plan.k_bytes < at_k - at_k_cache < plan.k_cache_bytes and at_k - at_k_cache != plan.k_apart
                or -plan.v_bytes < at_v - at_v_cache < plan.v_cache_bytes
                or -plan.v_cache_bytes < apart < plan.k_cache_bytes and apart != plan.apart):  # fmt: skip
            validate(call)  # rare: memory may be shared
        if plan.as_bytes:
            k, v, k_cache, v_cache = k.view(_uint8), v.view(_uint8), k_cache.view(_uint8), v_cache.view(_uint8)
        flat[_K], flat[_V], flat[_K_CACHE], flat[_V_CACHE] = k, v, k_cache, v_cache
        if slots is not None:
            flat[_SLOTS] = slots.view(_int32) if plan.wide else slots
        elif places == PAGES:
            if plan.wide:
                batch_indices, positions, page_table, kv_indices, kv_indptr, cu_seqlens, kv_lens = map(
                    words, (batch_indices, positions, page_table, kv_indices, kv_indptr, cu_seqlens, kv_lens)
                )
            if kv_indices is not None:
                flat[_BATCH_INDICES], flat[_POSITIONS] = batch_indices, positions
                flat[_KV_INDICES], flat[_KV_INDPTR] = kv_indices, kv_indptr
            else:
                flat[_PAGE_TABLE], flat[_CU_SEQLENS], flat[_KV_LENS] = page_table, cu_seqlens, kv_lens
        elif cu_seqlens is not None:
            flat[_CU_SEQLENS], flat[_KV_LENS] = words(cu_seqlens), words(kv_lens)
        if at.k_scale is not None:
            flat[at.k_scale], flat[at.v_scale] = k_scale, v_scale
            if k_scale_ptr is not None:
                flat[at.k_scale_ptr] = k_scale_ptr
            if v_scale_ptr is not None:
                flat[at.v_scale_ptr] = v_scale_ptr
            if k_sf is not None:
                flat[at.k_sf], flat[at.v_sf] = k_sf.view(_uint8), v_sf.view(_uint8)
        if t is not None:
            if t.q is not None:
                at_out, near = t.q_out.data_ptr(), plan.q_bytes
                ahead = at_out - t.q.data_ptr()
                if (-near < ahead < near and (ahead != 0 or not plan.in_place)
                        or -near < at_out - at_k_cache < plan.k_cache_bytes and at_out - at_k_cache != plan.q_apart
                        or -near < at_out - at_v_cache < plan.v_cache_bytes):  # fmt: skip
                    validate(call)
            put_transform(flat, plan, t)
        plan.fn(*flat)
    except Exception:
        why = reason(call)  # names the argument that was refused
        if why is None:
            raise
        raise why from None


def form(value: Any) -> Any:
    """Return the properties of a tensor that a plan depends on; of another value, itself."""
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def words(index: Any) -> Any:
    """Return an index tensor of int64 as its words; other values unchanged."""
    return index.view(_int32) if index is not None and index.dtype is _int64 else index


def transform_key(t: QueryTransform) -> tuple[Any, ...]:
    """Return what a plan depends on."""
    q, out, table, flags, rotated_at, q_weight, k_weight, eps, offset, _, q_scale_ptr, cos, sin, lens_out = t
    return (
        None if cos is None else (cos.shape, cos.stride(), sin.shape, sin.stride()), lens_out is None,
        None if q is None else (q.shape, q.stride(), out.dtype, out.shape, out.stride()),
        None if table is None else (table.shape, table.stride()), flags, eps, offset,
        None if rotated_at is None else (rotated_at.dtype, rotated_at.numel()),
        None if q_weight is None else (q_weight.shape, q_weight.stride()),
        None if k_weight is None else (k_weight.shape, k_weight.stride()),
        None if q_scale_ptr is None else (q_scale_ptr.dtype, q_scale_ptr.shape),
    )  # fmt: skip


def put_transform(flat: list[Any], plan: CacheWritePlan, t: QueryTransform) -> None:
    """Put the tensors of a transform into the arguments of a launch; its numbers are in the plan's."""
    at = plan.at
    q, out, table, _, rotated_at, q_weight, k_weight, _, _, q_scale, q_scale_ptr, cos, sin, lens_out = t
    if q is not None:
        flat[at.q] = q
        flat[at.q_fp8 if out.dtype in FP8 else at.q_out] = out
    if table is not None:
        flat[at.rope_table] = table
        if rotated_at is not None:
            flat[at.rope_positions] = rotated_at.view(_int32) if rotated_at.dtype is _int64 else rotated_at
    if cos is not None:
        flat[at.rope_cos], flat[at.rope_sin] = cos, sin
    if lens_out is not None:
        flat[at.kv_lens_out] = lens_out
    if q_weight is not None:
        flat[at.q_weight] = q_weight if q_weight.dim() == 1 else q_weight.view(-1)
    if k_weight is not None:
        flat[at.k_weight] = k_weight if k_weight.dim() == 1 else k_weight.view(-1)
    if at.q_scale is not None:
        flat[at.q_scale] = q_scale
        if q_scale_ptr is not None:
            flat[at.q_scale_ptr] = q_scale_ptr


def spec_of(call: CacheWriteCall) -> CacheWriteSpec:
    """Return the spec of a valid call."""
    if call.k.element_size() == 1:
        return CacheWriteSpec("uint8", "uint8")
    cache = "nvfp4" if block_scaled(call) else DTYPES[call.k_cache.dtype]
    return CacheWriteSpec(DTYPES[call.k.dtype], cache, call.transform is not None)


def groups(tokens: int, heads: int, lanes: int) -> int:
    """Return how many groups of lanes share the rows of a token: one per row, unless there are many rows."""
    return max(1, min(heads, THREADS // max(1, tokens * lanes)))


def rotated(call: CacheWriteCall) -> int:
    """Return how many elements of a row are rotated."""
    t = call.transform or QueryTransform()
    if t.rope_cos is not None:
        return 2 * t.rope_cos.shape[1]
    return 0 if t.rope_table is None else t.rope_table.shape[1]


def kernel_of(call: CacheWriteCall, arch: str) -> tuple[str, CacheWriteSpec]:
    """Return (op, spec) of the kernel that serves a valid call. Raises NotImplementedError if there is none."""
    spec = spec_of(call)
    head_dim = max(call.k.shape[2], call.v.shape[2])
    request = CacheWriteRequest(spec.dtype, spec.cache, spec.transform, head_dim, rotated(call))
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
        listed = call.kv_indices.shape[0] > 0 and call.kv_indptr.shape[0] > 1
    page_size = call.k_cache.shape[1 if call.nhd else 2]
    stores = pages and page_size and (k.shape[1] or v.shape[1]) and (call.places != PAGES or listed)
    t = call.transform or QueryTransform()
    offsets = call._asdict() | {"rope_positions": t.rope_positions}
    wide = [i for i, name in enumerate(INDICES) if getattr(offsets[name], "dtype", None) is _int64]
    fp8 = torch.float8_e5m2 if spec.cache == "e5m2" else torch.float8_e4m3fn
    dim = k.shape[2]
    values: dict[str, Any] = dict.fromkeys(names, empty(torch.int32))
    values |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "q_scale_ptr"), empty(torch.float32))
    values |= dict(
        nhd=int(call.nhd), places=call.places if stores else ROWS, wide=sum(1 << i for i in wide),
        page_table=empty(torch.int32, 1),
        lanes_log2=lanes.bit_length() - 1, k_groups=groups(k.shape[0], max(1, queries + k.shape[1]), lanes),
        v_groups=groups(k.shape[0], v.shape[1], lanes) if v.shape[1] else 0, enable_pdl=1,
        v_sf_interleaved=int(call.v_sf_interleaved), scales_multiply=0,
        q=empty(k.dtype, 0, dim), q_out=empty(k.dtype, queries, dim),
        rope=t.rope, norm_eps=float(t.norm_eps), norm_offset=float(t.norm_offset),
        rope_table=empty(torch.float32, rotated(call)), rope_cos=empty(k.dtype, 8), rope_sin=empty(k.dtype, 8),
        q_weight=empty(k.dtype), k_weight=empty(k.dtype),
        q_fp8=empty(fp8, queries, dim),
    )  # fmt: skip
    return CacheWritePlan(
        fn=fn,
        flat=[values[name] for name in names],
        at=CacheWriteArgs(**{name: names.index(name) if name in names else None for name in CacheWriteArgs._fields}),
        device=device,
        single_device=device_info is None or machine.current.device_count() == 1,
        runs=bool(k.shape[0] and max(dim, v.shape[2]) and (stores or queries)),
        checked=checking() and device.type != "meta",
        as_bytes=spec.dtype == "uint8",
        wide=sum(1 << i for i in wide),
        k_bytes=overlap.reach(k),
        v_bytes=overlap.reach(v),
        q_bytes=0 if t.q is None else max(overlap.reach(t.q), overlap.reach(t.q_out)),
        in_place=t.q is not None and (t.q.dtype, t.q.stride()) == (t.q_out.dtype, t.q_out.stride()),
        k_cache_bytes=overlap.reach(call.k_cache),
        v_cache_bytes=overlap.reach(call.v_cache),
        apart=call.v_cache.data_ptr() - call.k_cache.data_ptr(),
        k_apart=k.data_ptr() - call.k_cache.data_ptr(),
        q_apart=0 if t.q_out is None else t.q_out.data_ptr() - call.k_cache.data_ptr(),
    )
