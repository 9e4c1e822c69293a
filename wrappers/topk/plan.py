"""Plan and bind the calls of top-k, for `host.launch`: the key of a call, its kernel, its arguments and its results."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from cute_kernels.topk import dispatch
from cute_kernels.topk.args import TopKArgs
from cute_kernels.topk.request import TopKKernelRequest

from .. import reference
from ..host import machine
from ..host.launch import KernelFamily, Plan, prototypes, select
from ..host.overlap import AddressBounds
from .checks import DTYPES, NAMES, PER_ROW, TOP_K, WINDOWS, TopKCall, TopKTieBreak, validate
from .values import check as check_values

AT = TopKArgs(*range(len(TopKArgs._fields)))  # position of each argument in a launch
_SCORES, _STARTS, _LENGTHS, _OUT, _RAW, _VALUES, _INDICES, _TABLE = AT[:8]
_ROW_TO_BATCH, _TABLE_STARTS, _OFFSETS = AT.row_to_batch, AT.table_starts, AT.offsets
_empty_like = torch.empty_like  # a module global: saves an attribute look-up, 20 ns
Results = tuple[Any, Any, Any]  # out, values, indices; None for those that a function does not return


@dataclass(slots=True, eq=False, kw_only=True)
class TopKPlan(Plan):
    """A kernel of top-k, its arguments except the tensors of a call, and what its outputs look like."""

    bounds: AddressBounds  # of the scores, `out` and `raw`
    like_out: torch.Tensor  # (R, k) int32, see `prototypes`
    like_values: torch.Tensor  # (R, k), the scores' dtype
    like_indices: torch.Tensor  # (R, k) int64


def key_of(call: TopKCall) -> tuple[Any, ...]:
    """Return all that the plan of a call depends on.

    It leaves out all that compiled code checks itself: ranks, the dtypes of outputs, devices.
    """
    scores, starts, lengths, out, raw, table, offsets = (
        call.scores, call.starts, call.lengths, call.out, call.raw, call.table, call.offsets,
    )  # fmt: skip
    rare = None  # most calls have none of these
    if out is not None or raw is not None or starts is not None or table is not None or call.row_to_batch is not None:
        table_starts, row_to_batch = call.table_starts, call.row_to_batch
        rare = (
            None if starts is None else (starts.numel(), starts.dtype),
            None if table is None else (table.shape, table.dtype),
            None if row_to_batch is None else (row_to_batch.numel(), row_to_batch.dtype),
            None if table_starts is None else (table_starts.numel(), table_starts.dtype),
            None if out is None else (out.shape, out.is_contiguous() or out.stride()),
            None if raw is None else (raw.shape, raw.is_contiguous() or raw.stride()),
        )
    return (
        call.function, scores.get_device(), scores.dtype, scores.shape, scores.is_contiguous() or scores.stride(),
        call.k, call.next_n, call.page_size, call.tie_break, call.tie_break.__class__, call.sorted, call.layout,
        None if lengths is None else (lengths.numel(), lengths.dtype),
        None if offsets is None else (offsets.numel(), offsets.dtype), rare,
    )  # fmt: skip


def request_of(call: TopKCall, sms: int) -> TopKKernelRequest:
    """Return the kernel request of a valid call on a GPU of `sms` SMs."""
    rows, width = call.scores.shape
    return TopKKernelRequest(DTYPES[call.scores.dtype], rows, width, call.k, sms)


def plan_for(call: TopKCall, device_info: tuple[str, int] | None) -> TopKPlan:
    """Return the plan of a valid call for a device's (architecture, SM count), None for the reference.

    Raises NotImplementedError if no kernel serves the call.
    """
    scores, k = call.scores, call.k
    (rows, width), device = scores.shape, scores.device
    likes, kept = prototypes(device, *((dtype, (rows, k)) for dtype in (torch.int32, scores.dtype, torch.int64)))
    empty = partial(machine.current.empty, device)
    none = empty(torch.int32)
    flat = TopKArgs(
        scores=None, starts=none, lengths=none, out=empty(torch.int32, k), raw=empty(torch.int32, k),
        values=empty(scores.dtype, k), indices=empty(torch.int64, k), table=empty(torch.int32, 1), row_to_batch=none,
        table_starts=none, offsets=none, window=WINDOWS[call.function], next_n=call.next_n,
        page_size=call.page_size, k=k, last_ties=int(call.tie_break == TopKTieBreak.LARGE),
        enable_pdl=1,
    )  # fmt: skip
    fn = kernel_of(call, device_info)
    if width != 1 and scores.stride(1) != 1:  # only per-row functions, and rows without elements
        fn = partial(on_a_copy, fn)
    return TopKPlan(
        fn=fn,
        flat=list(flat),
        runs=rows > 0,
        kept=kept,
        bounds=AddressBounds.of((scores, call.out, call.raw), {1, 2}),
        like_out=likes[0],
        like_values=likes[1],
        like_indices=likes[2],
    )


def kernel_of(call: TopKCall, device_info: tuple[str, int] | None) -> Callable[..., Any]:
    """Return what computes a call: the kernel, with one that sorts its results if the caller asks for it."""
    fn: Callable[..., Any] = reference.top_k_rows
    sort: Callable[..., Any] = reference.sort_rows
    if device_info is not None:
        arch, sms = device_info
        request, served = request_of(call, sms), any(arch in kernel.ARCHS for kernel in dispatch.KERNELS.values())
        field = "k" if served else "scores"
        fn, _ = select(dispatch, request, arch, NAMES[call.function].get(field, field))
        sorter = dispatch.sort_spec(request, arch) if call.sorted else None
        if sorter is not None:  # beyond the sort kernel's largest k the reference sorts: in torch, on the device
            sort = machine.current.kernel(dispatch.SORT, sorter, arch)
    return partial(then_sorted, fn, sort) if call.sorted else fn


def then_sorted(fn: Callable[..., Any], sort: Callable[..., Any], *flat: Any) -> None:
    """Launch a kernel, then one that sorts values and indices."""
    fn(*flat)
    sort(flat[_VALUES], flat[_INDICES], 1)


def on_a_copy(fn: Callable[..., Any], scores: torch.Tensor, *rest: Any) -> None:
    """Launch a kernel that cannot read the layout of the scores."""
    fn(scores.clone(memory_format=torch.contiguous_format), *rest)


def bind(plan: TopKPlan, call: TopKCall) -> tuple[list[Any], Results]:
    """Return the arguments of a launch, and the results of the call."""
    flat = bind_inputs(plan, call)
    return flat, bind_scores(plan, flat, call)


def bind_inputs(plan: TopKPlan, call: TopKCall) -> list[Any]:
    """Return the arguments of a launch with the call's tensors, except the scores and the outputs."""
    flat = plan.flat.copy()
    if call.function == TOP_K:
        return flat
    flat[_LENGTHS] = call.lengths
    if call.starts is not None:
        flat[_STARTS] = call.starts
    if call.table is not None:
        flat[_TABLE] = call.table
    if call.row_to_batch is not None:
        flat[_ROW_TO_BATCH] = call.row_to_batch
    if call.table_starts is not None:
        flat[_TABLE_STARTS] = call.table_starts
    if call.offsets is not None:
        flat[_OFFSETS] = call.offsets
    return flat


def bind_scores(plan: TopKPlan, flat: list[Any], call: TopKCall) -> Results:
    """Put the scores and the outputs of a call, new unless they are given, in their places, and return its results."""
    flat[_SCORES] = call.scores
    if call.function == TOP_K:
        values, indices = call.values, call.indices
        if values is None:
            values, indices = _empty_like(plan.like_values), _empty_like(plan.like_indices)
        flat[_VALUES], flat[_INDICES] = values, indices
        return None, values, indices
    out, raw = call.out, call.raw
    if out is not None or raw is not None:
        at_out, at_raw = 0 if out is None else out.data_ptr(), 0 if raw is None else raw.data_ptr()
        addresses = [call.scores.data_ptr(), at_out, at_raw]
        if addresses != plan.bounds.addresses and plan.bounds.may_overlap(addresses):
            validate(call)
    if raw is not None:
        flat[_RAW] = raw
    if out is None and call.function not in PER_ROW:
        out = _empty_like(plan.like_out)
    if out is not None:
        flat[_OUT] = out
    return out, None, None


FAMILY = KernelFamily(key_of, itemgetter(slice(1, 2)), validate, plan_for, bind, values=check_values)
