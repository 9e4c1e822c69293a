"""The torch.library operators that merge states, for torch.compile and for tensors that are not plain.

The functions here are the last step of those of `cascade`. torch.func's transforms, which have no rule for an operator,
get torch operations.
"""

from typing import Any

import torch

from .. import reference
from ..plain import fake_of, traced, transformed, write
from . import plan
from .checks import validate_in_place, validate_pair, validate_states

SCHEMAS = {
    "merge_states": "(Tensor v, Tensor s) -> (Tensor, Tensor)",
    "merge_state": "(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b) -> (Tensor, Tensor)",
    "merge_state_in_place":
        "(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask) -> ()",
}  # fmt: skip
for name, schema in SCHEMAS.items():
    torch.library.define(f"cute_kernels::{name}", schema, tags=torch.Tag.pt2_compliant_tag)


def serve_states(v: Any, s: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not traced(v):
        return plan.states(v, s)
    validate_states(v, s)
    return reference.merge_states(v, s) if transformed() else torch.ops.cute_kernels.merge_states.default(v, s)


def serve_pair(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not traced(v_a):
        return plan.pair(v_a, s_a, v_b, s_b)
    validate_pair(v_a, s_a, v_b, s_b)
    if transformed():
        return reference.merge_state(v_a, s_a, v_b, s_b)
    return torch.ops.cute_kernels.merge_state.default(v_a, s_a, v_b, s_b)


def serve_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any) -> None:
    if not traced(v):
        plan.in_place(v, s, v_other, s_other, mask)
        return
    validate_in_place(v, s, v_other, s_other, mask)
    if transformed():
        plan.replace(v, s, mask, *reference.merge_state(v, s, v_other, s_other))
    else:
        operator = torch.ops.cute_kernels.merge_state_in_place.default
        write(operator, v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)


@torch.library.impl("cute_kernels::merge_states", ("cpu", "cuda"))
def _states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = plan.states(v, s)
    return out.contiguous(), lse.contiguous()


@torch.library.impl("cute_kernels::merge_state", ("cpu", "cuda"))
def _pair(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = plan.pair(*given)
    return out.contiguous(), lse.contiguous()


@torch.library.impl("cute_kernels::merge_state_in_place", ("cpu", "cuda"))
def _in_place(*given: Any) -> None:
    plan.in_place(*given)


@torch.library.register_fake("cute_kernels::merge_states")
def _fake_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (v.shape[0], *v.shape[2:])
    return v.new_empty(shape), s.new_empty(shape[:-1])


@torch.library.register_fake("cute_kernels::merge_state")
def _fake_pair(v_a: torch.Tensor, s_a: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)


torch.library.register_fake("cute_kernels::merge_state_in_place")(fake_of("cute_kernels::merge_state_in_place"))
