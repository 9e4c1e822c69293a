"""Calls that compute logits of an indexer: their checks, plans and launches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from cute_kernels.indexer import dispatch
from cute_kernels.indexer.args import IndexerArgs
from cute_kernels.indexer.request import IndexerRequest

from .. import reference
from ..host import machine, schema
from ..host.checks import check_apart, check_flag, check_integer, check_operand, check_shape, check_strided
from ..host.launch import KernelFamily, Plan, run, select
from ..host.overlap import AddressBounds
from ..host.plain import refuse_grad, traced
from ..host.schema import GivenTensor, MaybeTensor

OUTS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
DTYPES = {name: dtype for dtype, name in OUTS.items()}
LARGEST = 2**31 - 1  # columns of a row
E4M3, SCALE_BYTES, ROW_BYTES, CODE_UNIT, SCALE_UNIT = torch.float8_e4m3fn, 4, 1024, 16, 4
BLOCK = 64  # keys
RAGGED, PAGED, PAGED_ALL = "ragged", "paged", "paged, all tokens see all keys"
SEGMENTS = "segments"  # ragged, with queries and keys in bf16
KINDS = {SEGMENTS: torch.bfloat16}  # form -> type of queries and keys, of others e4m3
NAMES: dict[str, dict[str, str]] = {  # field of a call -> argument of its function
    RAGGED: {
        "width": "max_seqlen_k",
        "k": "kv[0]",
        "k_scale": "kv[1]",
        "starts": "cu_seq_len_k_start",
        "ends": "cu_seq_len_k_end",
    },
    SEGMENTS: {"width": "max_seqlen_k", "weights": "w"},
    PAGED: {"width": "max_context_len", "k": "kv_cache", "ends": "context_lens", "table": "block_table"},
    PAGED_ALL: {"width": "max_context_len", "k": "kv_fused", "ends": "context_lens", "table": "block_table"},
}
_AT = IndexerArgs(*range(len(IndexerArgs._fields)))  # position of each argument in a launch
_TENSORS = ("q", "k", "k_scale", "weights", "table", "starts", "ends", "out")
_uint8 = torch.uint8


class LogitsCall(NamedTuple):
    """A call, in the terms of `IndexerArgs`. form: decides the names in messages (`NAMES`)."""

    form: str
    q: GivenTensor  # (N, H, D)
    k: GivenTensor  # (pages, P, bytes)
    weights: GivenTensor  # (N, H)
    ends: GivenTensor  # (N,) or (B,)
    width: int
    dtype: str = "fp32"  # of the logits, a name of `OUTS`
    k_scale: MaybeTensor = None  # (S,)
    starts: MaybeTensor = None  # (N,)
    table: MaybeTensor = None  # (B, M)
    out: MaybeTensor = None  # (N, width); None: new memory
    next_n: int = 1
    causal: bool = True
    compressed: bool = False
    clean: bool = False


def ragged(call: LogitsCall) -> bool:
    """Return whether keys are in one tensor, without pages."""
    return call.form in (RAGGED, SEGMENTS)


def name_of(call: LogitsCall, field: str) -> str:
    """Return the caller's name of a field."""
    return NAMES[call.form].get(field, field)


def check_out_dtype(name: str, dtype: Any) -> str:
    """Return the name in `OUTS` of a dtype of logits."""
    if not isinstance(dtype, torch.dtype) or dtype not in OUTS:
        raise TypeError(f"{name}: {dtype!r}, must be {' or '.join(map(str, OUTS))}")
    return OUTS[dtype]


def new_logits(call: LogitsCall) -> torch.Tensor:
    """Return a tensor for the logits of a call. Its rows begin at multiples of ROW_BYTES."""
    dtype = DTYPES[call.dtype]
    unit = ROW_BYTES // dtype.itemsize
    columns = (call.width + unit - 1) // unit * unit
    return call.q.new_empty((call.q.shape[0], columns), dtype=dtype)[:, : call.width]


def validate(call: LogitsCall) -> None:
    """Raise on the first argument that does not fit, before anything is written."""
    names = {field: name_of(call, field) for field in call._fields}
    q = check_operand(names["q"], call.q, 3, (KINDS.get(call.form, E4M3),), None)
    device, (tokens, heads, dim) = q.device, q.shape
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{names['q']}: device {device}, must be cpu or cuda")
    if not heads or not dim:
        raise ValueError(f"{names['q']}: shape {tuple(q.shape)}, must have a head and an element")
    k = check_operand(names["k"], call.k, 3, (_uint8,), device)
    paged = not ragged(call)
    row = dim * q.itemsize + SCALE_BYTES * paged
    check_shape(
        names["k"], k, (*k.shape[:2], row), "bytes of a key, with its scale" if paged else f"that of {names['q']}"
    )
    size = k.shape[1]
    if size > 1 and k.stride(1) != row or paged and len(k) > 1 and k.stride(0) < size * row:
        raise ValueError(f"{names['k']}: strides {k.stride()}, a page must be dense, and pages apart")
    if paged and (not size or len(k) > 1 and k.stride(0) % SCALE_UNIT or not traced(k) and k.data_ptr() % SCALE_UNIT):
        what = "a page must have a key" if not size else f"pages must begin at multiples of {SCALE_UNIT} bytes"
        raise ValueError(f"{names['k']}: shape {tuple(k.shape)}, strides {k.stride()}, {what}")
    check_strided(names["weights"], call.weights, 2)
    check_operand(names["weights"], call.weights[..., :1], 2, (torch.float32,), device)
    check_shape(names["weights"], call.weights, (tokens, heads), f"tokens and heads of {names['q']}")
    if not paged:
        check_strided(names["k_scale"], call.k_scale, 1)
        check_operand(names["k_scale"], call.k_scale[:1], 1, (torch.float32,), device)
        check_shape(names["k_scale"], call.k_scale, (len(k),), f"keys of {names['k']}")
    places(call, names, device)
    if check_integer(names["width"], call.width, 0) > LARGEST:
        raise ValueError(f"{names['width']}: {call.width}, must be at most {LARGEST}")
    for field in ("causal", "compressed", "clean"):
        check_flag(names[field], getattr(call, field))
    given = {names[field]: getattr(call, field) for field in _TENSORS if field != "out"}
    refuse_grad({name: t for name, t in given.items() if t is not None})
    if call.out is not None:
        check_operand(names["out"], call.out, 2, (DTYPES[call.dtype],), device)
        check_shape(names["out"], call.out, (tokens, call.width), f"tokens of {names['q']}, and columns")
        if not traced(call.out):
            check_apart({names["out"]: call.out}, given)


def places(call: LogitsCall, names: dict[str, str], device: torch.device) -> None:
    """Check the tensors that say which keys a token sees, and where they are."""
    tokens, int32 = call.q.shape[0], (torch.int32,)
    check_integer(names["next_n"], call.next_n, 1)
    check_operand(names["ends"], call.ends, 1, int32, device)
    counts = [tokens]  # no set: torch.compile would make a constant of a number that it hashes
    if not ragged(call):
        check_operand(names["table"], call.table, 2, int32, device)
        requests = call.table.shape[0]
        if requests * call.next_n != tokens:
            rows = f"{tokens // call.next_n} rows, the requests of {names['q']}"
            raise ValueError(f"{names['table']}: shape {tuple(call.table.shape)}, must have {rows}")
        counts.append(requests)
    if call.ends.shape[0] not in counts:
        allowed = " or ".join(f"({n},)" for n in sorted({*counts}))
        raise ValueError(f"{names['ends']}: shape {tuple(call.ends.shape)}, must be {allowed}, requests or tokens")
    if ragged(call):
        check_operand(names["starts"], call.starts, 1, int32, device)
        check_shape(names["starts"], call.starts, (tokens,), f"tokens of {names['q']}")


# ---- plans and launches


@dataclass(slots=True, eq=False, kw_only=True)
class LogitsPlan(Plan):
    """A kernel of logits, and its arguments except the tensors of a call. wide: whether strides allow wide copies of
    keys; boxes: whether shapes and strides allow copies of whole blocks; dense: fields that are copied first, because
    strides of the kernel's arguments are 1 or multiples of 16."""

    wide: bool
    boxes: bool
    dense: tuple[str, ...]
    put: tuple[tuple[str, int], ...]  # fields that calls give, and positions of their arguments
    bounds: AddressBounds  # of the inputs and the output


def key_of(call: LogitsCall) -> tuple[Any, ...]:
    """Return what the plan of a call depends on."""
    parts: list[Any] = [
        call.q.get_device(), call.form, call.width, call.dtype, call.next_n, call.causal, call.compressed, call.clean
    ]  # fmt: skip
    for t in (call.q, call.k, call.weights, call.ends, call.out, call.k_scale, call.starts, call.table):
        parts.append(None if t is None else (t.dtype, t.shape, t.stride()))
    return tuple(parts)


def inputs_of(call: LogitsCall) -> tuple[Any, ...]:
    """Return the tensors with gradients that would be lost, the one that decides the device first."""
    return call.q, call.weights, call.k_scale


def memory_of(call: LogitsCall) -> list[Any]:
    """Return the tensors that may share no memory, the output first."""
    return [call.out, call.q, call.k, call.k_scale, call.weights, call.table, call.starts, call.ends]


def request_of(call: LogitsCall) -> IndexerRequest:
    """Return the request for the kernel of a valid call."""
    tokens, heads, dim = call.q.shape
    keys = call.k.shape[0] if call.table is None else call.table.shape[1] * call.k.shape[1]
    rows = tokens if call.table is None else call.next_n
    kind = "bf16" if call.form == SEGMENTS else "e4m3"
    return IndexerRequest(heads, dim, max(rows, 1), call.dtype, tokens, keys, kind)


def plan_for(call: LogitsCall, device_info: tuple[str, int] | None) -> LogitsPlan:
    """Return the plan of a valid call for a device's (architecture, SM count), None for the reference."""
    request, q, k = request_of(call), call.q, call.k
    spec = dispatch.spec_of(request)
    fn: Callable[..., Any] = partial(reference.indexer_logits, spec)
    if device_info is not None:
        fn, spec = select(dispatch, request, device_info[0])
    empty = partial(machine.current.empty, q.device)
    steps = [step for n, step in zip(q.shape, q.stride()) if n > 1]
    dense = ["q"] if steps[:-1] and any(step * q.itemsize % CODE_UNIT for step in steps[:-1]) else []
    dense += ["weights"] if call.weights.stride(1) != 1 and call.weights.shape[1] > 1 else []
    none = empty(torch.int32)
    flat = IndexerArgs(
        q=None, k=None, k_scale=empty(torch.float32), weights=None, table=empty(torch.int32, 1), starts=none, ends=None,
        out=None, next_n=call.next_n, causal=int(call.causal), wide_rows=0, boxes=0, compressed=int(call.compressed),
        clean=int(call.clean), ctas=ctas(request, spec, call, device_info), enable_pdl=1,
    )  # fmt: skip
    given = [name for name in _TENSORS if getattr(call, name) is not None]
    return LogitsPlan(
        fn=fn,
        flat=list(flat),
        runs=bool(request.tokens and call.width),
        wide=len(k) <= 1 or k.stride(0) % CODE_UNIT == 0,
        boxes=in_boxes(call),
        dense=tuple(dense),
        put=tuple((name, getattr(_AT, name)) for name in given),
        bounds=AddressBounds.of(memory_of(call), {0}),
    )


def in_boxes(call: LogitsCall) -> bool:
    """Return whether blocks of keys are boxes of TMA, if rows of keys and their scales lie at multiples of 16 bytes:
    pages have whole blocks, and keys do not overlap."""
    k, scales = call.k, call.k_scale
    if scales is None:
        return len(k) > 0 and k.shape[1] % BLOCK == 0
    return len(k) > 0 and scales.stride(0) == 1 and k.stride(0) >= k.shape[2]


def ctas(request: IndexerRequest, spec: Any, call: LogitsCall, device_info: tuple[str, int] | None) -> int:
    """Return the CTAs of a launch: one per SM, or as many as there may be blocks of keys or rows to clean."""
    sms = 1 if device_info is None else device_info[1]
    tiles = request.tokens // call.next_n * -(-call.next_n // spec.rows)
    return max(1, min(sms, max(tiles * -(-request.count // BLOCK), request.tokens * call.clean)))


def bind(plan: LogitsPlan, call: LogitsCall) -> tuple[list[Any], torch.Tensor]:
    """Return the arguments of a launch, and the logits."""
    out = call.out
    if out is None:
        out = new_logits(call)
    else:
        addresses = [0 if t is None else t.data_ptr() for t in memory_of(call)]
        if addresses != plan.bounds.addresses and plan.bounds.may_overlap(addresses):
            validate(call)
    if not plan.runs:
        return plan.flat, out
    flat = plan.flat.copy()
    for field, at in plan.put:
        flat[at] = getattr(call, field)
    flat[_AT.out] = out
    for field in plan.dense:
        flat[getattr(_AT, field)] = getattr(call, field).contiguous()
    if flat[_AT.q].data_ptr() % CODE_UNIT:
        flat[_AT.q] = call.q.clone(memory_format=torch.contiguous_format)
    address = call.k.data_ptr()
    flat[_AT.wide_rows] = int(plan.wide and address % CODE_UNIT == 0)
    if call.table is None and (address % SCALE_UNIT or call.k.stride(0) % SCALE_UNIT and len(call.k) > 1):
        flat[_AT.k], flat[_AT.wide_rows] = call.k.clone(memory_format=torch.contiguous_format), 1
    apart = call.k_scale is None or call.k_scale.data_ptr() % CODE_UNIT == 0
    flat[_AT.boxes] = int(plan.boxes and apart and flat[_AT.wide_rows])
    return flat, out


FAMILY = KernelFamily(key_of, inputs_of, validate, plan_for, bind)


def serve(call: LogitsCall) -> torch.Tensor:
    """Run a call, and return the logits. It is the last step of all functions."""
    if not traced(call.q):
        return run(FAMILY, call)
    validate(call)
    if call.out is None:
        call = call._replace(out=new_logits(call))
    OPERATOR.record(call._asdict())
    return call.out


def _run(*flat: Any) -> None:
    run(FAMILY, LogitsCall(*flat))


OPERATOR = schema.define("indexer_logits", schema.arguments(LogitsCall, ("out",)), _run)
