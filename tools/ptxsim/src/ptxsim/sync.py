"""Forms that synchronise: named and cluster barriers, mbarriers, fences, and hints without effect on results."""

import re
from functools import lru_cache
from typing import Any

import numpy as np

from .barriers import BarrierState, Mbarrier
from .convergence import Arrivals, BarrierCall, absent_lanes, arrive_named
from .convergence import arrive as arrive_by_warp
from .faults import Fault
from .forms import WARP, PtxOp, effect, form
from .machine import MachineState, Threads, distinct, groups
from .numbers import count_nonzero
from .order import VectorClock
from .parse import PtxInstruction
from .warp import check_members

SYNC = "Parallel Synchronization and Communication Instructions"
U32, U64 = np.uint32, np.uint64
IDS = 16  # named barriers per CTA


# ------------------------------------------------------------------------------------------------ barriers of a CTA
BARRIER = f"{SYNC}: barrier"


@form(r"bar(?:\.cta)?\.(sync|arrive)(?:\.aligned)?", BARRIER, level=WARP, waits=True)
@form(r"barrier(?:\.cta)?\.(sync|arrive)\.aligned", BARRIER, level=WARP, waits=True)
@form(r"barrier(?:\.cta)?\.(sync|arrive)", BARRIER, waits=True)
def barrier(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, number: Any, *count: Any) -> None:
        arrive(t, x, f[1], (number, *count))

    return effect(run, *[(text, "u32") for text in x.args])


@form(
    r"bar(?:\.cta)?\.red\.(?:(and|or)(?:\.aligned)?\.pred|(popc)(?:\.aligned)?\.u32)", BARRIER, level=WARP, waits=True
)
@form(r"barrier(?:\.cta)?\.red\.(?:(and|or)\.aligned\.pred|(popc)\.aligned\.u32)", BARRIER, level=WARP, waits=True)
@form(r"barrier(?:\.cta)?\.red\.(?:(and|or)\.pred|(popc)\.u32)", BARRIER, waits=True)
def barrier_reduce(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Reduce a predicate over the threads of a barrier: every thread learns whether it holds for all of them, or for
    any, or for how many."""

    def run(t: Threads, x: PtxInstruction, brought: Any, number: Any, *count: Any) -> None:
        result = t.machine.program.registers.at[x.args[0]][1]
        arrive(t, x, f[1] or f[2], (number, *count), (brought, result))

    ins = ((x.args[-1], "pred"), *[(text, "u32") for text in x.args[1:-1]])
    return PtxOp(run, (), ins, effect=True, registers=True)


def arrive(
    t: Threads, x: PtxInstruction, kind: str, operands: tuple[Any, ...], reduction: tuple[Any, int] | None = None
) -> None:
    """Let threads arrive at the named barriers that they name. operands: ids, and thread counts if the instruction
    has them. reduction: predicates, and the register of the result."""
    m, (number, *count) = t.machine, operands
    if (number >= IDS).any():
        raise Fault(f"{t.say(x)}: barrier {number.max()}, a CTA has {IDS}")
    if t.whole and count_nonzero(apart := number.reshape(-1, 32) != number[::32, None]):
        row, lane = np.argwhere(apart)[0].tolist()
        which = f"lane {lane} names barrier {number[32 * row + lane]}, lane 0 barrier {number[32 * row]}"
        raise Fault(f"{t.say(x).of([int(t.warps[row])])}: {which}")
    aligned = x.op.startswith("bar.") or ".aligned" in x.op
    for key, mine in groups(t.index // m.per_cta * IDS + number):
        need = thread_count(t, x, count[0][mine]) if count else m.per_cta
        arrivals = Arrivals(t.index[mine], m.unit, t.say(x), BarrierCall(divmod(key, IDS), need, bool(count), kind))
        if reduction:
            arrivals.brought, arrivals.result = reduction[0][mine], reduction[1]
        if t.whole:
            arrive_named(m, [arrivals])
        else:
            arrive_by_warp(m, arrivals, aligned, arrive_named)
    if kind != "arrive" or not t.whole:
        m.stalled = t.index[m.blocked[t.index]]


def thread_count(t: Threads, x: PtxInstruction, count: np.ndarray) -> int:
    """Return the thread count of a barrier, which must be the same for all threads."""
    if count_nonzero(count != count[0]):
        raise Fault(f"{t.say(x)}: the thread count differs between threads")
    if count[0] % 32 or not count[0]:
        raise Fault(f"{t.say(x)}: {count[0]} threads, must be a multiple of 32 and not 0")
    return int(count[0])


@form(r"bar\.warp\.sync", f"{SYNC}: bar.warp.sync", level=WARP)
def warp_barrier(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Check the member mask. A warp counts as one thread in the order of events, so it suffices that its lanes have
    converged."""

    def run(t: Threads, x: PtxInstruction, mask: Any) -> None:
        check_members(t, x, mask)

    return effect(run, (x.args[0], "u32"))


CLUSTER = f"{SYNC}: barrier.cluster"


@form(r"barrier\.cluster\.arrive(\.release|\.relaxed)?\.aligned", CLUSTER, level=WARP)
@form(r"barrier\.cluster\.arrive(\.release|\.relaxed)?", CLUSTER, waits=True)
def cluster_arrive(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    kind, aligned = "relaxed" if f[1] == ".relaxed" else "release", x.op.endswith(".aligned")

    def run(t: Threads, x: PtxInstruction) -> None:
        m = t.machine
        for cluster, mine in groups(t.first_slot):
            arrivals = Arrivals(t.index[mine], m.unit, t.say(x), BarrierCall((cluster, -1), 0, False, kind))
            if t.whole:
                arrive_in_cluster(m, [arrivals])
            else:
                arrive_by_warp(m, arrivals, aligned, arrive_in_cluster)
        if not t.whole:
            m.stalled = t.index[m.blocked[t.index]]

    return effect(run)


def arrive_in_cluster(m: MachineState, arrivals: list[Arrivals]) -> None:
    """Let threads arrive at the barrier of their cluster. Several arrivals belong to one warp."""
    call, place, held = arrivals[0].call, arrivals[0].place, len(arrivals) > 1 or arrivals[0].unit != m.unit
    cluster, index = call.key[0], np.concatenate([one.index for one in arrivals])
    point = m.state.cluster.setdefault(cluster, BarrierState(m.cluster_size * m.per_cta))
    if (m.cluster_phase[index] > point.phase).any():
        raise Fault(f"{place}: arrives twice at the cluster barrier without a wait in between")
    point.arrived += len(index)
    m.cluster_phase[index] = point.phase + 1
    warps = distinct(arrivals[0].index >> 5)
    if call.kind != "relaxed":
        m.order.release(warps, point.clock)
        m.state.remote.difference_update(warps.tolist())
    else:
        for warp in warps.tolist():
            for clock in (m.state.released.get(warp), m.state.fences.get((warp, True))):
                point.clock.take(clock or VectorClock())
    for one in arrivals if held else ():
        m.blocked[one.index] = False
        m.pc[one.index] = one.unit + 1
    complete_cluster_phase(m, cluster)


def complete_cluster_phase(m: MachineState, cluster: int) -> None:
    """Complete the phase of a cluster barrier if all threads that have not exited have arrived."""
    point = m.state.cluster.get(cluster)
    if point is None or not point.arrived:
        return
    threads = slice(cluster * m.per_cta, (cluster + m.cluster_size) * m.per_cta)
    if (m.done[threads] | (m.cluster_phase[threads] > point.phase)).all():
        point.phase += 1
        point.arrived = 0
        m.events += 1


@form(r"barrier\.cluster\.wait(\.acquire)?\.aligned", CLUSTER, level=WARP, waits=True)
@form(r"barrier\.cluster\.wait(\.acquire)?", CLUSTER, waits=True)
def cluster_wait(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> None:
        m = t.machine
        if not t.whole and x.op.endswith(".aligned") and absent_lanes(m, t.index)[1].any():
            t.refuse_apart(x)
        stay = np.zeros(t.count, bool)
        for cluster in distinct(m.first_slot[t.where]).tolist():
            mine = m.first_slot[t.where] == cluster
            point = m.state.cluster.get(cluster)
            mark = t.index[mine]
            if point is None or (m.cluster_phase[mark] == m.cluster_waited[mark]).any():
                raise Fault(f"{t.say(x)}: waits at the cluster barrier without having arrived")
            stay |= mine & (m.cluster_phase[t.where] > point.phase)
            ready = mine & ~stay
            if ready.any():
                m.cluster_waited[t.index[ready]] = m.cluster_phase[t.index[ready]]
                m.order.acquire(distinct(t.warp[ready]), point.clock)
        mark_failed(t, stay)
        m.stalled = t.index[stay]

    return effect(run)


def mark_failed(t: Threads, which: np.ndarray) -> None:
    """Mark these threads: they need not retry this unit before another event happens."""
    m = t.machine
    m.failures()[t.index[which]] = m.unit


# ------------------------------------------------------------------------------------------------ mbarriers
MBARRIER = f"{SYNC}: mbarrier"
PLACE = r"(?:\.(?:release|acquire|relaxed))?(?:\.(?:cta|cluster))?(?:\.shared(?:::cta|::cluster)?)?"


def each_mbarrier(t: Threads, x: PtxInstruction, address: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return (flat address, threads) for each mbarrier that the threads name."""
    if not count_nonzero(address != address[0]) and t.in_cluster:
        flat = t.machine.shared.flat_of_one(t.first_slot[0], address[0], 8)
        if flat is not None:
            return [(flat, everyone(t.count))]
    return groups(t.machine.flat(t, address, 8, x))


@lru_cache(64)
def everyone(count: int) -> np.ndarray:
    """Return a mask of all threads."""
    out = np.ones(count, bool)
    out.flags.writeable = False
    return out


@form(r"mbarrier\.init(?:\.shared(?:::cta)?)?\.b64", f"{MBARRIER}.init")
def mbarrier_init(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, address: Any, count: Any) -> None:
        m = t.machine
        for flat, mine in each_mbarrier(t, x, address):
            if flat in m.mbarriers:
                raise Fault(f"{t.say(x)}: the mbarrier at {m.shared.name(flat)} is initialised already")
            m.shared.store(t.warp[mine], np.full(mine.sum(), flat), np.zeros((1, mine.sum()), U64), t.say(x))
            m.mbarriers[flat] = Mbarrier(m.shared.name(flat), int(count[mine][0]), m.order.component())

    return effect(run, (x.args[0], "address"), (x.args[1], "u32"))


@form(r"mbarrier\.inval(?:\.shared(?:::cta)?)?\.b64", f"{MBARRIER}.inval")
def mbarrier_inval(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, address: Any) -> None:
        for flat, _ in each_mbarrier(t, x, address):
            t.machine.mbarrier(t, flat, x)
            del t.machine.mbarriers[flat]

    return effect(run, (x.args[0], "address"))


@form(
    rf"mbarrier\.(arrive|arrive_drop|expect_tx|complete_tx)(\.expect_tx)?(\.noComplete)?{PLACE}\.b64",
    f"{MBARRIER}.arrive",
)
def mbarrier_arrive(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    what = f[1]
    operands = x.args if x.args[0].startswith("[") else x.args[1:]
    token = x.args[0] if not x.args[0].startswith("[") and x.args[0] != "_" else ""
    amount = (operands[1], "u32") if len(operands) > 1 else ("1", "u32")
    relaxed = ".relaxed" in x.op

    def run(t: Threads, x: PtxInstruction, address: Any, number: Any) -> Any:
        m = t.machine
        tokens = np.zeros(t.count, U64)
        for flat, mine in each_mbarrier(t, x, address):
            barrier = m.mbarrier(t, flat, x)
            check_initialised(t, x, flat, mine)
            tokens[mine] = barrier.phase << 32 | barrier.pending
            total = int(number[mine].sum())
            if f[2] or what == "expect_tx":
                barrier.tx += total
                total = int(count_nonzero(mine))
            elif what == "complete_tx":
                barrier.tx -= total
            if what.startswith("arrive"):
                barrier.pending -= total
                barrier.count -= total if what == "arrive_drop" else 0
                if not relaxed or "relaxed" in m.call.beyond:
                    m.order.release(distinct(t.warp[mine]), barrier.arriving)
            m.events += barrier.complete_phase()
        return tokens

    return effect(run, (operands[0], "address"), amount, outs=((token, "b64"),) if token else ())


def check_initialised(t: Threads, x: PtxInstruction, flat: int, mine: np.ndarray) -> None:
    """Check that the initialisation of the mbarrier happens before its use by every thread `mine`."""
    warps, shared = t.warps if mine is everyone(t.count) else distinct(t.warp[mine]), t.machine.shared
    word = flat >> 2
    writer = shared.writer[word]
    if shared.writes or writer < 0 or count_nonzero(shared.order.seen[warps, writer] < shared.event[word]):
        shared.check_read(warps, np.full(len(warps), word), t.say(x))


@form(rf"mbarrier\.(test_wait|try_wait)(\.parity)?{PLACE}\.b64", f"{MBARRIER}.try_wait", waits=True)
def mbarrier_wait(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction, address: Any, expected: Any) -> Any:
        m = t.machine
        done = np.zeros(t.count, bool)
        for flat, mine in each_mbarrier(t, x, address):
            barrier = m.mbarrier(t, flat, x)
            check_initialised(t, x, flat, mine)
            if f[2]:
                passed = mine & ((expected & U32(1)) != (barrier.phase & 1))
            else:
                passed = mine & ((expected >> U64(32)).astype(np.int64) < barrier.phase)
            if count_nonzero(passed):
                m.order.acquire(distinct(t.warp[passed]), barrier.released)
                done |= passed
        if count_nonzero(done) < t.count:
            mark_failed(t, ~done)
        return done

    return effect(run, (x.args[1], "address"), (x.args[2], "u32" if f[2] else "b64"), outs=((x.args[0], "pred"),))


@form(r"mbarrier\.pending_count\.b64", f"{MBARRIER}.pending_count")
def mbarrier_pending(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    return PtxOp(lambda a: np.asarray(a).astype(U32), ((x.args[0], "b32"),), ((x.args[1], "b64"),))


# ------------------------------------------------------------------------------------------------ fences and hints
@form(r"fence\.mbarrier_init\.release\.cluster", f"{SYNC}: membar, fence")
def fence_init(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Make initialised mbarriers visible to the async proxy and to the other CTAs of the cluster."""

    def run(t: Threads, x: PtxInstruction) -> None:
        m = t.machine
        slots = set((t.index // m.per_cta).tolist())
        for flat, barrier in m.mbarriers.items():
            if flat // m.shared.stride in slots:
                barrier.visible = True
        for warp in t.warps.tolist():
            m.order.release(np.array([warp]), m.state.released.setdefault(warp, VectorClock()))

    return effect(run)


@form(r"fence\.release\.sync_restrict::shared::cta\.cluster", f"{SYNC}: membar, fence")
def fence_own(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Order stores to the CTA's own shared memory before a relaxed arrival that follows.

    A warp that has also stored to other CTAs releases nothing, which is more cautious than the memory model."""

    def run(t: Threads, x: PtxInstruction) -> None:
        m = t.machine
        for warp in set(t.warps.tolist()) - m.state.remote:
            m.order.release(np.array([warp]), m.state.released.setdefault(warp, VectorClock()))

    return effect(run)


@form(r"fence\.proxy\.async.*", f"{SYNC}: membar, fence (proxy)")
def fence_proxy(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> None:
        t.machine.order.fence_proxy(t.warps)
        slots = set((t.index // t.machine.per_cta).tolist())
        for flat, barrier in t.machine.mbarriers.items():
            barrier.visible |= flat // t.machine.shared.stride in slots

    return effect(run)


@form(r"(fence|membar)(\.(?!proxy\.async|mbarrier_init|release\.sync_restrict).*)?", f"{SYNC}: membar, fence")
def fence(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Fence the order of accesses (data.synchronise); values need no fence, since memory is sequentially consistent
    here."""
    parts = x.op.split(".")
    if "proxy" in parts:
        return effect(lambda t, x: None)
    sides = (False,) if "cta" in parts else (False, True)

    def run(t: Threads, x: PtxInstruction) -> None:
        m = t.machine
        for warp in t.warps.tolist():
            one, clock = np.array([warp]), VectorClock()
            if "release" not in parts:
                for wide in sides:
                    m.order.acquire(one, m.state.unacquired.pop((warp, wide), VectorClock()))
            if "acquire" not in parts:
                m.order.release(one, clock)
                m.state.fences |= {(warp, wide): clock for wide in sides}
                m.state.remote.difference_update([warp] if True in sides else [])

    return effect(run)


@form(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", "Miscellaneous Instructions: setmaxnreg", level=WARP)
def setmaxnreg(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    count = int(x.args[0], 0)
    if not 24 <= count <= 256 or count % 8:
        raise Fault(f"line {x.line}: setmaxnreg {count}: a multiple of 8 from 24 to 256")
    return effect(lambda t, x: None)


@form(
    r"(griddepcontrol|nanosleep|pragma|nop)(\.(wait|launch_dependents|u32))?", "Miscellaneous and control instructions"
)
def no_effect(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    """Do nothing: one grid runs at a time and the grids before it are complete, except for the effect of
    `KernelLaunch.before`, which griddepcontrol.wait calls."""

    def run(t: Threads, x: PtxInstruction) -> None:
        before = t.machine.call.before
        if before and x.op == "griddepcontrol.wait":
            before(set((t.warps % (t.machine.per_cta // 32)).tolist()))

    return effect(run)


@form(r"(trap|brkpt)", "Miscellaneous Instructions: trap")
def trap(x: PtxInstruction, f: re.Match[str]) -> PtxOp:
    def run(t: Threads, x: PtxInstruction) -> None:
        raise Fault(f"{t.say(x)}: the kernel gave up")

    return effect(run)
