"""The torch.library operator of attention, for torch.compile and for tensors that are not plain: a problem, field by
field, whose outputs are given. `serve` is what all signatures end in."""

from typing import Any

import torch

from .. import fp4
from ..checks import check_strided
from ..plain import no_backward, write
from ..scalars import split_scale
from . import checks, plan
from .problem import SEPARATE, Problem, Rope, listed_requests, new_requests

NAME = "cute_kernels::attention"
SCHEMA = """(
    str signature, str phase, Tensor q, Tensor k, Tensor v, Tensor page_table, Tensor kv_lens, Tensor? cu_seqlens_q,
    Tensor? kv_starts, str form, SymInt max_q_len, float scale, Tensor? scale_tensor, float out_scale,
    Tensor? out_scale_tensor, bool causal, SymInt window_left, float? soft_cap, Tensor? sinks, Tensor? k_scales,
    Tensor? v_scales, bool interleaved, Tensor? drafts, float? skip, Tensor(a!) out, Tensor(b!)? out_block_scales,
    SymInt out_block_start, float? out_sf_scale, Tensor(c!)? lse, bool batch_invariant, bool? enable_pdl,
    Tensor? custom_mask, Tensor? mask_starts, Tensor? alibi_slopes, float[]? rope) -> ()"""

TABLES = ("page_table", "kv_lens", "cu_seqlens_q", "kv_starts", "form")
FIELDS = tuple(argument.split()[-1] for argument in SCHEMA.strip(" ()\n->").split(","))

torch.library.define(NAME, SCHEMA.replace("\n", " "), tags=torch.Tag.pt2_compliant_tag)


_is_grad_enabled = torch.is_grad_enabled  # a module global: an attribute look-up saved is 20 ns


def serve(p: Problem) -> Any:
    """What a public function returns. In grad mode, a query, cache, sinks or slopes that require grad are refused:
    theirs would be lost. Other arguments are constants, as under torch.no_grad()."""
    if _is_grad_enabled():
        try:
            sinks, slopes = p.sinks, p.alibi_slopes
            if (p.q.requires_grad or p.k.requires_grad or p.v.requires_grad or sinks is not None and sinks.requires_grad
                    or slopes is not None and slopes.requires_grad):  # fmt: skip
                refuse_grad(p)
        except AttributeError:  # something is no tensor, which is refused later
            pass
    return trace(p) if p.requests.facts is None else plan.run(p)


def refuse_grad(p: Problem) -> None:
    """Raises on the first tensor that requires grad, of those whose grad would be lost."""
    for field in ("q", "k", "v", "sinks", "alibi_slopes"):
        if getattr(getattr(p, field), "requires_grad", False):
            raise no_backward(checks.names_of(p)(field))


@torch.library.impl(NAME, ("cpu", "cuda"))
def _run(*flat: Any) -> None:
    given = dict(zip(FIELDS, flat, strict=True))
    table, lens, offsets, starts, form = (given.pop(name) for name in TABLES)
    if form == "table":
        requests = new_requests(table, lens, offsets, SEPARATE)
    else:
        requests = listed_requests(table, lens, offsets, starts, form)
    given["rope"] = None if given["rope"] is None else Rope(*given["rope"])
    block_scales, start = given.pop("out_block_scales"), given.pop("out_block_start")
    if block_scales is not None:
        given["out"] = fp4.FP4Tensor(given["out"], block_scales, start)
    serve(_read_scales(Problem(requests=requests, **given)))


def _read_scales(p: Problem) -> Problem:
    """Put numbers in the place of the host's tensors, the values of which a trace did not know."""
    name = checks.names_of(p)
    for field in ("scale", "out_scale"):
        tensor = getattr(p, f"{field}_tensor")
        if tensor is not None:
            number, tensor = split_scale(name(field), tensor)
            p = p._replace(**{field: getattr(p, field) * number, f"{field}_tensor": tensor})
    return p


@torch.library.register_fake(NAME)
def _fake(*flat: Any) -> None:
    """Nothing to infer: every output is an argument."""


def trace(p: Problem) -> Any:
    """What is recorded of a problem: allocation, then the operator. What that would not see is checked before."""
    checks.scalars(p)
    check_strided(checks.names_of(p)("q"), p.q, 3)
    checks.outputs(p)
    out, lse = plan.outputs(p)
    packed = isinstance(out, fp4.FP4Tensor)
    given = p._asdict() | p.requests._asdict() | {"out": out.data if packed else out, "lse": lse}
    given |= {"out_block_scales": out.scale if packed else None}
    given |= {"out_block_start": out.scale_start_index if packed else 0}
    write(torch.ops.cute_kernels.attention.default, **{name: given[name] for name in FIELDS})
    return (out, lse) if p.return_lse else out
