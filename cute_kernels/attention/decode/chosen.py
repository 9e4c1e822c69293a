"""Keys that a token chooses one by one: which keys of a group exist.

The load warps make zeros of a slot that the cache does not have, but a zero is a score, too. A warp therefore looks at
the slots of its own keys, one group ahead, and hides those that do not exist, like any mask (`logits.transform`).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..kv import gather, pages
from .layout import keys

has_slots = gather.has_slots


class ChosenKeys(NamedTuple):
    """The slots of the keys that a warp computes next. op: the operand of K, the rows of which they number."""

    op: Any
    slots: gather.RowPageIds


def make(spec, plan):
    """Allocate `ChosenKeys`, None if tokens do not choose their keys."""
    if not has_slots(spec):
        return None
    op = plan.kv[pages.K]
    return ChosenKeys(op, gather.page_ids_of(spec, op, (keys(spec) + 31) // 32))


@cute.jit
def look_up(spec: cutlass.Constexpr, a, r, w, key: Int32):
    """Look up the slots of the group of keys that begins with `key`."""
    if const_expr(has_slots(spec)):
        found = pages.of_sequence(a, w.batch_idx, pages.K)
        gather.look_up_rows(spec, r.chosen.slots, found, w.sequence.kv_len, key)


def present(spec, r):
    """Return which keys of the group that was looked up exist, as bits of words of 32 keys; None without slots."""
    return gather.present(spec, r.chosen.op, r.chosen.slots, Int32(0), None) if has_slots(spec) else None
