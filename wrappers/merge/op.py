"""The torch.library operators that merge states, for torch.compile and for tensors that are not plain.

The functions here are the last step of those of `cascade`. torch.func's transforms, which have no rule for an operator,
get torch operations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import reference
from ..host.plain import fake_of, traced, transformed, write
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


def in_place_operator(*given: Any) -> None:
    names = "v", "s", "v_other", "s_other", "mask"
    write(torch.ops.cute_kernels.merge_state_in_place.default, **dict(zip(names, given, strict=True)))


SERVED: dict[str, tuple[Callable[..., Any], ...]] = {  # function -> kernel, checks, torch operations, operator
    "merge_states": (
        plan.states, validate_states, reference.merge_states, torch.ops.cute_kernels.merge_states.default,
    ),
    "merge_state": (plan.pair, validate_pair, reference.merge_state, torch.ops.cute_kernels.merge_state.default),
    "merge_state_in_place": (plan.in_place, validate_in_place, plan.replace_by_reference, in_place_operator),
}  # fmt: skip


def serve(function: str, *given: Any) -> Any:
    """Run a call of a function of `cascade`."""
    kernel, validate, operations, operator = SERVED[function]
    if not traced(given[0]):
        return kernel(*given)
    validate(*given)
    return (operations if transformed() else operator)(*given)


def _run(function: str, *given: Any) -> Any:
    found = SERVED[function][0](*given)
    return found and tuple(t.contiguous() for t in found)


for name in SCHEMAS:
    torch.library.impl(f"cute_kernels::{name}", ("cpu", "cuda"), partial(_run, name))


@torch.library.register_fake("cute_kernels::merge_states")
def _fake_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (v.shape[0], *v.shape[2:])
    return v.new_empty(shape), s.new_empty(shape[:-1])


@torch.library.register_fake("cute_kernels::merge_state")
def _fake_pair(v_a: torch.Tensor, s_a: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)


torch.library.register_fake("cute_kernels::merge_state_in_place")(fake_of("cute_kernels::merge_state_in_place"))
