"""Run a call that merges states: look up its plan and launch.

A kernel takes any strides, except of the last dimension of V, which is copied if its stride is not 1. Calls without
elements, and those on the CPU, run in torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_kernels.merge_states import dispatch, rows
from cute_kernels.merge_states.args import MergeArgs, fields
from cute_kernels.merge_states.request import MergeRequest

from .. import reference
from ..host import machine, overlap
from ..host.checks import check_apart, checking, raise_reason
from .checks import validate_in_place, validate_pair, validate_states

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_AT = MergeArgs(*range(len(MergeArgs._fields)))  # position of each argument; all specs have the first ones
_V, _S, _V_OUT, _S_OUT, _V_OTHER, _S_OTHER, _MASK = (
    _AT.v, _AT.s, _AT.v_out, _AT.s_out, _AT.v_other, _AT.s_other, _AT.mask
)  # fmt: skip
_new_empty, _uint8 = torch.Tensor.new_empty, torch.uint8  # module globals: each saves a look-up, 20 ns
_is_grad_enabled = torch.is_grad_enabled


class MergeReach(NamedTuple):
    """The bytes from the first to the last of each tensor of a call in place."""

    v: int = 0
    s: int = 0
    v_other: int = 0
    s_other: int = 0
    mask: int = 0


@dataclass(slots=True, eq=False)
class MergePlan:
    """A compiled kernel and all that a launch needs beyond the call's own tensors."""

    fn: Callable[..., Any]
    flat: list[Any]  # its arguments, except the states, the outputs and the mask
    v_shape: tuple[int, int, int]  # of the outputs
    s_shape: tuple[int, int]
    device: torch.device
    single_device: bool  # it is the only device of the process
    checked: bool  # every call is checked as if it had no plan
    copies: bool  # V has another last stride than 1
    reach: MergeReach = MergeReach()  # in place


def states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Serve `merge_states`."""
    here = machine.current
    try:  # the key omits what compiled code checks itself: the rank, dtype, and device of S
        key = "merge_states", v.get_device(), v.dtype, v.shape, v.stride(), s.shape
        plan = here.plans.get(key)
        grad = _is_grad_enabled() and (v.requires_grad or s.requires_grad)
    except (AttributeError, TypeError, RuntimeError):
        raise_reason(validate_states, v, s)
        raise
    if plan is None:
        validate_states(v, s)
        device_info = here.device_info(v.device)
        if device_info is None or not v.numel():
            return reference.merge_states(v, s)
        plan = plan_for(v, False, device_info)
        here.keep(key, plan)
    elif plan.checked or grad:
        validate_states(v, s)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):
            return states(v, s)
    flat, out, lse = plan.flat.copy(), _new_empty(v, plan.v_shape), _new_empty(s, plan.s_shape)
    flat[_V], flat[_S], flat[_V_OUT], flat[_S_OUT] = v.contiguous() if plan.copies else v, s, out, lse
    try:
        plan.fn(*flat)
    except Exception:
        raise_reason(validate_states, v, s)
        raise
    return out, lse


def pair(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Serve `merge_state`."""
    here = machine.current
    try:
        key = (
            "merge_state", v_a.get_device(), v_a.dtype, v_a.shape, v_a.stride(), s_a.shape, v_b.shape, v_b.stride(),
            s_b.shape,
        )  # fmt: skip
        plan = here.plans.get(key)
        grad = _is_grad_enabled() and (v_a.requires_grad or s_a.requires_grad or v_b.requires_grad or s_b.requires_grad)
    except (AttributeError, TypeError, RuntimeError):
        raise_reason(validate_pair, v_a, s_a, v_b, s_b)
        raise
    if plan is None:
        validate_pair(v_a, s_a, v_b, s_b)
        device_info = here.device_info(v_a.device)
        if device_info is None or not v_a.numel():
            return reference.merge_state(v_a, s_a, v_b, s_b)
        plan = plan_for(v_a, True, device_info)
        plan.copies = gapped(v_a) or gapped(v_b)
        here.keep(key, plan)
    elif plan.checked or grad:
        validate_pair(v_a, s_a, v_b, s_b)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):
            return pair(v_a, s_a, v_b, s_b)
    flat, out, lse = plan.flat.copy(), _new_empty(v_a, plan.v_shape), _new_empty(s_a, plan.s_shape)
    try:
        if plan.copies:
            flat[_V], flat[_V_OTHER] = v_a.contiguous(), v_b.contiguous()
        else:
            flat[_V], flat[_V_OTHER] = v_a, v_b
        flat[_S], flat[_V_OUT], flat[_S_OUT], flat[_S_OTHER] = s_a, out, lse, s_b
        plan.fn(*flat)
    except Exception:
        raise_reason(validate_pair, v_a, s_a, v_b, s_b)
        raise
    return out, lse


def in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """Serve `merge_state_in_place`."""
    here = machine.current
    try:
        key = (
            "merge_state_in_place", v.get_device(), v.dtype, v.shape, v.stride(), s.shape, s.stride(), v_other.shape,
            v_other.stride(), s_other.shape, s_other.stride(),
            None if mask is None else (mask.dtype, mask.shape, mask.stride()),
        )  # fmt: skip
        plan = here.plans.get(key)
        grad = _is_grad_enabled() and (
            v.requires_grad or s.requires_grad or v_other.requires_grad or s_other.requires_grad
        )
    except (AttributeError, TypeError, RuntimeError):
        raise_reason(validate_in_place, v, s, v_other, s_other, mask)
        raise
    if plan is None:
        validate_in_place(v, s, v_other, s_other, mask)
        device_info = here.device_info(v.device)
        if device_info is None or not v.numel():
            return replace_by_reference(v, s, v_other, s_other, mask)
        plan = plan_for(v, True, device_info)
        plan.copies = gapped(v) or gapped(v_other)
        given = (v, s, v_other, s_other) if mask is None else (v, s, v_other, s_other, mask)
        plan.reach = MergeReach(*map(overlap.reach, given))
        here.keep(key, plan)
    elif plan.checked or grad:
        validate_in_place(v, s, v_other, s_other, mask)
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):
            return in_place(v, s, v_other, s_other, mask)
    try:
        if near(plan.reach, v, s, v_other, s_other, mask):
            check_apart({"v": v, "s": s}, {"v_other": v_other, "s_other": s_other, "mask": mask})
        if plan.copies:
            validate_in_place(v, s, v_other, s_other, mask)
            return replace(v, s, mask, *pair(v, s, v_other, s_other))
        flat = plan.flat.copy()
        flat[_V], flat[_S], flat[_V_OUT], flat[_S_OUT], flat[_V_OTHER], flat[_S_OTHER] = v, s, v, s, v_other, s_other
        if mask is not None:
            flat[_MASK] = mask.view(_uint8)
        plan.fn(*flat)
    except Exception:
        raise_reason(validate_in_place, v, s, v_other, s_other, mask)
        raise
    return None


def near(reach: MergeReach, v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> bool:
    """Return whether an output may share memory with another tensor."""
    at_v, at_s, at_v_other, at_s_other = v.data_ptr(), s.data_ptr(), v_other.data_ptr(), s_other.data_ptr()
    v_bytes, s_bytes, v_other_bytes, s_other_bytes, mask_bytes = reach
    if (-s_bytes < at_s - at_v < v_bytes or -v_other_bytes < at_v_other - at_v < v_bytes
            or -s_other_bytes < at_s_other - at_v < v_bytes or -v_other_bytes < at_v_other - at_s < s_bytes
            or -s_other_bytes < at_s_other - at_s < s_bytes):  # fmt: skip
        return True
    if mask is None:
        return False
    at_mask = mask.data_ptr()
    return -mask_bytes < at_mask - at_v < v_bytes or -mask_bytes < at_mask - at_s < s_bytes


def replace(v: Any, s: Any, mask: Any, new_v: torch.Tensor, new_s: torch.Tensor) -> None:
    """Copy new states to v and s, of the rows of the mask."""
    if mask is not None:
        kept = mask == 0
        new_v, new_s = torch.where(kept[:, None, None], v, new_v), torch.where(kept[:, None], s, new_s)
    v.copy_(new_v)
    s.copy_(new_s)


def replace_by_reference(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> None:
    """Serve `merge_state_in_place` by torch operations."""
    replace(v, s, mask, *reference.merge_state(v, s, v_other, s_other))


def gapped(v: torch.Tensor) -> bool:
    """Return whether the elements of a row are not neighbours."""
    return v.stride(-1) != 1 and v.shape[-1] > 1


def plan_for(v: torch.Tensor, is_pair: bool, device_info: tuple[str, int]) -> MergePlan:
    """Return the plan of a valid call for a device's (architecture, SM count). v: of a state, or of all.

    Raises NotImplementedError if no kernel serves the call.
    """
    tokens, heads, dim = v.shape[0], *v.shape[-2:]
    op, spec = dispatch.select(MergeRequest(DTYPES[v.dtype], is_pair, tokens * heads), device_info[0])
    lanes = rows.lanes(dim, spec.elements)
    values: dict[str, Any] = dict.fromkeys(fields(spec)) | {"lanes_log2": lanes.bit_length() - 1, "enable_pdl": 1}
    if is_pair:
        values["mask"] = machine.current.empty(v.device, _uint8)
    return MergePlan(
        fn=machine.current.kernel(op, spec, device_info[0]),
        flat=list(values.values()),
        v_shape=(tokens, heads, dim),
        s_shape=(tokens, heads),
        device=v.device,
        single_device=machine.current.device_count() == 1,
        checked=checking(),
        copies=gapped(v),
    )
