"""The torch.library operator of attention, for torch.compile and for tensors that are not plain.

It takes an attention call field by field, with its outputs given. `serve` is the last step of all signatures.
"""

from typing import Any

import torch

from .. import fp4
from ..host import schema
from ..host.checks import check_strided
from ..host.plain import no_backward
from ..host.scalars import split_scale
from . import checks, plan
from .call import (
    SEPARATE,
    AttentionCall,
    Rope,
    SequenceBatch,
    listed_sequences,
    new_sequences,
    slot_sequences,
)

_is_grad_enabled, _uint8 = torch.is_grad_enabled, torch.uint8  # module globals: each saves a look-up, 20 ns


def serve(call: AttentionCall) -> Any:
    """Run an attention call and return the result of its public function."""
    call = prepared(call)
    return trace(call) if call.requests.shape_id is None else plan.run(call)


def prepared(call: AttentionCall) -> AttentionCall:
    """Return the call with scale factors of e4m3, if they are given in uint8.

    In grad mode, a query, cache, sinks or slopes that require grad are refused, since their gradient would be lost.
    Other arguments are constants, as under torch.no_grad().
    """
    k_scales, v_scales = call.k_scales, call.v_scales
    if k_scales is not None and _uint8 in (getattr(k_scales, "dtype", None), getattr(v_scales, "dtype", None)):
        call = call._replace(k_scales=fp4.as_e4m3(k_scales), v_scales=fp4.as_e4m3(v_scales))
    if _is_grad_enabled():
        try:
            sinks, slopes = call.sinks, call.alibi_slopes
            if (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad
                    or sinks is not None and sinks.requires_grad
                    or slopes is not None and slopes.requires_grad
                    or call.q_rope is not None and call.q_rope.requires_grad
                    or call.k_rope is not None and call.k_rope.requires_grad):  # fmt: skip
                refuse_grad(call)
        except AttributeError:  # something is not a tensor and is refused later
            pass
    return call


def refuse_grad(call: AttentionCall) -> None:
    """Raise on the first tensor that requires grad, among those with a gradient that would be lost."""
    for field in ("q", "k", "v", "sinks", "alibi_slopes", "q_rope", "k_rope"):
        if getattr(getattr(call, field), "requires_grad", False):
            raise no_backward(checks.names_of(call)(field))


def _run(*flat: Any) -> None:
    given = dict(zip(OPERATOR.fields, flat, strict=True))
    table, lens, offsets, starts, form = (given.pop(name) for name in _TABLES)
    if form == "table":
        requests = new_sequences(table, lens, offsets, SEPARATE)
    elif form == "slots":
        requests = slot_sequences(table[:, 0], lens)
    else:
        requests = listed_sequences(table, lens, offsets, starts, form)
    given["rope"] = None if given["rope"] is None else Rope(*given["rope"])
    block_scales, start = given.pop("out_block_scales"), given.pop("out_block_start")
    if block_scales is not None:
        given["out"] = fp4.FP4Tensor(given["out"], block_scales, start)
    serve(_read_scales(AttentionCall(requests=requests, **given)))


def _read_scales(call: AttentionCall) -> AttentionCall:
    """Replace the host's scale tensors, which had no value in a trace, by numbers."""
    name = checks.names_of(call)
    for field in ("scale", "out_scale"):
        tensor = getattr(call, f"{field}_tensor")
        if tensor is not None:
            number, tensor = split_scale(name(field), tensor)
            call = call._replace(**{field: getattr(call, field) * number, f"{field}_tensor": tensor})
    return call


def trace(call: AttentionCall) -> Any:
    """Record a call: check what the operator would not see, allocate the outputs, then call the operator."""
    checks.scalars(call)
    check_strided(checks.names_of(call)("q"), call.q, 3)
    checks.outputs(call)
    out, lse = plan.outputs(call)
    packed = isinstance(out, fp4.FP4Tensor)
    given = call._asdict() | call.requests._asdict() | {"out": out.data if packed else out, "lse": lse}
    given |= {"out_block_scales": out.scale if packed else None}
    given |= {"out_block_start": out.scale_start_index if packed else 0}
    OPERATOR.record(given)
    return (out, lse) if call.return_lse else out


_REQUESTS = schema.arguments(SequenceBatch, batch="", shape_id="", unsigned="")
_TABLES = tuple(argument.split()[-1] for argument in _REQUESTS)
OPERATOR = schema.define(
    "attention",
    schema.arguments(
        AttentionCall, ("lse",), requests=", ".join(_REQUESTS), return_lse="", out_dtype="", rope="float[]? rope",
        out="Tensor(out!) out, Tensor(out_block_scales!)? out_block_scales, SymInt out_block_start",
    ),
    _run,
)  # fmt: skip
