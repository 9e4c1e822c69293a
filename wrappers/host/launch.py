"""The way from a call to its kernel, the same for every family but attention: key -> plan -> arguments -> launch.

A family says what a plan depends on, which calls are valid, which kernel serves a call, and where its tensors go
(`KernelFamily`). The rules stand here:

- Look-up: a call whose key was seen before costs one dictionary look-up and the launch. The compiled kernel itself
  checks ranks, dtypes, devices and strides.
- Validation: a call is validated when its plan is made. If a later call fails, it is validated then, so that the error
  names the argument, its value and what is allowed.
- Gradients: in grad mode, a tensor that requires grad is refused, since its gradient would be lost.
- Devices: a launch is made on the device of the first tensor.
- Captures: no value is read in one, and no memory that is allocated in one is kept.
- CUTE_KERNELS_CHECK=1: each call is validated, and its values are read, before the launch.

Nothing here synchronises or reads values of a device, unless that variable is set.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import machine, scratch
from .checks import checking, raise_reason

_is_grad_enabled = torch.is_grad_enabled  # a module global: saves an attribute look-up, 20 ns


@dataclass(slots=True, eq=False, kw_only=True)
class Plan:
    """A kernel, and all that its launch needs beyond the tensors of a call. A family may add fields.

    fn: the compiled kernel, or a function that takes the same arguments. flat: these arguments; those that calls give
    are empty, in the form that the kernel converts fastest. runs: whether there is anything to compute. kept: whether
    later calls may use the plan, unless the reference serves them.
    """

    fn: Callable[..., Any]
    flat: list[Any]
    runs: bool = True
    kept: bool = True
    device: torch.device = field(init=False)
    single_device: bool = field(init=False)  # it is the only device of the process
    checked: bool = field(init=False)  # every call is checked as if it had no plan


def nothing(call: Any) -> None:
    """Check nothing of a call."""


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """The part of the way that a family of kernels states itself.

    key: returns what a plan depends on, except what the compiled kernel checks itself; may raise on arguments that are
    not valid. inputs: returns the tensors with gradients that would be lost, or None in their places; the first one
    decides the device. validate: raises on the first argument that does not fit, from types, shapes, dtypes, strides
    and devices alone. plan: returns the plan of a valid call for a device's (architecture, SM count). bind: returns the
    arguments of a launch and the result of the call. reference: computes a call on a device without kernels, or one for
    which `plan` returns None; without it, `plan` is asked with None for such a device. values: raises on the first
    value of a valid call that the kernel would clamp.
    """

    key: Callable[[Any], tuple[Any, ...]]
    inputs: Callable[[Any], Sequence[Any]]
    validate: Callable[[Any], Any]
    plan: Callable[[Any, Any], Any]
    bind: Callable[[Any, Any], tuple[Any, Any]]
    reference: Callable[[Any], Any] | None = None
    values: Callable[[Any], None] = nothing


def run(family: KernelFamily, call: Any) -> Any:
    """Run a call that nothing traces and nobody has checked, and return its result."""
    here = machine.current
    try:
        key = family.key(call)
        plan = here.plans.get(key)
        if _is_grad_enabled():
            for t in family.inputs(call):
                if t is not None and t.requires_grad:
                    family.validate(call)  # refuses it
    except (AttributeError, TypeError, RuntimeError):
        raise_reason(family.validate, call)
        raise
    if plan is None:
        family.validate(call)
        plan = new_plan(family, call, key)
        if plan is None:
            return family.reference(call)  # type: ignore[misc]
    if not plan.single_device and here.current_device() != plan.device.index:
        with here.on(plan.device):  # only the current device can be asked whether its stream captures
            return run(family, call)
    if plan.checked and here.uncaptured_stream(plan.device) is not None:
        family.validate(call)
        family.values(call)
    try:
        flat, result = family.bind(plan, call)
        if plan.runs:
            plan.fn(*flat)
    except Exception:
        raise_reason(family.validate, call)
        raise
    return result


def new_plan(family: KernelFamily, call: Any, key: tuple[Any, ...]) -> Any:
    """Make the plan of a valid call, and keep it unless a graph owns its memory or the reference serves the call."""
    here, device = machine.current, family.inputs(call)[0].device
    device_info = here.device_info(device)
    plan = family.plan(call, device_info) if device_info or family.reference is None else None
    if plan is not None:
        plan.device, plan.checked = device, checking() and device.type != "meta"
        plan.single_device = device_info is None or here.device_count() == 1
        if device_info is not None and plan.kept:
            here.keep(key, plan)
    return plan


def bindable(family: KernelFamily, call: Any) -> Any:
    """Return the plan of a call that is repeated with other tensors, after a check of the call.

    Returns None if each repetition must be served like a new call: by the reference, with checks, in a capture that
    owns memory of the plan, or on a device that is not the current one; or if there is nothing to launch.
    """
    family.validate(call)
    here, key = machine.current, family.key(call)
    plan = here.plans.get(key) or new_plan(family, call, key)
    if plan is None or plan.checked or not (plan.runs and plan.kept) or here.device_info(plan.device) is None:
        return None
    return plan if plan.single_device or here.current_device() == plan.device.index else None


def prototypes(device: torch.device, *forms: tuple[torch.dtype, tuple[int, ...]]) -> tuple[list[torch.Tensor], bool]:
    """Return one expanded element for each (dtype, shape), and whether a plan with these tensors may be kept.

    `empty_like` of such a tensor takes 0.5 us less than `empty`. In a capture, its memory belongs to the graph.
    """

    def make() -> list[torch.Tensor]:
        return [torch.empty(1, dtype=dtype, device=device).expand(shape) for dtype, shape in forms]

    here = machine.current
    kept = here.device_info(device) is not None and here.uncaptured_stream(device) is not None
    return scratch.kept(make, device) if kept else make(), kept


def select(dispatch: Any, request: Any, arch: str, name: str = "") -> tuple[Callable[..., Any], Any]:
    """Return the compiled kernel that serves a request, and its spec.

    dispatch: the module of the family that chooses. Raises NotImplementedError with every kernel's reason to refuse if
    there is none, and the name of the argument in front, if one is given.
    """
    try:
        op, spec = dispatch.select(request, arch)
    except NotImplementedError as error:
        if not name:
            raise
        raise NotImplementedError(f"{name}: {error}") from None
    return machine.current.kernel(op, spec, arch), spec
