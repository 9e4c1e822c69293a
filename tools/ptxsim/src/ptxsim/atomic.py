"""Forms that update memory in one step: atom, red, and the asynchronous red.async."""

import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .call import elements
from .data import Sync, is_policy, read, synchronise, write
from .exchange import ATOMIC as STORED
from .exchange import STRONG
from .forms import PtxOp, effect, form, refuse
from .machine import PARAMS, WINDOW, Threads
from .numbers import decode, encode, flush, pair, unpair
from .parse import PtxInstruction, vector
from .translate import dtype_of

ATOMIC = "Parallel Synchronization and Communication Instructions: atom, red"
U64 = np.uint64
KINDS = re.compile(r"[busf](?:16|32|64)|f16x2|bf16x2|bf16")
SPACES = ("global", "shared", "shared::cta", "shared::cluster")


def wrap_up(old: Any, b: Any) -> Any:
    return np.where(old >= b, old.dtype.type(0), old + old.dtype.type(1))


def wrap_down(old: Any, b: Any) -> Any:
    return np.where((old == 0) | (old > b), b, old - old.dtype.type(1))


UPDATE: dict[str, Callable[..., Any]] = {
    "add": operator.add, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "inc": wrap_up, "dec": wrap_down, "min": np.minimum, "max": np.maximum, "exch": lambda old, b: b,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
}  # fmt: skip


def update_of(what: str, kind: str, in_cache: bool) -> tuple[str, Callable[..., Any]]:
    """Return (PTX type of the operands, function) of an update. in_cache: f32 sums are done in L2, which flushes
    denormals."""
    plain = UPDATE[what]
    if kind == "f32" and what == "add" and in_cache:
        return kind, lambda old, b: flush(flush(old) + flush(b))
    if kind in ("f16", "bf16"):
        return "b16", lambda old, b: encode(plain(decode(old, kind), decode(b, kind)), kind)
    if kind in ("f16x2", "bf16x2"):
        single = kind[:-2]

        def both(old: Any, b: Any) -> Any:
            values = zip(pair(old, single), pair(b, single))
            return unpair(*(encode(plain(left, right), single) for left, right in values))

        return "b32", both
    return kind, plain


@form(r"(atom|red)\.(.*)", ATOMIC)
def atomic(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    parts = f[2].split(".")
    what = next((part for part in parts if part in UPDATE), "")
    kind = parts[-1]
    known = {
        "relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz", "v2", "v4", "v8", what,
    }  # fmt: skip
    if not what or not KINDS.fullmatch(kind) or set(parts[:-1]) - known - set(SPACES) - {"L2::cache_hint"}:
        raise refuse(x, "this form")
    space = next((part for part in parts if part in SPACES), "generic")
    stored, update = update_of(what, kind, not space.startswith("shared"))
    dtype, returns = dtype_of(stored), f[1] == "atom"
    vectors = any(part in ("v2", "v4", "v8") for part in parts)
    operands = [text for text in x.args[1 + returns :] if not is_policy(x, text)]
    sources = [register for text in operands for register in vector(text)]
    count = len(vector(operands[0])) if vectors else 1

    both = "acq_rel" in parts
    sync = Sync(True, True, both or "acquire" in parts, both or "release" in parts, "cta" not in parts)

    def run(t: Threads, x: PtxInstruction, address: Any, *values: Any) -> Any:
        synchronise(t, address, space, sync)
        old = np.empty((count, t.count), dtype)
        place = None if vectors else shared_elements(t, x, space, address, dtype)
        if place and update is operator.add and dtype.kind != "f":
            return added(place[0], place[1], values[0])
        for pick in conflict_free_groups(address):
            if place:
                memory, at = place[0], place[1][pick]
                old[0, pick] = was = memory[at]
                memory[at] = update(was, *[value[pick] for value in values])
                continue
            some = Threads(t.machine, t.index[pick], len(pick))
            old[:, pick] = was = read(some, x, space, address[pick], dtype, count, STRONG)
            if vectors:
                new = np.stack([update(was[i], values[i][pick]) for i in range(count)])
            else:
                new = update(was[0], *[value[pick] for value in values])[None]
            write(some, x, space, address[pick], new.astype(dtype), STORED)
        return tuple(old) if count > 1 else old[0]

    ins = [(x.args[int(returns)], "address"), *[(source, stored) for source in sources]]
    outs = tuple((register, stored) for register in vector(x.args[0])) if returns and x.args[0] != "_" else ()
    return effect(run, *ins, outs=outs)


def added(memory: np.ndarray, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Add integers to memory[at], for each place in thread order; return what each thread finds."""
    order = np.argsort(at, kind="stable")
    at, values = at[order], values[order]
    (starts,) = np.r_[True, at[1:] != at[:-1]].nonzero()
    before = np.cumsum(values, dtype=values.dtype) - values
    before -= np.repeat(before[starts], np.diff(np.r_[starts, len(at)]))
    found = memory[at] + before
    memory[at] = found + values  # the last one holds the whole sum
    out = np.empty_like(found)
    out[order] = found
    return out


def conflict_free_groups(address: np.ndarray) -> list[np.ndarray]:
    """Split threads into groups without a common address, in thread order for each address."""
    order = np.argsort(address, kind="stable")
    ordered = address[order]
    starts = np.r_[True, ordered[1:] != ordered[:-1]]
    if starts.all():
        return [np.arange(len(address))]
    rank = np.arange(len(address)) - np.maximum.accumulate(np.where(starts, np.arange(len(address)), 0))
    turn = np.empty_like(rank)
    turn[order] = rank
    return np.split(np.argsort(turn, kind="stable"), np.cumsum(np.bincount(turn))[:-1])


def shared_elements(t: Threads, x: PtxInstruction, space: str, address: np.ndarray, dtype: np.dtype) -> Any:
    """Check an atomic on shared memory; return (shared memory as elements of `dtype`, the threads' indices into it),
    or None for global memory."""
    m = t.machine
    if space == "generic" and bool(((address >= U64(WINDOW)) & (address < U64(PARAMS))).all()):
        space, address = "shared", address - U64(WINDOW)
    if not space.startswith("shared"):
        return None
    flat = m.flat(t, address, dtype.itemsize, x)
    m.shared.update(t.warp, flat, dtype.itemsize, t.say(x))
    return elements(m.shared.bytes, dtype), flat // dtype.itemsize


@form(
    r"red\.async(?:\.relaxed)?(?:\.cluster)?\.shared::cluster\.mbarrier::complete_tx::bytes"
    r"\.(add|and|or|xor|inc|dec|min|max)\.([bus](?:32|64))",
    "Parallel Synchronization and Communication Instructions: red.async",
)
def reduce_async(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    update = UPDATE[f[1]]

    def run(t: Threads, x: PtxInstruction, address: Any, barrier: Any, values: Any) -> None:
        m = t.machine
        size = values.dtype.itemsize
        to, signal = m.flat(t, address, size, x), m.flat(t, barrier, 8, x)
        for i in range(t.count):
            point = m.signalled(t, int(signal[i]), x)

            def complete(place: int = int(to[i]) // size, value: Any = values[i : i + 1], point: Any = point) -> None:
                memory = m.shared.bytes.view(values.dtype)
                memory[place : place + 1] = update(memory[place : place + 1], value)
                point.tx -= size
                m.events += point.complete_phase()

            m.count("red.async")
            m.post(partial("{} to {}".format, t.say(x), m.shared.name(int(to[i]))), complete)

    return effect(run, (x.args[0], "address"), (x.args[2], "address"), (x.args[1], f[2]))
