"""Plan and bind the calls that write rows, for `host.launch`: the key of a call, its kernel, and its arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from cute_kernels import dtypes
from cute_kernels.cache_write import dispatch, rows
from cute_kernels.cache_write.args import INDICES, PAGES, ROWS, CacheWriteArgs, fields
from cute_kernels.cache_write.request import CacheWriteRequest
from cute_kernels.cache_write.spec import CacheWriteSpec

from .. import reference
from ..host import machine
from ..host.launch import KernelFamily, Plan, select
from ..host.overlap import AddressBounds
from .call import CacheWriteCall, QueryTransform
from .checks import FP8, TENSORS, block_scaled, by_token, validate

DTYPES = {getattr(torch, dtypes.TORCH[name]): name for name in ("bf16", "fp16", *dtypes.LARGEST)}
THREADS = 1 << 19  # about as many threads as two GPUs hold: with fewer, each group has one row
_AT = CacheWriteArgs(*range(len(CacheWriteArgs._fields)))  # position of each argument that all specs have
K, V, SLOTS, _K_CACHE, _V_CACHE = _AT.k, _AT.v, _AT.slots, _AT.k_cache, _AT.v_cache
LISTED, TABLED = (
    tuple((field, getattr(_AT, field)) for field in fields)
    for fields in (
        ("batch_indices", "positions", "kv_indices", "kv_indptr"), ("page_table", "cu_seqlens", "kv_lens"),
    )
)  # fmt: skip
BATCH = slice(CacheWriteCall._fields.index("batch_indices"), CacheWriteCall._fields.index("kv_lens") + 1)
_ROWS_AND_CACHES = "k_cache", "v_cache", "k_sf", "v_sf", "k", "v"
MEMORY = attrgetter(*_ROWS_AND_CACHES)  # the tensors of a call that may share no memory
MEMORY_WITH_Q = attrgetter(*_ROWS_AND_CACHES, "transform.q", "transform.q_out")  # the same with a transform
WRITTEN = {0, 1, 2, 3, 7}  # those of them that a call writes
OPERANDS = attrgetter("k", "v", "k_cache", "v_cache", "k_scale_ptr", "v_scale_ptr")
TRANSFORM = attrgetter("q_out", *TENSORS)
NO_TRANSFORM = QueryTransform()
_uint8, _int32, _int64 = torch.uint8, torch.int32, torch.int64


@dataclass(slots=True, eq=False, kw_only=True)
class RowsPlan(Plan):
    """A kernel that writes rows, and its arguments except the tensors of a call."""

    at: CacheWriteArgs  # position of each argument in `flat`; None of one that the kernel lacks


@dataclass(slots=True, eq=False, kw_only=True)
class CacheWritePlan(RowsPlan):
    """A plan of calls that write to a cache."""

    as_bytes: bool  # rows and caches of one byte are passed as uint8
    wide: int  # bits of the index tensors of int64
    bounds: AddressBounds  # of MEMORY or MEMORY_WITH_Q


def inputs_of(call: CacheWriteCall) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors with gradients that would be lost."""
    return OPERANDS(call) if call.transform is None else (*OPERANDS(call), *TRANSFORM(call.transform))


def key_of(call: CacheWriteCall) -> tuple[Any, ...]:
    """Return what the plan of a call depends on, except what the compiled call checks itself: ranks, last strides,
    devices, and most dtypes."""
    slots, last, k_sf, v_sf, t = call.slots, call.kv_last_page_len, call.k_sf, call.v_sf, call.transform
    k, v, k_cache, v_cache = call.k, call.v, call.k_cache, call.v_cache
    k_ptr, v_ptr = call.k_scale_ptr, call.v_scale_ptr
    if slots is not None:
        where: Any = (slots.dtype, slots.numel())
    elif call.kv_indices is not None and last is not None:
        requests, positions, indices, indptr = call.batch_indices, call.positions, call.kv_indices, call.kv_indptr
        where = (
            requests.dtype, requests.numel(), positions.dtype, positions.numel(), indices.dtype, indices.numel(),
            indptr.dtype, indptr.numel(), last.dtype, last.numel(), last.device, last.stride(),  # no kernel sees last
        )  # fmt: skip
    else:
        batch: Any = call[BATCH]
        where = tuple(map(form, batch))
    factors = None if k_sf is None else (
        k_sf.dtype, k_sf.shape, k_sf.stride(), v_sf.dtype, v_sf.shape, v_sf.stride(), call.v_sf_interleaved,
    )  # fmt: skip
    return (
        call.function, k.get_device(), k.dtype, k.shape, k.stride(), v.dtype, v.shape, v.stride(), k_cache.dtype,
        k_cache.shape, k_cache.stride(), v_cache.dtype, v_cache.shape, v_cache.stride(), call.nhd, call.places, where,
        factors, k_ptr is None or k_ptr.numel(), v_ptr is None or v_ptr.numel(),
        None if t is None else transform_key(t),
    )  # fmt: skip


def form(value: Any) -> Any:
    """Return the properties of a tensor that a plan depends on; of another value, itself."""
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


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


def spec_of(call: CacheWriteCall) -> CacheWriteSpec:
    """Return the spec of a valid call."""
    if call.k.element_size() == 1:
        return CacheWriteSpec("uint8", "uint8")
    cache = "nvfp4" if block_scaled(call) else DTYPES[call.k_cache.dtype]
    scales = "token" if by_token(call) else ""
    return CacheWriteSpec(DTYPES[call.k.dtype], cache, call.transform is not None, scales=scales)


def groups(tokens: int, heads: int, lanes: int) -> int:
    """Return how many groups of lanes share the rows of a token: one per row, unless there are many rows."""
    return max(1, min(heads, THREADS // max(1, tokens * lanes)))


def rotated(call: CacheWriteCall) -> int:
    """Return how many elements of a row are rotated."""
    t = call.transform or NO_TRANSFORM
    if t.rope_cos is not None:
        return 2 * t.rope_cos.shape[1]
    return 0 if t.rope_table is None else t.rope_table.shape[1]


def _stores(call: CacheWriteCall) -> bool:
    """Return whether there are rows of K or V, and a cache with rows."""
    pages, page_size = min(call.k_cache.shape[0], call.v_cache.shape[0]), call.k_cache.shape[1 if call.nhd else 2]
    return bool(pages and page_size and (call.k.shape[1] or call.v.shape[1]))


def _wide(call: CacheWriteCall) -> int:
    """Return the bits of the index tensors of int64."""
    offsets = call._asdict() | (call.transform or NO_TRANSFORM)._asdict()
    return sum(1 << i for i, name in enumerate(INDICES) if getattr(offsets[name], "dtype", None) is _int64)


def arranged(spec: CacheWriteSpec, values: dict[str, Any]) -> tuple[list[Any], CacheWriteArgs]:
    """Return the arguments of a kernel in order, and the position of each. values: these arguments by name, and
    others."""
    names = fields(spec)
    at = {name: names.index(name) if name in names else None for name in CacheWriteArgs._fields}
    return [values[name] for name in names], CacheWriteArgs(**at)


def plan_for(call: CacheWriteCall, device_info: tuple[str, int] | None) -> CacheWritePlan:
    """Return the plan of a valid call for a device's (architecture, SM count), None for the reference.

    Raises NotImplementedError if no kernel serves the call.
    """
    k, v, spec, t = call.k, call.v, spec_of(call), call.transform or NO_TRANSFORM
    dim, turned = k.shape[2], rotated(call)
    widest = max(dim, v.shape[2])
    fn: Callable[..., Any] = partial(reference.write_rows, spec)
    if device_info is not None:
        request = CacheWriteRequest(spec.dtype, spec.cache, spec.transform, widest, turned, scales=spec.scales)
        fn, spec = select(dispatch, request, device_info[0])
    lanes = rows.lanes(widest, spec.elements)
    queries = 0 if t.q is None else t.q.shape[1]
    shared = queries + k.shape[1] + (v.shape[1] if spec.transform else 0)  # rows of a token that its groups share
    empty, stores, wide = partial(machine.current.empty, k.device), _stores(call), _wide(call)
    fp8 = torch.float8_e5m2 if spec.cache == "e5m2" else torch.float8_e4m3fn
    values: dict[str, Any] = dict.fromkeys(fields(spec), empty(torch.int32))
    values |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr", "q_scale_ptr"), empty(torch.float32))
    values |= dict(
        nhd=int(call.nhd), places=call.places if stores else ROWS, wide=wide,
        page_table=empty(torch.int32, 1),
        lanes_log2=lanes.bit_length() - 1, k_groups=groups(k.shape[0], max(1, shared), lanes),
        v_groups=groups(k.shape[0], v.shape[1], lanes) if v.shape[1] and not spec.transform else 0, enable_pdl=1,
        v_sf_interleaved=int(call.v_sf_interleaved), scales_multiply=0,
        q=empty(k.dtype, 0, dim), q_out=empty(k.dtype, queries, dim),
        rope=t.rope, norm_eps=float(t.norm_eps), norm_offset=float(t.norm_offset),
        rope_table=empty(torch.float32, turned or rows.ROTATED),
        rope_cos=empty(k.dtype, 8), rope_sin=empty(k.dtype, 8),
        q_weight=empty(k.dtype), k_weight=empty(k.dtype),
        q_fp8=empty(fp8, queries, dim),
    )  # fmt: skip
    flat, at = arranged(spec, values)
    return CacheWritePlan(
        fn=fn,
        flat=flat,
        at=at,
        runs=bool(k.shape[0] and widest and (stores or queries or t.kv_lens_out is not None)),
        as_bytes=spec.dtype == "uint8",
        wide=wide,
        bounds=AddressBounds.of(MEMORY(call) if call.transform is None else MEMORY_WITH_Q(call), WRITTEN),
    )


def bind(plan: CacheWritePlan, call: CacheWriteCall) -> tuple[list[Any], None]:
    """Return the arguments of a launch."""
    if not plan.runs:
        return plan.flat, None
    memory = MEMORY(call) if call.transform is None else MEMORY_WITH_Q(call)
    addresses = [0 if t is None else t.data_ptr() for t in memory]
    if addresses != plan.bounds.addresses and plan.bounds.may_overlap(addresses):
        validate(call)
    flat, at = plan.flat.copy(), plan.at
    tensors = call.k, call.v, call.k_cache, call.v_cache
    flat[K], flat[V], flat[_K_CACHE], flat[_V_CACHE] = map(_as_bytes, tensors) if plan.as_bytes else tensors
    if call.slots is not None:
        slots = call.slots
        if plan.wide:
            slots = words(slots) if slots.shape == (1,) else slots.view(_int32)
        flat[SLOTS] = slots
    elif call.places == PAGES:
        for field, slot in LISTED if call.kv_indices is not None else TABLED:
            flat[slot] = words(getattr(call, field)) if plan.wide else getattr(call, field)
    elif call.cu_seqlens is not None:
        for field, slot in TABLED[1:]:
            flat[slot] = words(getattr(call, field))
    if at.k_scale is not None:
        flat[at.k_scale], flat[at.v_scale] = call.k_scale, call.v_scale
        if call.k_scale_ptr is not None:
            flat[at.k_scale_ptr] = call.k_scale_ptr
        if call.v_scale_ptr is not None:
            flat[at.v_scale_ptr] = call.v_scale_ptr
        if call.k_sf is not None:
            k_sf, v_sf = call.k_sf, call.v_sf
            if k_sf.ndim == 3:  # one scale per row
                k_sf, v_sf = k_sf.unsqueeze(-1), v_sf.unsqueeze(-1)
            flat[at.k_sf], flat[at.v_sf] = k_sf.view(_uint8), v_sf.view(_uint8)
    if call.transform is not None:
        put_transform(flat, at, call.transform)
    return flat, None


def put_transform(flat: list[Any], at: CacheWriteArgs, t: QueryTransform) -> None:
    """Put the tensors of a transform into the arguments of a launch; its numbers are in the plan's."""
    q, out, table, _, rotated_at, q_weight, k_weight, _, _, q_scale, q_scale_ptr, cos, sin, lens_out = t
    put_rows(flat, at, q, out, rotated_at if table is not None else None)
    if table is not None:
        flat[at.rope_table] = table
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


def put_rows(flat: list[Any], at: CacheWriteArgs, q: Any, out: Any, rotated_at: Any) -> None:
    """Put Q, its output and the positions of a rotation into the arguments of a launch; those that are None stay."""
    if q is not None:
        flat[at.q] = q
        flat[at.q_fp8 if out.dtype in FP8 else at.q_out] = out
    if rotated_at is not None:
        if rotated_at.dtype is _int64:
            rotated_at = words(rotated_at) if rotated_at.shape == (1,) else rotated_at.view(_int32)
        flat[at.rope_positions] = rotated_at


def _as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(_uint8)


def words(index: Any) -> Any:
    """Return an index tensor of int64 as its words; other values unchanged."""
    if index is None or index.dtype is not _int64:
        return index
    if index.shape == (1,):  # torch refuses to view one element with another stride than 1
        index = index.as_strided((1,), (1,))
    return index.view(_int32)


FAMILY = KernelFamily(key_of, inputs_of, validate, plan_for, bind)
