"""Run a call of a top-k function: look up its plan, allocate the outputs that are not given, and launch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.topk import dispatch
from cute_kernels.topk.args import TopKArgs
from cute_kernels.topk.request import TopKKernelRequest

from .. import reference
from ..host import machine, overlap, scratch
from ..host.checks import check_apart, checking, raise_reason
from .checks import DTYPES, NAMES, PER_ROW, TOP_K, WINDOWS, TopKCall, TopKTieBreak, validate, with_ints
from .values import check as check_values

AT = TopKArgs(*range(len(TopKArgs._fields)))  # position of each argument in a launch
_SCORES, _STARTS, _LENGTHS, _OUT, _RAW, _VALUES, _INDICES, _TABLE = AT[:8]
_ROW_TO_BATCH, _TABLE_STARTS, _OFFSETS = AT.row_to_batch, AT.table_starts, AT.offsets
_empty_like = torch.empty_like  # a module global: saves an attribute look-up, 20 ns


@dataclass(slots=True, eq=False)
class TopKLaunchPlan:
    """A compiled kernel and all that a launch needs beyond the call's own tensors."""

    fn: Callable[..., Any]  # the compiled kernel, or the reference
    sort: Callable[..., Any] | None  # sorts values and indices if the caller asks for it; takes `SortArgs`
    flat: list[Any]  # its arguments, `TopKArgs`; optional ones are empty, in the form that `fn` converts fastest
    device: torch.device
    single_device: bool  # it is the only device of the process
    copies: bool  # the scores are copied first, as the kernel cannot read their layout
    rows: int
    checked: bool  # bounds and rows of the table are read and checked before a launch
    scores_bytes: int  # from the first to the last
    out_bytes: int  # the same for `out`, given or new
    raw_bytes: int
    like_out: torch.Tensor  # (R, k) int32, one element expanded: empty_like is 0.5 us cheaper than empty
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


def plan_of(call: TopKCall) -> TopKLaunchPlan:
    """Return the plan of a call that nobody has checked, made if its key is new."""
    here = machine.current
    try:
        key = key_of(call)
        plan = here.plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        raise_reason(validate, with_ints(call))
        raise
    if plan is None:
        call = with_ints(call)
        validate(call)
        device_info = here.device_info(call.scores.device)
        plan = plan_for(call, device_info)
        # The reference checks nothing, so its calls are validated each time. A graph owns what a capture allocates.
        if device_info is not None and here.uncaptured_stream(plan.device) is not None:
            here.keep(key, plan)
    return plan


def run(call: TopKCall) -> tuple[Any, Any, Any]:
    """Return (out, values, indices) of a call; None for those that its function does not return."""
    if call.k.__class__ is not int or call.next_n.__class__ is not int or call.page_size.__class__ is not int:
        call = with_ints(call)
        validate(call)
    here, plan = machine.current, plan_of(call)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):
            return run(call)
    try:
        return launch(plan, bind(plan, call), call)
    except Exception:
        raise_reason(validate, with_ints(call))
        raise


def bind(plan: TopKLaunchPlan, call: TopKCall) -> list[Any]:
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


def launch(plan: TopKLaunchPlan, flat: list[Any], call: TopKCall) -> tuple[Any, Any, Any]:
    """Launch a call that is bound to flat, and return its results."""
    scores, out, values, indices = call.scores, call.out, call.values, call.indices
    flat[_SCORES] = scores.clone(memory_format=torch.contiguous_format) if plan.copies else scores
    if call.function == TOP_K:
        if values is None:
            values, indices = _empty_like(plan.like_values), _empty_like(plan.like_indices)
        flat[_VALUES], flat[_INDICES] = values, indices
    else:
        if out is not None or call.raw is not None:
            _place_outputs(plan, flat, call)
        if out is None and call.function not in PER_ROW:
            flat[_OUT] = out = _empty_like(plan.like_out)
    if plan.checked and (plan.device.type == "cpu" or not machine.current.is_capturing()):
        validate(call)
        check_values(call)
    if plan.rows:
        plan.fn(*flat)
        if plan.sort is not None:
            plan.sort(values, indices, 1)
    return out, values, indices


def _place_outputs(plan: TopKLaunchPlan, flat: list[Any], call: TopKCall) -> None:
    """Set the outputs that are given, after a check that they overlap neither the scores nor each other."""
    scores, out, raw, names = call.scores, call.out, call.raw, NAMES[call.function]
    at, at_out = scores.data_ptr(), 0
    if out is not None:
        at_out = out.data_ptr()
        if -plan.out_bytes < at_out - at < plan.scores_bytes:  # rare
            check_apart({"out": out}, {names["scores"]: scores})
        flat[_OUT] = out
    if raw is not None:
        at_raw = raw.data_ptr()
        if -plan.raw_bytes < at_raw - at < plan.scores_bytes:
            check_apart({names.get("raw", "raw"): raw}, {names["scores"]: scores})
        if out is not None and -plan.raw_bytes < at_raw - at_out < plan.out_bytes:
            check_apart({names.get("raw", "raw"): raw}, {"out": out})
        flat[_RAW] = raw


def request_of(call: TopKCall, sms: int) -> TopKKernelRequest:
    """Return the kernel request of a valid call on a GPU of `sms` SMs."""
    rows, width = call.scores.shape
    return TopKKernelRequest(DTYPES[call.scores.dtype], rows, width, call.k, sms)


def plan_for(call: TopKCall, device_info: tuple[str, int] | None) -> TopKLaunchPlan:
    """Return the plan of a valid call for a device's (architecture, SM count), None for the reference.

    Raises NotImplementedError if no kernel serves the call.
    """
    scores, k = call.scores, call.k
    (rows, width), device = scores.shape, scores.device
    fn: Callable[..., Any] = reference.top_k_rows
    sort: Callable[..., Any] | None = reference.sort_rows if call.sorted else None
    if device_info is not None:
        arch, sms = device_info
        try:
            op, spec = dispatch.select(request_of(call, sms), arch)
        except NotImplementedError as error:
            field = "k" if any(arch in kernel.ARCHS for kernel in dispatch.KERNELS.values()) else "scores"
            raise NotImplementedError(f"{NAMES[call.function].get(field, field)}: {error}") from None
        fn = machine.current.kernel(op, spec, arch)
        sorter = dispatch.sort_spec(request_of(call, sms), arch) if call.sorted else None
        if sorter is not None:  # beyond the sort kernel's largest k the reference sorts: in torch, on the device
            sort = machine.current.kernel(dispatch.SORT, sorter, arch)

    def likes() -> list[torch.Tensor]:
        types = torch.int32, scores.dtype, torch.int64
        return [torch.empty(1, dtype=dtype, device=device).expand(rows, k) for dtype in types]

    keeps = device_info is not None and machine.current.uncaptured_stream(device) is not None
    like_out, like_values, like_indices = scratch.kept(likes, device) if keeps else likes()
    empty = partial(machine.current.empty, device)
    none = empty(torch.int32)
    flat = TopKArgs(
        scores=None, starts=none, lengths=none, out=empty(torch.int32, k), raw=empty(torch.int32, k),
        values=empty(scores.dtype, k), indices=empty(torch.int64, k), table=empty(torch.int32, 1), row_to_batch=none,
        table_starts=none, offsets=none, window=WINDOWS[call.function], next_n=call.next_n,
        page_shift=call.page_size.bit_length() - 1, k=k, last_ties=int(call.tie_break == TopKTieBreak.LARGE),
        enable_pdl=1,
    )  # fmt: skip
    return TopKLaunchPlan(
        fn=fn,
        sort=sort,
        flat=list(flat),
        device=device,
        single_device=device_info is None or machine.current.device_count() == 1,
        copies=width != 1 and scores.stride(1) != 1,  # only per-row functions, and rows without elements
        rows=rows,
        checked=checking() and device.type != "meta",
        scores_bytes=overlap.reach(scores),
        out_bytes=4 * rows * k if call.out is None else overlap.reach(call.out),
        raw_bytes=0 if call.raw is None else overlap.reach(call.raw),
        like_out=like_out,
        like_values=like_values,
        like_indices=like_indices,
    )
