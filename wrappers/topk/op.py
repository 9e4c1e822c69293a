"""The torch.library operator of the top-k functions, for `torch.compile` and for tensors that are not plain.

It writes preallocated outputs.
"""

from typing import Any

import torch

from ..host.checks import check_strided
from ..host.plain import fake_of, known, no_backward, traced, write
from . import plan
from .checks import NAMES, PAGE_TABLE, RAGGED, TOP_K, TopKCall, scalars, stated, with_ints

NAME = "cute_kernels::top_k_rows"
# The fields of TopKCall in order, except the last.
SCHEMA = """(
    str function, Tensor scores, SymInt k, Tensor? starts, Tensor? lengths, Tensor(a!)? out, Tensor(b!)? raw,
    Tensor(c!)? values, Tensor(d!)? indices, Tensor? table, Tensor? row_to_batch, Tensor? table_starts,
    Tensor? offsets, SymInt next_n, int page_size, int tie_break, bool sorted) -> ()"""

torch.library.define(NAME, SCHEMA.replace("\n", " "), tags=torch.Tag.pt2_compliant_tag)


_is_grad_enabled = torch.is_grad_enabled  # a module global: saves an attribute look-up, 20 ns


def serve(call: TopKCall) -> tuple[Any, Any, Any]:
    """Return (out, values, indices) of a call."""
    if _is_grad_enabled() and getattr(call.scores, "requires_grad", False):  # saves a function call, 50 ns
        refuse_grad(call)
    return trace(with_ints(call)) if traced(call.scores) else plan.run(call)


def refuse_grad(call: TopKCall) -> None:
    """Raise on scores that require grad. All functions do so, though most return only integers."""
    try:
        if call.scores.requires_grad:
            raise no_backward(NAMES[call.function]["scores"])
    except AttributeError:  # scores are not a tensor and are refused later
        pass


@torch.library.impl(NAME, ("cpu", "cuda"))
def _run(*args: Any) -> None:
    call = TopKCall(**dict(zip(TopKCall._fields, args)))
    if _is_grad_enabled():
        refuse_grad(call)
    plan.run(call)


torch.library.register_fake(NAME)(fake_of(NAME))


def trace(call: TopKCall) -> tuple[Any, Any, Any]:
    """Record a call: allocate its outputs, then call the operator. Returns (out, values, indices)."""
    check_strided(NAMES[call.function]["scores"], call.scores, 2)
    scalars(call, call.scores.shape[1])
    if call.layout is not None:
        stated(call)
    out, values, indices, shape = call.out, None, None, (call.scores.shape[0], call.k)
    if call.function == TOP_K:
        values = call.scores.new_empty(shape)
        indices = call.scores.new_empty(shape, dtype=torch.int64)
    elif out is None and call.function in (PAGE_TABLE, RAGGED):
        out = call.scores.new_empty(shape, dtype=torch.int32)
    given = call._asdict() | {"out": out, "values": values, "indices": indices, "tie_break": int(call.tie_break)}
    del given["layout"]
    given |= known(given, "sorted")
    write(torch.ops.cute_kernels.top_k_rows.default, **given)
    return out, values, indices
