"""Calls that read rows of latent attention from the pages of requests: their checks, plans and launches."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_kernels import dtypes
from cute_kernels.latent import dispatch, read
from cute_kernels.latent.args import READ_INDICES, ReadArgs, read_fields
from cute_kernels.latent.request import ReadRequest
from cute_kernels.latent.spec import ReadSpec
from cute_kernels.records import BYTES, INDEX, RECORDS

from .. import reference
from ..host import machine, schema
from ..host.checks import check_apart, check_integer, check_operand, check_shape
from ..host.launch import KernelFamily, Plan, run, select
from ..host.overlap import AddressBounds
from ..host.plain import refuse_grad, traced
from ..host.scalars import check_scale, on_host, split_scale
from ..host.schema import GivenTensor, MaybeTensor
from .checks import check_dtype

OFFSETS = (torch.int32, torch.int64)
BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)  # of a cache of bytes
DTYPES = {getattr(torch, dtypes.TORCH[name]): name for name in ("bf16", "fp16")}
GATHER, INDEX_GATHER = "gather_latent", "cp_gather_indexer_k_quant_cache"
DEQUANT, COPY = "gather_and_maybe_dequant_cache", "cp_gather_cache"
UPCONVERT, UPCONVERT_NVFP4 = "cp_gather_and_upconvert_fp8_kv_cache", "cp_gather_and_upconvert_nvfp4_kv_cache"
NAMES: dict[str, dict[str, str]] = {  # field of a call -> argument of its function
    GATHER: {"page_table": "block_table", "starts": "cu_seqlens", "firsts": "seq_starts", "cache": "cache.cache",
             "scale": "cache.scale", "scale_ptr": "cache.scale"},
    INDEX_GATHER: {"cache": "kv_cache", "out": "dst_k", "scales": "dst_scale", "page_table": "block_table",
                   "starts": "cu_seq_lens"},
    **{name: {"cache": "src_cache", "out": "dst", "page_table": "block_table", "firsts": "seq_starts",
              "starts": "cu_seq_lens" if name in (DEQUANT, COPY) else "workspace_starts", "rows": "num_tokens",
              "scale_ptr": "scale"}
       for name in (DEQUANT, COPY, UPCONVERT, UPCONVERT_NVFP4)},
}  # fmt: skip
INPUTS = ("cache", "page_table", "starts", "firsts", "scale_ptr")
_Tensor, _uint8, _int32 = torch.Tensor, torch.uint8, torch.int32


class GatherCall(NamedTuple):
    """A call, in the caller's tensors. B requests, S rows of the output.

    function: the public function, which decides the names in messages (`NAMES`). record: a key of
    `cute_kernels.records.RECORDS`, or BYTES: rows are copied as they are.
    """

    function: str
    record: str
    cache: GivenTensor  # (pages, P, elements)
    out: GivenTensor  # (S, W)
    page_table: GivenTensor  # (B, M)
    starts: GivenTensor  # (B,) or (B + 1,): first rows of requests in out
    rows: int  # of out that requests have, at most
    firsts: MaybeTensor = None  # (B,): positions of these rows in their requests; None: 0
    scales: MaybeTensor = None  # (S, 4) bytes: of an indexer's rows
    scale: float = 1.0
    scale_ptr: MaybeTensor = None


def name_of(call: GatherCall, field: str) -> str:
    """Return the caller's name of a field."""
    return NAMES[call.function].get(field, field)


def width_of(call: GatherCall) -> int:
    """Return the columns of the output."""
    form = RECORDS.get(call.record)
    return int(call.cache.shape[2]) if form is None or not form.packed else form.columns


def validate(call: GatherCall) -> None:
    """Raise on the first argument that does not fit, before anything is written."""
    cache, out, owner = name_of(call, "cache"), name_of(call, "out"), f"that of {name_of(call, 'cache')}"
    raw, form = call.record == BYTES, RECORDS.get(call.record)
    held = (getattr(call.cache, "dtype", _uint8),) if raw else BYTE_DTYPES
    check_operand(cache, call.cache, 3, held, None)
    device, kinds = call.cache.device, held if raw or call.record == INDEX else tuple(DTYPES)
    if raw and isinstance(call.out, _Tensor):
        check_dtype(out, call.out, call.cache, cache)
    check_operand(out, call.out, 2, kinds, device, owner)
    if form is not None:
        check_shape(
            cache, call.cache, (*call.cache.shape[:2], form.token_bytes or call.cache.shape[2]),
            f"bytes of record {call.record}",
        )  # fmt: skip
        pages, size, width = call.cache.shape
        dense = (size == 1 or call.cache.stride(1) == width) and (pages <= 1 or call.cache.stride(0) >= size * width)
        if form.planar and not dense:
            raise ValueError(
                f"{cache}: strides {call.cache.stride()}, rows of a page of record {call.record} must be dense"
            )
        steps = [step for n, step in zip((pages, size), call.cache.stride()) if n > 1]
        if any(step % form.unit for step in steps) or not traced(call.cache) and call.cache.data_ptr() % form.unit:
            raise ValueError(
                f"{cache}: strides {call.cache.stride()}, rows must begin at multiples of {form.unit} bytes"
            )
    check_shape(out, call.out, (call.out.shape[0], width_of(call)), f"rows, and values of a row of {cache}")
    if call.record == INDEX:
        scales = name_of(call, "scales")
        check_operand(scales, call.scales, 2, (_uint8,), device, owner)
        check_shape(scales, call.scales, (call.out.shape[0], 4), f"rows of {out}, and bytes of a scale")
    places(call, device, owner)
    check_integer(name_of(call, "rows"), call.rows, 0)
    where = None if call.scale_ptr is not None and on_host(call.scale_ptr) else device
    check_scale(name_of(call, "scale"), call.scale, call.scale_ptr, where, 1, owner, True)
    inputs = {name_of(call, field): getattr(call, field) for field in INPUTS}
    outputs = {name_of(call, field): getattr(call, field) for field in ("out", "scales")}
    given = {name: t for name, t in outputs.items() if t is not None}
    refuse_grad({name: t for name, t in inputs.items() if t is not None})
    refuse_grad(given)
    if not any(map(traced, given.values())):
        check_apart(given, inputs)


def places(call: GatherCall, device: torch.device, owner: str) -> None:
    """Check the tensors that say where rows are."""
    table, starts = name_of(call, "page_table"), name_of(call, "starts")
    check_operand(table, call.page_table, 2, OFFSETS, device, owner)
    check_operand(starts, call.starts, 1, OFFSETS, device, owner)
    batch, more = call.page_table.shape[0], call.function not in (UPCONVERT, UPCONVERT_NVFP4)
    check_shape(starts, call.starts, (batch + more,), f"requests of {table}{', and one' if more else ''}")
    if call.firsts is not None:
        firsts = name_of(call, "firsts")
        check_operand(firsts, call.firsts, 1, OFFSETS, device, owner)
        check_shape(firsts, call.firsts, (batch,), f"requests of {table}")


# ---- plans and launches


@dataclass(slots=True, eq=False, kw_only=True)
class GatherPlan(Plan):
    """A kernel that reads rows, and its arguments except the tensors and numbers of a call."""

    put: tuple[tuple[str, int], ...]  # fields that calls give, and positions of their arguments
    bounds: AddressBounds  # of the cache and of the outputs


def key_of(call: GatherCall) -> tuple[Any, ...]:
    """Return what the plan of a call depends on."""
    parts: list[Any] = [call.cache.get_device(), call.function, call.record, call.rows]
    for t in (call.cache, call.out, call.page_table, call.starts, call.firsts, call.scales, call.scale_ptr):
        parts.append(None if t is None else (t.dtype, t.shape, t.stride()))
    return tuple(parts)


def inputs_of(call: GatherCall) -> tuple[Any, ...]:
    """Return the tensors with gradients that would be lost, the one that decides the device first."""
    return call.cache, call.out, call.scales, call.scale_ptr


def memory_of(call: GatherCall) -> list[Any]:
    """Return the tensors that may share no memory, the outputs first."""
    return [call.out, call.scales, call.cache, call.scale_ptr]


def request_of(call: GatherCall) -> ReadRequest:
    """Return the request for the kernel of a valid call."""
    dtype = "uint8" if call.record in (BYTES, INDEX) else DTYPES[call.out.dtype]
    return ReadRequest(dtype, call.record, min(call.rows, call.out.shape[0]))


def plan_for(call: GatherCall, device_info: tuple[str, int] | None) -> GatherPlan:
    """Return the plan of a valid call for a device's (architecture, SM count), None for the reference."""
    request = request_of(call)
    spec = ReadSpec(request.dtype, request.record)
    fn: Any = partial(reference.read_latent, spec)
    if device_info is not None:
        fn, spec = select(dispatch, request, device_info[0])
    empty, names = partial(machine.current.empty, call.cache.device), read_fields(spec)
    wide = sum(
        1 << i for i, name in enumerate(READ_INDICES) if getattr(getattr(call, name), "dtype", None) == OFFSETS[1]
    )
    values = dict.fromkeys(ReadArgs._fields, empty(_int32)) | {
        "wide": wide, "rows": request.rows, "enable_pdl": 1, "scale_ptr": empty(torch.float32),
        "ctas": read.grid(spec, request.rows, 1 if device_info is None else device_info[1]),
    }  # fmt: skip
    given = [name for name in ("cache", "out", "page_table", "starts", "firsts", "scales", "scale", "scale_ptr")
             if getattr(call, name) is not None and name in names]  # fmt: skip
    return GatherPlan(
        fn=fn,
        flat=[values[name] for name in names],
        runs=bool(request.rows and call.page_table.numel() and call.cache.numel() and call.out.numel()),
        put=tuple((name, names.index(name)) for name in given),
        bounds=AddressBounds.of(memory_of(call), {0, 1}),
    )


def bind(plan: GatherPlan, call: GatherCall) -> tuple[list[Any], None]:
    """Return the arguments of a launch."""
    if not plan.runs:
        return plan.flat, None
    addresses = [0 if t is None else t.data_ptr() for t in memory_of(call)]
    if addresses != plan.bounds.addresses and plan.bounds.may_overlap(addresses):
        validate(call)
    flat = plan.flat.copy()
    for field, at in plan.put:
        value: Any = getattr(call, field)
        if field in READ_INDICES and value.dtype is not _int32:
            value = words(value)
        elif field in ("cache", "out") and (field == "cache" or call.record in (BYTES, INDEX)):
            value = value if value.dtype is _uint8 else value.view(_uint8)
        flat[at] = value
    return flat, None


def words(index: torch.Tensor) -> torch.Tensor:
    """Return an index tensor of int64 as its words."""
    if index.shape[-1] == 1:  # torch refuses to view one element with another stride than 1
        index = index.as_strided(index.shape, (*index.stride()[:-1], 1))
    return index.view(_int32)


FAMILY = KernelFamily(key_of, inputs_of, validate, plan_for, bind)


def serve(call: GatherCall) -> None:
    """Run a call that reads rows. It is the last step of all functions."""
    if not traced(call.cache):
        run(FAMILY, call)
        return
    validate(call)
    OPERATOR.record(call._asdict())


def _run(*flat: Any) -> None:
    call = GatherCall(*flat)
    if call.scale_ptr is not None:  # the host's scale tensors had no value in a trace
        number, tensor = split_scale(name_of(call, "scale"), call.scale_ptr)
        call = call._replace(scale=call.scale * number, scale_ptr=tensor)
    run(FAMILY, call)


OPERATOR = schema.define("read_latent", schema.arguments(GatherCall, ("out", "scales")), _run)
