"""Forms in which the lanes of a warp exchange values: shfl, vote, match, redux, elect, activemask."""

import re
from functools import cache
from typing import Any

import numpy as np

from .faults import Fault
from .forms import WARP, PtxOp, effect, form
from .machine import Threads
from .numbers import count_nonzero
from .parse import PtxInstruction
from .translate import dtype_of

U32 = np.uint32
ALL = U32(0xFFFFFFFF)
SYNC = "Parallel Synchronization and Communication Instructions"
LANES = np.arange(32)


def lanes(t: Threads, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (warps, 32) values by lane, and a mask of the lanes that execute the instruction."""
    if t.whole:
        return values.reshape(-1, 32), everyone(t.count // 32)
    index = t.index
    warp = np.searchsorted(t.warps, t.warp)
    there = np.zeros((len(t.warps), 32), bool)
    there[warp, index & 31] = True
    table = np.zeros(there.shape, values.dtype)
    table[warp, index & 31] = values
    return table, there


@cache
def everyone(warps: int) -> np.ndarray:
    out = np.ones((warps, 32), bool)
    out.flags.writeable = False
    return out


def scatter(t: Threads, table: np.ndarray) -> np.ndarray:
    """Convert values by warp and lane to values by thread."""
    return table.reshape(-1) if t.whole else table[np.searchsorted(t.warps, t.warp), t.index & 31]


def check_members(t: Threads, x: PtxInstruction, mask: np.ndarray) -> np.ndarray:
    """Return the (warps, 32) lanes that take part. Raise Fault if an executing lane is missing from its own member
    mask."""
    if t.whole and not count_nonzero(mask != ALL):
        return everyone(t.count // 32)
    table, there = lanes(t, mask)
    members = (table >> LANES.astype(U32)[None, :]) & U32(1)
    if not members.all() and (there & (members == 0)).any():
        row, lane = np.argwhere(there & (members == 0))[0].tolist()
        raise Fault(f"{t.say(x).of([int(t.warps[row])])}: lane {lane} executes it and its member mask leaves it out")
    if not t.whole:
        asked = np.bitwise_or.reduce(np.where(there, table, U32(0)), 1)
        named = ((asked[:, None] >> LANES.astype(U32)) & U32(1)).astype(bool)
        missing = named & ~there & ~t.machine.done.reshape(-1, 32)[t.warps]
        if missing.any():
            row, lane = np.argwhere(missing)[0].tolist()
            warp = int(t.warps[row])
            stands = t.machine.stands(32 * warp + lane)
            raise Fault(f"{t.say(x).of([warp])}: lane {lane} is in the member mask and {stands}")
    return there


@form(r"shfl\.sync\.(idx|bfly|up|down)\.b32", "Data Movement and Conversion Instructions: shfl.sync", level=WARP)
def shuffle(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    kind = f[1]
    value, _, valid = x.args[0].partition("|")

    def sources(by: Any, clamp: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the lane that each lane reads, and whether it lies inside the segment."""
        segment = (clamp >> 8) & 31
        low = LANES & segment
        limit = low | (clamp & 31 & ~segment)
        if kind == "idx":
            source = low | (by & ~segment)
        else:
            source = LANES ^ by if kind == "bfly" else LANES - by if kind == "up" else LANES + by
        inside = source >= limit if kind == "up" else source <= limit
        return np.where(inside, source, LANES), inside

    known = sources(int(x.args[2], 0) & 31, int(x.args[3], 0)) if x.args[2].isdigit() and x.args[3].isdigit() else None

    def run(t: Threads, x: PtxInstruction, a: Any, b: Any, c: Any, mask: Any) -> Any:
        there, table = check_members(t, x, mask), lanes(t, a)[0]
        if known:
            source, inside = (np.broadcast_to(part, table.shape) for part in known)
        else:
            source, inside = sources(lanes(t, b)[0].astype(np.int64) & 31, lanes(t, c)[0].astype(np.int64))
        at = source + np.arange(0, table.size, 32)[:, None]
        if not t.whole and (there & ~there.reshape(-1)[at]).any():
            row, lane = np.argwhere(there & ~there.reshape(-1)[at])[0].tolist()
            say = t.say(x).of([int(t.warps[row])])
            raise Fault(f"{say}: lane {lane} reads lane {source[row, lane]}, which does not take part")
        out = scatter(t, table.reshape(-1)[at])
        return (out, scatter(t, inside)) if valid else out

    outs = ((value, "b32"), (valid, "pred")) if valid else ((value, "b32"),)
    ins = ((x.args[1], "b32"), (x.args[2], "u32"), (x.args[3], "u32"), (x.args[4], "u32"))
    return effect(run, *ins, outs=outs)


@form(r"vote\.sync\.(all|any|uni|ballot)\.(pred|b32)", f"{SYNC}: vote.sync", level=WARP)
def vote(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, a: Any, mask: Any) -> Any:
        there = check_members(t, x, mask)
        table = lanes(t, a)[0]
        yes = (table & there).sum(1)
        if f[1] == "ballot":
            out = ((table & there).astype(U32) << LANES.astype(U32)).sum(1, dtype=U32)
        else:
            every = there.sum(1)
            out = {"all": yes == every, "any": yes > 0, "uni": (yes == every) | (yes == 0)}[f[1]]
        return scatter(t, np.repeat(out[:, None], 32, 1))

    return effect(run, (x.args[1], "pred"), (x.args[2], "u32"), outs=((x.args[0], f[2]),))


@form(r"match\.(any|all)\.sync\.(b32|b64)", f"{SYNC}: match.sync", level=WARP)
def match(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    value, _, same = x.args[0].partition("|")

    def run(t: Threads, x: PtxInstruction, a: Any, mask: Any) -> Any:
        there = check_members(t, x, mask)
        table = lanes(t, a)[0]
        equal = (table[:, :, None] == table[:, None, :]) & there[:, None, :]
        out = (equal.astype(U32) << LANES.astype(U32)).sum(2, dtype=U32)
        if f[1] == "any":
            return scatter(t, out)
        everyone = (there.astype(U32) << LANES.astype(U32)).sum(1, dtype=U32)[:, None]
        agreed = out == everyone
        out = np.where(agreed, everyone, U32(0))
        return (scatter(t, out), scatter(t, agreed)) if same else scatter(t, out)

    outs = ((value, "b32"), (same, "pred")) if same else ((value, "b32"),)
    return effect(run, (x.args[1], f[2]), (x.args[2], "u32"), outs=outs)


REDUCE: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
REDUCE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@form(r"redux\.sync\.(add|min|max|and|or|xor)\.([bus]32)", f"{SYNC}: redux.sync", level=WARP)
def reduce(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    dtype = dtype_of(f[2])

    def run(t: Threads, x: PtxInstruction, a: Any, mask: Any) -> Any:
        there = check_members(t, x, mask)
        table = lanes(t, a)[0]
        out = np.empty(len(table), dtype)
        for i, row in enumerate(table):
            out[i] = REDUCE[f[1]].reduce(row[there[i]], dtype=dtype)
        return scatter(t, np.repeat(out[:, None], 32, 1))

    return effect(run, (x.args[1], f[2]), (x.args[2], "u32"), outs=((x.args[0], f[2]),))


@form(r"redux\.sync\.(min|max)(\.abs)?(\.NaN)?\.f32", f"{SYNC}: redux.sync (sm_100a)", level=WARP)
def reduce_float(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, a: Any, mask: Any) -> Any:
        there = check_members(t, x, mask)
        table = np.abs(lanes(t, a)[0]) if f[2] else lanes(t, a)[0]
        choose: Any = (np.fmin, np.fmax, np.minimum, np.maximum)[(f[1] == "max") + 2 * bool(f[3])]
        out = np.array([choose.reduce(row[there[i]]) for i, row in enumerate(table)], np.float32)
        return scatter(t, np.repeat(out[:, None], 32, 1))

    return effect(run, (x.args[1], "f32"), (x.args[2], "u32"), outs=((x.args[0], "f32"),))


@form(r"elect\.sync", f"{SYNC}: elect.sync", level=WARP)
def elect(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Elect the lowest lane that takes part."""
    value, _, chosen = x.args[0].partition("|")

    def run(t: Threads, x: PtxInstruction, mask: Any) -> Any:
        there = check_members(t, x, mask)
        if t.whole:
            return np.zeros(t.count, U32), t.index & 31 == 0
        leader = np.argmax(there, 1)
        out = scatter(t, np.repeat(leader[:, None], 32, 1).astype(U32))
        return out, out == (t.index & 31)

    return effect(run, (x.args[1], "u32"), outs=((value, "b32"), (chosen, "pred")))


@form(r"activemask\.b32", f"{SYNC}: activemask", level=WARP)
def active(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> Any:
        there = lanes(t, np.zeros(t.count, U32))[1]
        out = (there.astype(U32) << LANES.astype(U32)).sum(1, dtype=U32)
        return scatter(t, np.repeat(out[:, None], 32, 1))

    return effect(run, outs=((x.args[0], "b32"),))
