"""Forms that load and store memory: ld, st, ldmatrix, stmatrix, cp.async; atom and red are in atomic.py."""

import re
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .call import elements
from .exchange import ATOMIC, CONSTANT, STRONG, WEAK
from .forms import WARP, PtxOp, effect, form, refuse
from .machine import PARAMS, WINDOW, Threads, distinct, groups
from .numbers import count_nonzero
from .order import VectorClock
from .parse import PtxInstruction, vector
from .translate import dtype_of

MOVE = "Data Movement and Conversion Instructions"
SPACE = r"(?:\.(param|global|shared(?:::cta|::cluster)?))?"
ORDER = r"(?:\.(weak|volatile|relaxed|acquire|release|acq_rel|mmio))?(?:\.(cta|cluster|gpu|sys))?"
CACHE = r"(?:\.(?:nc|ca|cg|cs|lu|cv|wb|wt|L1::\w+|L2::\w+))*"
KIND = r"([busf](?:8|16|32|64))"
READS, WRITES = ("acquire", "volatile", "relaxed", "mmio"), ("release", "volatile", "relaxed", "mmio")  # strong ones
U32, U64 = np.uint32, np.uint64


# ------------------------------------------------------------------------------------------------ memory by address
def read(
    t: Threads, x: PtxInstruction, space: str, address: np.ndarray, dtype: Any, count: int, how: str = WEAK
) -> np.ndarray:
    """Read (count, n) elements at the threads' addresses; the `count` elements of a thread are aligned as a whole.
    how: for global memory, as exchange.Exchange.load takes it."""
    m = t.machine
    if space == "generic":
        shared = (address >= U64(WINDOW)) & (address < U64(PARAMS))
        if shared.all():
            return read(t, x, "shared", address - U64(WINDOW), dtype, count, how)
        if shared.any():
            raise refuse(x, "a generic access to several state spaces at once")
        if (address >= U64(PARAMS)).all() and (address < U64(PARAMS + len(m.params))).all():
            return read(t, x, "param", address - U64(PARAMS), dtype, count)
    size = np.dtype(dtype).itemsize * count
    if space == "param":
        return m.params[(address.astype(np.int64)[:, None] + np.arange(size))].copy().view(dtype).T
    if space.startswith("shared"):
        return m.shared.load(t.warp, m.flat(t, address, size, x), dtype, count, t.say(x), how == STRONG)
    raw = m.memory.load(m.memory.past(t.warp), address.astype(U64), dtype if count == 1 else f"V{size}", t.say(x), how)
    return raw.view(dtype).reshape(t.count, count).T


def write(t: Threads, x: PtxInstruction, space: str, address: np.ndarray, values: np.ndarray, kind: int = 0) -> None:
    """Write values (count, n). kind: for global memory, as exchange.Exchange.store takes it."""
    m = t.machine
    if space == "generic":
        shared = (address >= U64(WINDOW)) & (address < U64(PARAMS))
        if shared.all():
            return write(t, x, "shared", address - U64(WINDOW), values, kind)
        if shared.any():
            raise refuse(x, "a generic access to several state spaces at once")
    size = values.dtype.itemsize * len(values)
    if space.startswith("shared"):
        flat = m.flat(t, address, size, x)
        m.shared.store(t.warp, flat, values, t.say(x))
        if space == "shared::cluster":
            m.state.remote.update(t.warp[flat // m.shared.stride != t.index // m.per_cta].tolist())
    else:
        raw = np.ascontiguousarray(values.T)
        whole = raw.reshape(-1) if len(values) == 1 else raw.view(f"V{size}").reshape(-1)
        m.memory.store(t.warp, address.astype(U64), whole, t.say(x), kind)


def is_policy(x: PtxInstruction, text: str) -> bool:
    """Return whether an operand is a cache policy."""
    return "cache_hint" in x.op and text == x.args[-1]


class Sync(NamedTuple):
    """The ordering effect of a strong operation: whether it reads or writes its word (atomics do both), acquires,
    releases, and orders other CTAs too (wide)."""

    reads: bool
    writes: bool
    acquires: bool
    releases: bool
    wide: bool


def synchronise(t: Threads, address: np.ndarray, space: str, s: Sync) -> None:
    """Pass clocks on through the words of strong operations (PTX ISA, Memory Consistency Model: release and acquire
    patterns). A relaxed write releases what the warp's last fence covers; a relaxed read is acquired by its next
    fence.

    A plain store in between does not end the release of a word, which is weaker than the model."""
    m = t.machine
    shared = space.startswith("shared") or (space == "generic" and bool((address < U64(PARAMS)).all()))
    wide = s.wide and not shared
    flags = m.memory.flags if wide else m.state.flags
    if not (s.acquires or s.releases or flags or m.state.fences):
        return
    home = m.first_slot[t.where] if shared else t.index // m.per_cta
    where = address.astype(np.int64) + (0 if wide else home.astype(np.int64) << 48)
    for key in np.unique(where).tolist():
        clock = flags.get(key, VectorClock()) if s.reads else VectorClock()
        for warp in distinct(t.warp[where == key]).tolist():  # atomics take effect one after the other, in this order
            if s.reads and s.acquires:
                m.order.acquire(np.array([warp]), clock)
            elif s.reads:
                m.state.unacquired.setdefault((warp, wide), VectorClock()).take(clock)
            if s.writes and s.releases:
                m.order.release(np.array([warp]), clock)
            elif s.writes and (warp, wide) in m.state.fences:
                clock.take(m.state.fences[warp, wide])
        if s.writes:
            flags[key] = clock


@form(rf"ld{ORDER}{SPACE}{CACHE}(?:\.(v2|v4|v8))?\.{KIND}", f"{MOVE}: ld")
def load(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    order, scope, space, _, kind = f.groups()
    into, dtype = vector(x.args[0]), dtype_of(kind)
    how = STRONG if order in READS else CONSTANT if ".nc" in x.op else WEAK
    outs = tuple((register, kind) for register in into)
    if space == "param":
        return parameter(x, outs, dtype)

    def run(t: Threads, x: PtxInstruction, address: Any) -> Any:
        if how == STRONG:
            synchronise(t, address, space or "generic", Sync(True, False, order == "acquire", False, scope != "cta"))
        got = read(t, x, space or "generic", address, dtype, len(into), how)
        return tuple(got) if len(into) > 1 else got[0]

    return effect(run, (x.args[1], "address"), outs=outs)


def parameter(x: PtxInstruction, outs: tuple[tuple[str, str], ...], dtype: Any) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, address: Any) -> Any:
        where = np.atleast_1d(address) - U64(PARAMS)
        same = not count_nonzero(where != where[0])  # as nearly always
        got = read(t, x, "param", where[:1] if same else where, dtype, len(outs))
        many = got.repeat(t.count, 1) if same else got
        return tuple(many) if len(outs) > 1 else many[0]

    return effect(run, (x.args[1], "address"), outs=outs)


@form(rf"st{ORDER}{SPACE}{CACHE}(?:\.(v2|v4|v8))?\.{KIND}", f"{MOVE}: st")
def store(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    order, scope, space, _, kind = f.groups()
    strong = order in WRITES

    def run(t: Threads, x: PtxInstruction, address: Any, *values: Any) -> None:
        write(t, x, space or "generic", address, np.array(values), ATOMIC if strong else 0)
        if strong:
            synchronise(t, address, space or "generic", Sync(False, True, False, order == "release", scope != "cta"))

    return effect(run, (x.args[0], "address"), *[(value, kind) for value in vector(x.args[1])])


# ------------------------------------------------------------------------------------------------ matrices
def row_lanes(t: Threads, count: int) -> tuple[Threads, np.ndarray]:
    """Return the lanes that name rows of `count` matrices, and a mask of them: lanes 8 j to 8 j + 7 of a warp name the
    rows of matrix j."""
    if count == 4:
        return t, np.ones(t.count, bool)
    named = t.index & 31 < 8 * count
    return Threads(t.machine, t.index[named], int(count_nonzero(named))), named


@form(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", f"{MOVE}: ldmatrix", level=WARP)
def load_matrix(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Load 8x8 matrices: lane l gets elements (l / 4, 2 (l % 4)) and the next one of each matrix, or of its
    transpose."""
    count, trans = int(f[1]), bool(f[2])

    def run(t: Threads, x: PtxInstruction, address: Any) -> Any:
        some, named = row_lanes(t, count)
        got = read(some, x, "shared", address[named], np.uint16, 8).T.reshape(-1, count, 8, 8)
        got = got.transpose(1, 0, 3, 2) if trans else got.transpose(1, 0, 2, 3)
        out = np.ascontiguousarray(got).reshape(count, -1).view(U32)
        return tuple(out) if count > 1 else out[0]

    return effect(run, (x.args[1], "address"), outs=tuple((r, "b32") for r in vector(x.args[0])))


@form(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", f"{MOVE}: stmatrix", level=WARP)
def store_matrix(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    trans = bool(f[2])

    def run(t: Threads, x: PtxInstruction, address: Any, *values: Any) -> None:
        some, named = row_lanes(t, len(values))
        rows = np.array(values).view(np.uint16).reshape(len(values), -1, 8, 8)
        rows = rows.transpose(1, 0, 3, 2) if trans else rows.transpose(1, 0, 2, 3)
        write(some, x, "shared", address[named], rows.reshape(-1, 8).T)

    return effect(run, (x.args[0], "address"), *[(value, "b32") for value in vector(x.args[1])])


LANE = np.arange(32)


@form(r"ldmatrix\.sync\.aligned\.m16n16\.x([12])\.trans\.shared(?:::cta)?\.b8", f"{MOVE}: ldmatrix", level=WARP)
def load_matrix_bytes(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Load 16x16 matrices of bytes (sm_100a). Lane 16 j + i holds the address of row i of matrix j; a matrix takes
    two registers. Byte b of register r of lane l is row 4 (l % 4) + 2 r + b % 2, column l / 4 + 8 (b / 2)."""
    count = int(f[1])

    def run(t: Threads, x: PtxInstruction, address: Any) -> Any:
        out = []
        for j in range(count):
            part = slice(16 * j, 16 * j + 16)
            rows = address.reshape(-1, 32)[:, part].reshape(-1)
            some = Threads(t.machine, t.index.reshape(-1, 32)[:, part].reshape(-1), len(rows))
            got = read(some, x, "shared", rows, np.uint8, 16).T.reshape(-1, 16, 16)
            for r in range(2):
                parts = [got[:, 4 * (LANE % 4) + 2 * r + b % 2, LANE // 4 + 8 * (b // 2)] for b in range(4)]
                out.append(np.ascontiguousarray(np.stack(parts, 2)).view(U32).reshape(-1))
        return tuple(out)

    return effect(run, (x.args[1], "address"), outs=tuple((r, "b32") for r in vector(x.args[0])))


@form(r"stmatrix\.sync\.aligned\.m16n8\.x([124])\.trans\.shared(?:::cta)?\.b8", f"{MOVE}: stmatrix", level=WARP)
def store_matrix_bytes(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Store 16x8 matrices of bytes (sm_100a). Lane 8 j + i holds the address of the 16 bytes of row i of matrix j in
    memory; byte b of lane l goes to row 2 (l % 4) + b % 2, column l / 4 + 8 (b / 2)."""

    def run(t: Threads, x: PtxInstruction, address: Any, *values: Any) -> None:
        for j, value in enumerate(values):
            rows = address.reshape(-1, 32)[:, 8 * j : 8 * j + 8].reshape(-1)
            some = Threads(t.machine, t.index.reshape(-1, 32)[:, :8].reshape(-1), len(rows))
            parts = np.ascontiguousarray(value).view(np.uint8).reshape(-1, 32, 4)
            matrix = np.empty((len(parts), 8, 16), np.uint8)
            for b in range(4):
                matrix[:, 2 * (LANE % 4) + b % 2, LANE // 4 + 8 * (b // 2)] = parts[:, :, b]
            write(some, x, "shared", rows, np.ascontiguousarray(matrix.reshape(-1, 16).T))

    return effect(run, (x.args[0], "address"), *[(value, "b32") for value in vector(x.args[1])])


# ------------------------------------------------------------------------------------------------ cp.async
COPY = f"{MOVE}: cp.async (non-bulk)"


@form(rf"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global{CACHE}", COPY)
def copy_async(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Copy 16, 8 or 4 bytes per thread; bytes past src-size are zero."""
    size = int(x.args[2], 0)
    extra = [text for text in x.args[3:] if not is_policy(x, text)]

    def run(t: Threads, x: PtxInstruction, target: Any, source: Any, *limits: Any) -> None:
        m = t.machine
        keep = limits[0].astype(np.int64) if limits else np.full(t.count, size)
        got = np.zeros((t.count, size), np.uint8)
        for amount, mine in groups(keep):
            if amount:
                data = m.memory.load(m.memory.past(t.warp[mine]), source[mine].astype(U64), f"V{size}", t.say(x))
                got[mine, :amount] = data.view(np.uint8).reshape(-1, size)[:, :amount]
        flat = m.flat(t, target, size, x)
        words = m.shared.words(flat, size).reshape(-1, t.count)
        m.shared.check_write(t.warp, words, t.say(x))
        m.shared.begin_writes(t.warp, words, t.say(x))
        data = got.view(f"V{size}")[:, 0]
        group, place = m.copy_groups[t.index][None], (flat // size)[None]
        still_open = np.ones((1, t.count), bool)
        m.state.copies.append(Copies(t.index, group, place, still_open, data[None], words[:, None]))

    return effect(run, (x.args[0], "address"), (x.args[1], "address"), *[(text, "u32") for text in extra])


class Copies(NamedTuple):
    """Copies of `size` bytes that threads (n,) have issued, by k instructions. group (k, n): number of the group of
    each. place (k, n): in shared memory, in `size` bytes. open (k, n): which are not complete. data (k, n). words
    (size / 4, k, n)."""

    threads: np.ndarray
    group: np.ndarray
    place: np.ndarray
    open: np.ndarray
    data: np.ndarray
    words: np.ndarray


def joined(all_copies: list[Copies]) -> list[Copies]:
    """Return the copies that are not complete, those of one size by the same threads in one `Copies`."""
    alike: dict[Any, list[Copies]] = {}
    for copies in all_copies:
        alike.setdefault((copies.threads.tobytes(), copies.data.dtype), []).append(copies)
    out = []
    for each in alike.values():
        copies = each[0]
        if len(each) > 1:
            _, *fields = zip(*each, strict=True)
            copies = Copies(copies.threads, *(np.concatenate(x, -2) for x in fields))
        left = copies.open.any(1)
        if left.all():
            out.append(copies)
        elif left.any():
            out.append(Copies(copies.threads, *(x[..., left, :] for x in copies[1:])))
    return out


def finish_copies(t: Threads, keep: int) -> None:
    """Complete all but the newest `keep` committed groups of each thread."""
    m = t.machine
    if not m.state.copies:
        return
    mine = np.zeros(m.threads, bool)
    mine[t.index] = True
    m.state.copies = joined(m.state.copies)
    for threads, group, place, still_open, data, words in m.state.copies:
        done = still_open & mine[threads] & (group < m.copy_groups[threads] - keep)
        if count_nonzero(done):
            elements(m.shared.bytes, data.dtype)[place[done]] = data[done]
            warps = np.broadcast_to(threads >> 5, done.shape)[done]
            m.shared.end_write(words[:, done], warps, m.order.now(warps))
            still_open[done] = False


@form(r"cp\.async\.commit_group", COPY)
def commit_copies(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> None:
        t.machine.copy_groups[t.index] += 1

    return effect(run)


@form(r"cp\.async\.wait_(group|all)", COPY)
def wait_copies(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    keep = int(x.args[0], 0) if f[1] == "group" else 0

    def run(t: Threads, x: PtxInstruction) -> None:
        if f[1] == "all":
            t.machine.copy_groups[t.index] += 1
        finish_copies(t, keep)

    return effect(run)


@form(r"(prefetch|prefetchu|discard|applypriority|createpolicy)\..*", f"{MOVE}: prefetch and cache control")
def hint(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Do nothing, since hints have no effect on results. createpolicy returns a policy that nothing reads."""
    outs = ((x.args[0], "b64"),) if f[1] == "createpolicy" else ()
    return effect(lambda t, x: np.zeros(t.count, U64) if outs else None, outs=outs)


@form(r"cp\.async\.mbarrier\.arrive(\.noinc)?(?:\.shared(?:::cta)?)?\.b64", COPY)
def copies_arrive(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Arrive once the thread's earlier copies are complete; without .noinc the phase waits for one more arrival."""

    def run(t: Threads, x: PtxInstruction, address: Any) -> None:
        m = t.machine
        for flat, mine in groups(m.flat(t, address, 8, x)):
            barrier, index = m.mbarrier(t, flat, x), t.index[mine]
            barrier.pending += 0 if f[1] else len(index)
            m.copy_groups[index] += 1
            # When operations complete at once, one may stand for those of all threads.
            size = len(index) if m.settings.mode == "eager" and len(index) <= barrier.pending else 1
            for first in range(0, len(index), size):
                some = Threads(m, index[first : first + size], size)

                def complete(some: Threads = some, barrier: Any = barrier) -> None:
                    finish_copies(some, 0)
                    m.order.release(some.warps, barrier.arriving)
                    barrier.pending -= some.count
                    m.events += barrier.complete_phase()

                m.post(partial("{} at {}".format, t.say(x), barrier.address), complete)
            m.state.counts["cp.async arrival"] = m.state.counts.get("cp.async arrival", 0) + len(index)

    return effect(run, (x.args[0], "address"))
