"""The torch operator of the top-k functions, for `torch.compile` and for tensors that are not plain.

It writes preallocated outputs. `serve` is the last step of all functions.
"""

from typing import Any

import torch

from ..host import schema
from ..host.checks import check_strided
from ..host.launch import run
from ..host.plain import refuse_grad as refuse
from ..host.plain import traced
from . import plan
from .checks import NAMES, PER_ROW, TOP_K, TopKCall, scalars, stated, validate, with_ints


def serve(call: TopKCall) -> plan.Results:
    """Return (out, values, indices) of a call."""
    if traced(call.scores):
        return trace(with_ints(call))
    if call.k.__class__ is not int or call.next_n.__class__ is not int or call.page_size.__class__ is not int:
        call = with_ints(call)
        validate(call)
    return run(plan.FAMILY, call)


def refuse_grad(call: TopKCall) -> None:
    """Raise on scores that require grad. All functions do so, though most return only integers."""
    if hasattr(call.scores, "requires_grad"):  # else they are not a tensor and are refused later
        refuse({NAMES[call.function]["scores"]: call.scores})


def trace(call: TopKCall) -> plan.Results:
    """Record a call: allocate its outputs, then call the operator. Returns (out, values, indices)."""
    refuse_grad(call)
    check_strided(NAMES[call.function]["scores"], call.scores, 2)
    scalars(call, call.scores.shape[1])
    if call.layout is not None:
        stated(call)
    out, values, indices, shape = call.out, None, None, (call.scores.shape[0], call.k)
    if call.function == TOP_K:
        values = call.scores.new_empty(shape)
        indices = call.scores.new_empty(shape, dtype=torch.int64)
    elif out is None and call.function not in PER_ROW:
        out = call.scores.new_empty(shape, dtype=torch.int32)
    given = {"out": out, "values": values, "indices": indices, "tie_break": int(call.tie_break)}
    OPERATOR.record(call._asdict() | given)
    return out, values, indices


def _run(*given: Any) -> None:
    run(plan.FAMILY, TopKCall(*given))


OPERATOR = schema.define("top_k_rows", schema.arguments(TopKCall, ("out", "raw", "values", "indices"), layout=""), _run)
