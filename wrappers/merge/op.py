"""The torch operators that merge states, for torch.compile and for tensors that are not plain.

`serve` is the last step of the functions of `cascade`. torch.func's transforms, which have no rule for an operator, get
torch operations.
"""

from functools import partial
from typing import Any

import torch

from ..host import schema
from ..host.launch import run
from ..host.plain import traced, transformed
from . import plan
from .checks import IN_PLACE, PAIR, STATES, MergeCall, validate


def serve(call: MergeCall) -> Any:
    """Run a call, and return (v, s) unless it merges in place."""
    if not traced(call.v):
        return run(plan.FAMILY, call)
    validate(call)
    if transformed():
        return plan.compute(call)
    operator = OPERATORS[call.function]
    if call.function == IN_PLACE:
        return operator.record(call._asdict())
    return operator.overload(**{name: getattr(call, name) for name in operator.fields})


def _run(function: str, *given: Any) -> Any:
    found = run(plan.FAMILY, MergeCall(function, *given))
    return found and tuple(t.contiguous() for t in found)


def _fake(v: torch.Tensor, s: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = v.shape[0], *v.shape[-2:]
    return v.new_empty(shape), s.new_empty(shape[:-1])


_NO_SECOND = {"v_other": "", "s_other": ""}
OPERATORS = {
    STATES: schema.define(
        STATES, schema.arguments(MergeCall, function="", mask="", **_NO_SECOND), partial(_run, STATES), _fake,
        "(Tensor, Tensor)",
    ),
    PAIR: schema.define(
        PAIR, schema.arguments(MergeCall, function="", mask=""), partial(_run, PAIR), _fake, "(Tensor, Tensor)"
    ),
    IN_PLACE: schema.define(IN_PLACE, schema.arguments(MergeCall, ("v", "s"), function=""), partial(_run, IN_PLACE)),
}  # fmt: skip
