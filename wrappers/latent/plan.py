"""Plan and bind the calls that write rows of latent attention, for `host.launch`."""

from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, get_type_hints

import torch

from cute_kernels import dtypes
from cute_kernels.cache_write.args import INDICES
from cute_kernels.latent import dispatch, write
from cute_kernels.latent.args import INTERLEAVED, LatentArgs, fields
from cute_kernels.latent.request import LatentRequest
from cute_kernels.latent.spec import LatentSpec
from cute_kernels.records import INDEX

from .. import reference
from ..host import machine
from ..host.launch import KernelFamily, Plan, select
from ..host.overlap import AddressBounds
from ..host.schema import MaybeTensor
from .call import LatentCall
from .checks import E4M3, OUTPUTS, first_of, in_place, may_be_one, validate

DTYPES = {getattr(torch, dtypes.TORCH[name]): name for name in ("bf16", "fp16")}
NUMBERS = ("norm_eps", "norm_offset", "scale", "q_scale", "weight_scale")  # of a call, which are no part of its key
INDEXER_ALONE = ("weights", "weights_out", "weight_scale")  # arguments of an indexer, which have no other name
MEMORY = (*OUTPUTS, "kv", "pe", "q", "q_pe", "weights")
IN_PLACE = (("pe", "pe_out"), ("q_pe", "q_out"))  # an input, and the output that it may be
INPUTS = ("kv", "pe", "q", "q_pe", "scale_ptr", "q_scale_ptr", "weight", "bias", "rope_table", "weights", *OUTPUTS)
AS_GIVEN = ("kv", "pe", "slots", "batch_indices", "positions", "page_table", "kv_indices", "kv_indptr", "cu_seqlens",
            "kv_lens", "weight", "rope_positions", "q", "q_pe", "pe_out", "scale_ptr", "q_scale_ptr", "bias", "weights",
            "weights_out", *NUMBERS)  # fmt: skip  # fields of a call that a launch takes by the same name
_uint8, _int32, _int64 = torch.uint8, torch.int32, torch.int64
_AT = {name: i for i, name in enumerate(LatentCall._fields)}
_HINTS = get_type_hints(LatentCall, include_extras=True)
_is_tensor = {name: hint is MaybeTensor for name, hint in _HINTS.items()}
# fields of which a kernel checks the strides
_VECTORS = ("slots", "batch_indices", "positions", "kv_indices", "kv_indptr", "cu_seqlens", "kv_lens", "weight",
            "rope_positions", "scale_ptr", "q_scale_ptr", "bias")  # fmt: skip
_LIKE_ROWS = ("pe", "q", "q_pe", "pe_out", "weights", "weights_out")  # a kernel checks their dtypes
_vectors, _like_rows = (itemgetter(*map(_AT.__getitem__, names)) for names in (_VECTORS, _LIKE_ROWS))
_tensors = itemgetter(
    *(i for name, i in _AT.items() if _is_tensor[name] and name not in (*_VECTORS, *_LIKE_ROWS))
)  # of a call
_values = itemgetter(*(i for name, i in _AT.items() if not (_is_tensor[name] or name in (*NUMBERS, "index"))))
_memory = itemgetter(*map(_AT.__getitem__, MEMORY))
AS_IT_IS, AS_WORDS, AS_ONE, AS_BYTES = range(4)  # how a tensor of a call is given to a launch


@dataclass(slots=True, eq=False, kw_only=True)
class LatentPlan(Plan):
    """A kernel that writes rows, and its arguments except the tensors and the numbers of a call."""

    put: tuple[tuple[int, int, int, int], ...]  # what calls give: (0, or 1 of an indexer; position of the field, and of
    # the argument; AS_IT_IS, ...)
    bounds: AddressBounds  # of MEMORY
    alike: tuple[tuple[int, int], ...]  # positions in MEMORY of an input and an output that may be one
    unused: tuple[int, ...]  # positions in MEMORY of caches without rows to write


def parts_of(call: LatentCall) -> tuple[LatentCall, ...]:
    """Return a call, and that of the indexer's rows of the same launch."""
    return (call,) if call.index is None else (call, call.index)


def inputs_of(call: LatentCall) -> tuple[Any, ...]:
    """Return the tensors with gradients that would be lost, the one that decides the device first."""
    return (first_of(call), *(getattr(part, field) for part in parts_of(call) for field in INPUTS))


def key_of(call: LatentCall) -> tuple[Any, ...]:
    """Return what the plan of a call depends on."""
    last = call.kv_last_page_len  # no kernel sees it
    key: list[Any] = [first_of(call).get_device(), None if last is None else last.device]
    for part in parts_of(call):
        key.append(_values(part))
        key += [None if t is None else (t.dtype, t.shape, t.stride()) for t in _tensors(part)]
        key += [None if t is None else (t.shape, t.stride()) for t in _like_rows(part)]
        key += [None if t is None else (t.dtype, t.shape) for t in _vectors(part)]
    return tuple(key)


def memory_of(call: LatentCall) -> list[Any]:
    """Return the tensors that may share no memory; a part that is rotated in place counts once."""
    found = []
    for part in parts_of(call):
        own = [*_memory(part)]
        for x, out in IN_PLACE:
            if in_place(getattr(part, x), getattr(part, out)):
                own[MEMORY.index(x)] = None
        if part.kv is None:
            own[MEMORY.index("cache")] = None
        found += own
    return found


def written_of(call: LatentCall) -> set[int]:
    """Return the positions in `memory_of` of what the call writes."""
    return {i + len(MEMORY) * part for part in range(len(parts_of(call))) for i in range(len(OUTPUTS))}


def request_of(call: LatentCall) -> LatentRequest:
    """Return the request for the kernel of a valid call."""
    first, joined = first_of(call), call.index is not None
    latent, rotated, *of_query = (0 if t is None else t.shape[-1] for t in (call.kv, call.pe, call.q, call.q_pe))
    rows = first.shape[0] * sum(1 + heads_of(part) for part in parts_of(call))
    sizes = latent, rotated, (of_query[0], of_query[1])
    return LatentRequest(DTYPES[first.dtype], call.record, *sizes, rows, joined)


def heads_of(call: LatentCall) -> int:
    """Return the heads of a call's queries."""
    return 0 if call.q_pe is None else call.q_pe.shape[1]


def warps_of(call: LatentCall) -> int:
    """Return the warps that would have a row each, or several of an indexer."""
    tokens, index = first_of(call).shape[0], call if call.record == INDEX else call.index
    rows = 0 if index is call else tokens * (1 + heads_of(call))
    if index is not None:
        rows += -(-tokens * (1 + heads_of(index)) * write.INDEX_LANES // write.WARP)
    return rows


def alike_of(call: LatentCall) -> tuple[tuple[int, int], ...]:
    """Return the positions in `memory_of` of an input and an output that are one tensor if they have one address."""
    found = []
    for i, part in enumerate(parts_of(call)):
        for x, out in IN_PLACE:
            a, b = getattr(part, x), getattr(part, out)
            if a is not None and b is not None and may_be_one(a, b):
                found.append((MEMORY.index(x) + len(MEMORY) * i, MEMORY.index(out) + len(MEMORY) * i))
    return tuple(found)


def wide_of(call: LatentCall) -> list[str]:
    """Return the index tensors of int64."""
    return [name for name in INDICES if getattr(getattr(call, name), "dtype", None) is _int64]


def defaults(call: LatentCall) -> dict[str, Any]:
    """Return the arguments that a launch takes for the tensors that a call lacks, and those that it does not give."""
    first, heads = first_of(call), heads_of(call)
    dtype, rotated = first.dtype, 0 if call.pe is None else call.pe.shape[1]
    empty = partial(machine.current.empty, first.device)
    return dict.fromkeys(LatentArgs._fields, empty(_int32)) | dict(
        kv=empty(dtype, 0), pe=empty(dtype, 0), cache=empty(_uint8, 1, 4), pe_cache=empty(_uint8, 1, 4),
        places=call.places, wide=sum(1 << INDICES.index(name) for name in wide_of(call)),
        page_table=empty(_int32, 1), weight=empty(dtype), bias=empty(dtype), scale_ptr=empty(torch.float32),
        q_scale_ptr=empty(torch.float32), rope_table=empty(torch.float32, 0), rope_rows=empty(dtype, 0),
        rope=INTERLEAVED * (call.interleaved or call.rope_table is None), q=empty(dtype, heads, 0),
        q_pe=empty(dtype, heads, 0), q_out=empty(dtype, heads, 1), q_fp8=empty(E4M3, heads, 1),
        pe_out=empty(dtype, rotated), enable_pdl=1, power_of_two=int(call.power_of_two),
        weights=empty(torch.float32, heads), weights_out=empty(torch.float32, heads),
    )  # fmt: skip


def given_of(call: LatentCall) -> list[tuple[str, str]]:
    """Return (field, argument) of what a call gives."""
    found = [(field, field) for field in AS_GIVEN if getattr(call, field) is not None]
    if call.kv is not None:
        found += [(field, field) for field in ("cache", "pe_cache") if getattr(call, field) is not None]
    if call.rope_table is not None:
        found.append(("rope_table", "rope_table" if call.rope_table.dtype is torch.float32 else "rope_rows"))
    if call.q_out is not None:
        found.append(("q_out", "q_fp8" if call.q_out.dtype is E4M3 else "q_out"))
    return found


def plan_for(call: LatentCall, device_info: tuple[str, int] | None) -> LatentPlan:
    """Return the plan of a valid call for a device's (architecture, SM count), None for the reference.

    Raises NotImplementedError if no kernel serves the call.
    """
    first, request = first_of(call), request_of(call)
    spec = LatentSpec(request.dtype, request.record, request.joined)
    fn: Any = partial(reference.write_latent, spec)
    if device_info is not None:
        fn, spec = select(dispatch, request, device_info[0])
    names, values = fields(spec), defaults(call)
    values["ctas"] = write.grid(warps_of(call), 1 if device_info is None else device_info[1])
    put = [(0, field, names.index(name)) for field, name in given_of(call) if name in names]
    parts = parts_of(call)
    if call.index is not None:
        values |= {f"i_{name}": value for name, value in defaults(call.index).items()}
        values |= {name: value for name, value in defaults(call.index).items() if name in ("weights", "weights_out")}
        for field, name in given_of(call.index):
            own = name if name in INDEXER_ALONE else f"i_{name}"
            put += [(1, field, names.index(own))] if own in names else []
        put = [entry for entry in put if entry[0] or entry[1] not in INDEXER_ALONE]
    return LatentPlan(
        fn=fn,
        flat=[values[name] for name in names],
        put=tuple((i, _AT[field], at, form_of(parts[i], field)) for i, field, at in put),
        runs=bool(first.shape[0] and (call.kv is not None or heads_of(call))),
        bounds=AddressBounds.of(memory_of(call), written_of(call)),
        alike=alike_of(call),
        unused=tuple(MEMORY.index("cache") + len(MEMORY) * i for i, part in enumerate(parts) if part.kv is None),
    )


def bind(plan: LatentPlan, call: LatentCall) -> tuple[list[Any], None]:
    """Return the arguments of a launch."""
    if not plan.runs:
        return plan.flat, None
    parts: Any = (call,) if call.index is None else (call, call.index)
    addresses = [0 if t is None else t.data_ptr() for part in parts for t in _memory(part)]
    for x, out in plan.alike:
        if addresses[x] == addresses[out]:
            addresses[x] = 0
    for cache in plan.unused:
        addresses[cache] = 0
    if addresses != plan.bounds.addresses and plan.bounds.may_overlap(addresses):
        validate(call)
    flat = plan.flat.copy()
    for i, field, at, form in plan.put:
        value = parts[i][field]
        if form != AS_IT_IS:
            value = words(value) if form == AS_ONE else value.view(_int32 if form == AS_WORDS else _uint8)
        flat[at] = value
    return flat, None


def form_of(call: LatentCall, field: str) -> int:
    """Return how a field of a call is given to a launch."""
    value = getattr(call, field)
    dtype = getattr(value, "dtype", None)
    if field in INDICES:
        return AS_IT_IS if dtype is not _int64 else AS_ONE if value.shape == (1,) else AS_WORDS
    return AS_BYTES if field in ("cache", "pe_cache") and dtype is not _uint8 else AS_IT_IS


def words(index: torch.Tensor) -> torch.Tensor:
    """Return an index tensor of int64 as its words."""
    if index.shape == (1,):  # torch refuses to view one element with another stride than 1
        index = index.as_strided((1,), (1,))
    return index.view(_int32)


FAMILY = KernelFamily(key_of, inputs_of, validate, plan_for, bind)
