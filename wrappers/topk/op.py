"""The torch.library operator of the top-k functions, for `torch.compile` and for tensors that are not plain: mutates
preallocated outputs."""

from typing import Any

import torch

from .checks import PAGE_TABLE, RAGGED, TOP_K, Call, stated
from .plan import run

NAME = "cute_kernels::top_k_rows"
# The fields of Call in order, but the last.
SCHEMA = """(
    str function, Tensor scores, SymInt k, Tensor? starts, Tensor? lengths, Tensor(a!)? out, Tensor(b!)? raw,
    Tensor(c!)? values, Tensor(d!)? indices, Tensor? table, Tensor? row_to_batch, Tensor? table_starts,
    Tensor? offsets, SymInt next_n, int page_size, int tie_break) -> ()"""

torch.library.define(NAME, SCHEMA.replace("\n", " "), tags=torch.Tag.pt2_compliant_tag)


@torch.library.impl(NAME, ("cpu", "cuda"))
def _run(*args: Any) -> None:
    run(Call(*args))


@torch.library.register_fake(NAME)
def _fake(*args: Any) -> None:
    """Nothing to infer: every output is an argument."""


def trace(call: Call) -> tuple[Any, Any, Any]:
    """What `torch.compile` records for a call: allocation, then the operator. (out, values, indices)."""
    if call.layout is not None:
        stated(call)
    out, values, indices = call.out, None, None
    shape, device = (call.scores.shape[0], call.k), call.scores.device
    if call.function == TOP_K:
        values = torch.empty(shape, dtype=call.scores.dtype, device=device)
        indices = torch.empty(shape, dtype=torch.int64, device=device)
    elif out is None and call.function in (PAGE_TABLE, RAGGED):
        out = torch.empty(shape, dtype=torch.int32, device=device)
    torch.ops.cute_kernels.top_k_rows(
        call.function, call.scores, call.k, call.starts, call.lengths, out, call.raw, values, indices, call.table,
        call.row_to_batch, call.table_starts, call.offsets, call.next_n, call.page_size, int(call.tie_break),
    )  # fmt: skip
    return out, values, indices
