"""The torch.library operator of attention, for torch.compile and for tensors that are not plain: a problem, field by
field, whose outputs are given. `serve` is what all signatures end in."""

from typing import Any

import torch

from .. import fp4
from . import plan
from .problem import SEPARATE, Problem, new_requests

NAME = "cute_kernels::attention"
SCHEMA = """(
    str signature, str phase, Tensor q, Tensor k, Tensor v, Tensor page_table, Tensor kv_lens, Tensor? cu_seqlens_q,
    SymInt max_q_len, float scale, Tensor? scale_tensor, float out_scale, Tensor? out_scale_tensor, bool causal,
    SymInt window_left, float? soft_cap, Tensor? sinks, Tensor? k_scales, Tensor? v_scales, bool interleaved,
    Tensor? drafts, float? skip, Tensor(a!) out, Tensor(b!)? out_block_scales, SymInt out_block_start,
    float? out_sf_scale, Tensor(c!)? lse, bool batch_invariant, bool? enable_pdl) -> ()"""

FIELDS = tuple(argument.split()[-1] for argument in SCHEMA.strip(" ()\n->").split(","))

torch.library.define(NAME, SCHEMA.replace("\n", " "), tags=torch.Tag.pt2_compliant_tag)


def serve(p: Problem) -> Any:
    """What a public function returns."""
    return trace(p) if p.requests.facts is None else plan.run(p)


@torch.library.impl(NAME, ("cpu", "cuda"))
def _run(*flat: Any) -> None:
    given = dict(zip(FIELDS, flat, strict=True))
    table, lens, offsets = (given.pop(name) for name in ("page_table", "kv_lens", "cu_seqlens_q"))
    requests = new_requests(table, lens, offsets, SEPARATE)
    block_scales, start = given.pop("out_block_scales"), given.pop("out_block_start")
    if block_scales is not None:
        given["out"] = fp4.FP4Tensor(given["out"], block_scales, start)
    plan.run(Problem(requests=requests, **given))


@torch.library.register_fake(NAME)
def _fake(*flat: Any) -> None:
    """Nothing to infer: every output is an argument."""


def trace(p: Problem) -> Any:
    """What is recorded of a problem: allocation, then the operator."""
    out: Any = p.out
    shape, dtype, lse = (p.q.shape[0], p.q.shape[1], p.dim_vo), p.result_dtype, p.lse
    if out is None:
        if isinstance(dtype, str):
            out = fp4.empty(shape, p.q.device)
        else:
            out = torch.empty(shape, dtype=dtype, device=p.q.device)
    packed = isinstance(out, fp4.FP4Tensor)
    if lse is None and p.return_lse:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=p.q.device)
    given = p._asdict() | p.requests._asdict() | {"out": out.data if packed else out, "lse": lse}
    given |= {"out_block_scales": out.scale if packed else None}
    given |= {"out_block_start": out.scale_start_index if packed else 0}
    torch.ops.cute_kernels.attention(*(given[name] for name in FIELDS))
    if packed:
        out = fp4.FP4Tensor(out.data, out.scale, out.scale_start_index, shape)
    return (out, lse) if p.return_lse else out
