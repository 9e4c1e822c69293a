"""The order of a unit's instructions: those that do the same to other registers run at once, on a row for each.

An instruction of numpy takes a microsecond, however few threads there are, and kernels repeat one on dozens of
registers: the scores of a row, the sums of a tile."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from .forms import PtxOp
from .parse import PtxInstruction

REGISTER = re.compile(r"%[\w$@]+")
LEAST, MOST = 4, 32  # instructions that run at once: fewer gain nothing, more leave the cache


def order(part: Sequence[PtxInstruction], ops: Sequence[PtxOp | None]) -> list[list[int]]:
    """Return the positions of the instructions as they run; those in one list do the same and run at once.

    Only neighbours change places that compute registers from registers, without a guard."""
    out: list[list[int]] = []
    free: list[int] = []
    for i, (x, op) in enumerate(zip(part, ops)):
        if op is not None and op.alike is not None and len(op.outs) == 1 and not x.guard:
            free.append(i)
            continue
        out += sorted_by_level(free, ops)
        free = []
        out.append([i])
    return out + sorted_by_level(free, ops)


def sorted_by_level(free: list[int], ops: Sequence[PtxOp | None]) -> list[list[int]]:
    """Return these positions in groups, each behind those that it depends on.

    The level of an instruction is one more than the highest of those that write what it reads, or that read or write
    what it writes; so instructions of one level are independent of each other."""
    if len(free) < LEAST:
        return [[i] for i in free]
    written: dict[str, int] = {}  # register -> level of the last write, and of the last read
    read: dict[str, int] = {}
    levels: dict[int, dict[object, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i in free:
        op = ops[i]
        assert op is not None
        sources, target = registers_of(op), op.outs[0][0]
        level = 1 + max((written.get(name, -1) for name in sources), default=-1)
        level = max(level, written.get(target, -1) + 1, read.get(target, -1) + 1)
        for name in sources:
            read[name] = max(level, read.get(name, -1))
        written[target] = level
        levels[level][op.alike, len(op.ins)].append(i)
    return [group for level in sorted(levels) for same in levels[level].values() for group in cut(same)]


def registers_of(op: PtxOp) -> list[str]:
    return [name for text, _ in op.ins for name in REGISTER.findall(text)]


def cut(same: list[int]) -> Iterator[list[int]]:
    """Cut equal instructions into groups of the allowed size."""
    for first in range(0, len(same), MOST):
        group = same[first : first + MOST]
        yield from [group] if len(group) >= LEAST else [[i] for i in group]
