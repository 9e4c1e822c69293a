"""Selection of keys by their logits: computed, chosen from, and overwritten by those of the next tokens."""

from typing import Any, NamedTuple

import torch

from ..host.checks import check_apart, check_integer
from ..host.launch import bindable
from ..host.plain import traced
from ..host.scalars import integer
from ..topk import op as topk_op
from ..topk import plan as topk_plan
from ..topk.checks import LARGEST, TopKCall
from . import logits
from .logits import LogitsCall

SCRATCH = 1 << 28  # bytes of logits that are held at a time
TILE = 8  # tokens of a prompt that share the loads of keys, at most


class SelectionCall(NamedTuple):
    """Logits, and the selection from them, without scores. units: parts that a pass may begin with, requests or tokens;
    step: those of a pass. scores: receives the logits of what is chosen, -inf for the rest, if columns of the logits
    are chosen as they are."""

    logits: LogitsCall
    top_k: TopKCall
    units: int
    step: int
    scores: torch.Tensor | None = None


def apart(name: str, out: torch.Tensor, given: dict[str, Any]) -> None:
    """Check that an output has no memory in common with what else is given."""
    if not traced(out):
        check_apart({name: out}, {name: t for name, t in given.items() if isinstance(t, torch.Tensor)})


def number_of_keys(top_k: Any) -> int:
    """Return top_k after a check."""
    k = check_integer("top_k", integer(top_k), 1)
    if k > LARGEST:
        raise ValueError(f"top_k: {k}, must be at most {LARGEST}")
    return k


def rows_of_pass(call: LogitsCall, scratch_bytes: Any) -> int:
    """Return how many rows of logits so many bytes hold."""
    size = check_integer("scratch_bytes", integer(scratch_bytes), 0)
    return size // max(logits.ROW_BYTES, 4 * call.width)


def tokens_of_pass(call: LogitsCall, scratch_bytes: Any) -> int:
    """Return how many tokens of a prompt a pass has: whole tiles, if so many bytes hold one."""
    return max(rows_of_pass(call, scratch_bytes) // TILE * TILE, 1)


def reads_logits(call: SelectionCall) -> bool:
    """Return whether logits are computed: of at most top_k keys, the selection reads none."""
    return call.scores is not None or call.logits.width > call.top_k.k


def first_call(call: SelectionCall) -> LogitsCall | TopKCall:
    """Return the call of the first kernel of a selection. Raise as `serve` on bad arguments of the logits."""
    if reads_logits(call):
        return call.logits
    logits.validate(call.logits)
    return call.top_k._replace(scores=logits.new_logits(call.logits))


def serve(call: SelectionCall) -> torch.Tensor:
    """Run a selection pass by pass, and return its result, (tokens, top_k)."""
    scored, chosen, units, step, scores = call
    logits.validate(scored)
    q, each = scored.q, scored.next_n if scored.table is not None else 1
    out = chosen.out
    if out is None:
        out = q.new_empty((q.shape[0], chosen.k), dtype=torch.int32)
    if not units or not scored.width:
        if scores is not None:
            scores.fill_(-torch.inf)
        return out.fill_(-1)
    scratch = logits.new_logits(scored._replace(q=q[: min(step, units) * each]))
    for first, count in passes_of(units, step):
        rows, parts = slice(first * each, (first + count) * each), slice(first, first + count)
        some = scratch[: count * each]
        pick = part_of(chosen, units, rows, parts)._replace(scores=some, out=out[rows])
        if not first and not traced(q):
            bindable(topk_plan.FAMILY, pick)  # refuses it before anything is launched
        tokens = count if scored.table is None else scored.next_n
        if reads_logits(call):
            logits.serve(part_of(scored, units, rows, parts)._replace(out=some, next_n=tokens))
        topk_op.serve(pick)
        if scores is not None:
            found = some.gather(1, out[rows].clamp(0, scored.width - 1).long())
            scores[rows] = torch.where(out[rows] < 0, -torch.inf, found)
    return out


def passes_of(units: int, step: int) -> list[tuple[int, int]]:
    """Return the first part of each pass, and how many it has. A range over all parts would make their number a
    constant of a graph of torch.compile."""
    if units <= step:
        return [(0, units)]
    return [(first, min(step, units - first)) for first in range(0, units, step)]


def part_of(call: Any, count: int, rows: slice, units: slice) -> Any:
    """Return a call for some of its tokens, `rows`, which are the parts `units` of all `count`."""
    fields = {}
    for name in ("q", "weights", "starts", "ends", "lengths", "table"):
        given = getattr(call, name, None)
        if given is not None:
            of_units = name == "table" or name in ("ends", "lengths") and given.shape[0] == count
            fields[name] = given[units if of_units else rows]
    return call._replace(**fields)
