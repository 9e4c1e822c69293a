"""Plan and bind the calls that merge states, for `host.launch`: the key of a call, its kernel, and its arguments.

A kernel takes any strides, except of the last dimension of V, which is copied if its stride is not 1. Calls without
elements, and those on the CPU, run in torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from cute_kernels.merge_states import dispatch, rows
from cute_kernels.merge_states.args import MergeArgs, fields
from cute_kernels.merge_states.request import MergeRequest

from .. import reference
from ..host import machine
from ..host.launch import KernelFamily, Plan, prototypes, select
from ..host.overlap import AddressBounds
from .checks import IN_PLACE, PAIR, STATES, MergeCall, validate

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_AT = MergeArgs(*range(len(MergeArgs._fields)))  # position of each argument; all specs have the first ones
_V, _S, _V_OUT, _S_OUT, _V_OTHER, _S_OTHER, _MASK = (
    _AT.v, _AT.s, _AT.v_out, _AT.s_out, _AT.v_other, _AT.s_other, _AT.mask
)  # fmt: skip
_STATES = slice(1, 5)  # v, s, v_other and s_other of a call
_empty_like, _uint8 = torch.empty_like, torch.uint8  # module globals: each saves a look-up, 20 ns


@dataclass(slots=True, eq=False, kw_only=True)
class MergePlan(Plan):
    """A kernel that merges states, and its arguments except the states, the outputs and the mask."""

    like_v: torch.Tensor  # (n, heads, head_dim), see `prototypes`
    like_s: torch.Tensor  # (n, heads)
    bounds: AddressBounds  # of the tensors of a call in place


def key_of(call: MergeCall) -> tuple[Any, ...]:
    """Return what the plan of a call depends on, except what the compiled call checks itself: ranks, most dtypes, and
    devices."""
    function, v, s, v_other, s_other, mask = call
    if function == STATES:
        return function, v.get_device(), v.dtype, v.shape, v.stride(), s.shape
    if function == PAIR:
        return (
            function, v.get_device(), v.dtype, v.shape, v.stride(), s.shape, v_other.shape, v_other.stride(),
            s_other.shape,
        )  # fmt: skip
    return (
        function, v.get_device(), v.dtype, v.shape, v.stride(), s.shape, s.stride(), v_other.shape, v_other.stride(),
        s_other.shape, s_other.stride(),
        None if mask is None else (mask.dtype, mask.shape, mask.stride()),
    )  # fmt: skip


def request_of(call: MergeCall) -> MergeRequest:
    """Return the request for the kernel of a valid call."""
    tokens, heads = call.v.shape[0], call.v.shape[-2]
    return MergeRequest(DTYPES[call.v.dtype], call.function != STATES, tokens * heads)


def plan_for(call: MergeCall, device_info: tuple[str, int]) -> MergePlan | None:
    """Return the plan of a valid call for a device's (architecture, SM count), None if there are no elements.

    Raises NotImplementedError if no kernel serves the call.
    """
    v, is_pair = call.v, call.function != STATES
    if not v.numel():
        return None
    tokens, (heads, dim), tensors = v.shape[0], v.shape[-2:], (*call[_STATES], call.mask)
    fn, spec = select(dispatch, request_of(call), device_info[0])
    lanes = rows.lanes(dim, spec.elements)
    values: dict[str, Any] = dict.fromkeys(fields(spec)) | {"lanes_log2": lanes.bit_length() - 1, "enable_pdl": 1}
    if is_pair:
        values["mask"] = machine.current.empty(v.device, _uint8)
    likes, kept = prototypes(v.device, (v.dtype, (tokens, heads, dim)), (torch.float32, (tokens, heads)))
    return MergePlan(
        fn=partial(on_copies, fn) if any(map(gapped, (v, call.v_other))) else fn,
        flat=list(values.values()),
        kept=kept,
        like_v=likes[0],
        like_s=likes[1],
        bounds=AddressBounds.of(tensors, {0, 1}),
    )


def gapped(v: torch.Tensor | None) -> bool:
    """Return whether the elements of a row are not neighbours."""
    return v is not None and v.stride(-1) != 1 and v.shape[-1] > 1


def on_copies(fn: Callable[..., Any], *given: Any) -> None:
    """Launch a kernel on copies without gaps in the rows of V, and copy the result back if it is V itself."""
    flat, v, in_place = list(given), given[_V], given[_V_OUT] is given[_V]
    flat[_V] = v.contiguous()
    if _V_OTHER < len(flat):
        flat[_V_OTHER] = flat[_V_OTHER].contiguous()
    if in_place:
        flat[_V_OUT] = flat[_V]
    fn(*flat)
    if in_place:
        v.copy_(flat[_V])


def bind(plan: MergePlan, call: MergeCall) -> tuple[list[Any], tuple[torch.Tensor, torch.Tensor] | None]:
    """Return the arguments of a launch, and (v, s) for a function that returns them."""
    function, v, s, v_other, s_other, mask = call
    flat = plan.flat.copy()
    flat[_V], flat[_S] = v, s
    if function != STATES:
        flat[_V_OTHER], flat[_S_OTHER] = v_other, s_other
    if function != IN_PLACE:
        flat[_V_OUT], flat[_S_OUT] = out = _empty_like(plan.like_v), _empty_like(plan.like_s)
        return flat, out
    at_mask = 0 if mask is None else mask.data_ptr()
    addresses = [v.data_ptr(), s.data_ptr(), v_other.data_ptr(), s_other.data_ptr(), at_mask]
    if addresses != plan.bounds.addresses and plan.bounds.may_overlap(addresses):
        validate(call)
    if mask is not None:
        flat[_MASK] = mask.view(_uint8)
    flat[_V_OUT], flat[_S_OUT] = v, s
    return flat, None


def compute(call: MergeCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Serve a valid call by torch operations."""
    function, v, s, v_other, s_other, mask = call
    if function == STATES:
        return reference.merge_states(v, s)
    new_v, new_s = reference.merge_state(v, s, v_other, s_other)
    if function == PAIR:
        return new_v, new_s
    if mask is not None:
        kept = mask == 0
        new_v, new_s = torch.where(kept[:, None, None], v, new_v), torch.where(kept[:, None], s, new_s)
    v.copy_(new_v)
    s.copy_(new_s)
    return None


FAMILY = KernelFamily(key_of, itemgetter(_STATES), validate, plan_for, bind, compute)
