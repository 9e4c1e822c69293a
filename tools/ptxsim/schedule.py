"""The scheduler: threads move in groups at the same unit; asynchronous operations complete in between.

Modes: "eager", operations complete when issued; "late", only when no thread can move, oldest first; "newest", the
same, newest first; "random", groups, parts of groups and operations in an order drawn from the seed."""

import numpy as np

from .faults import Deadlock, Livelock
from .forms import THREAD, WARP, WARPGROUP
from .machine import MachineState, Threads, distinct
from .report import where
from .sync import complete_cluster_phase
from .undefined import follow

NO_UNIT = np.iinfo(np.int32).max  # greater than every unit
UNITS_PER_TURN = 64  # units that a group runs before the next group is chosen
COMPLETION_CHANCES = (0.3, 0.3, 0.05, 0.01)  # random: probability that an operation completes after a step, by seed


def run(m: MachineState) -> None:
    """Run until every thread has returned and every operation is complete."""
    with np.errstate(all="ignore"):
        while not m.done.all():
            chosen = choose(m)
            if chosen is None:
                if complete_one(m):
                    continue
                chosen = choose(m, part_of_warp=True)
                if chosen is None:
                    raise Deadlock(f"deadlock\n{where(m)}")
            step(m, *chosen)
            if (
                m.settings.mode == "random"
                and m.random.random() < COMPLETION_CHANCES[m.settings.seed % len(COMPLETION_CHANCES)]
            ):
                complete_one(m)
            if m.steps > m.settings.limit:
                raise Livelock(f"no end after {m.settings.limit} units\n{where(m)}")
        while complete_one(m):
            pass


def complete_one(m: MachineState) -> bool:
    """Complete one asynchronous operation; return False if none is pending."""
    queues = [queue for queue in m.state.pending.values() if queue]
    if not queues:
        return False
    mode = m.settings.mode
    if mode == "random":
        queue = queues[int(m.random.integers(len(queues)))]
        index = int(m.random.integers(len(queue))) if queue is m.state.pending[""] else 0
    else:  # stores come last: a kernel that forgets to wait for one reads old memory
        queue = next((queue for queue in queues if queue is not m.state.pending["store"]), queues[0])
        index = -1 if mode == "newest" and queue is m.state.pending[""] else 0
    one = queue[index]
    del queue[index]
    one.complete()
    m.events += 1
    return True


def choose(m: MachineState, part_of_warp: bool = False) -> tuple[int, np.ndarray, int] | None:
    """Return (unit, threads, level up to which they have converged); None if no thread can move.

    part_of_warp: lanes may run a collective without the rest of their warp; its member mask then tells whether
    that is right."""
    program, pc = m.program, m.pc
    live = ~m.done
    able = live & ~m.blocked & ~((m.failed == pc) & (m.failed_at == m.events))
    if not able.any():
        return None
    by_warp, live_warp = pc.reshape(-1, 32), live.reshape(-1, 32)
    lowest = np.where(live_warp, by_warp, NO_UNIT).min(1)
    together = ((by_warp == lowest[:, None]) | ~live_warp).all(1)
    level = program.level[pc]
    if level.any():
        collective = (level == WARP) & (together.repeat(32) | part_of_warp)
        able &= (level == THREAD) | collective | whole_warpgroups(m, lowest, together, level)
        if not able.any():
            return None
    # In a diverged warp the lanes at the lowest unit go first, so that they catch up with the others.
    first = np.where(able.reshape(-1, 32), by_warp, NO_UNIT).min(1)
    candidates = first[first < NO_UNIT]
    random = m.settings.mode == "random"
    if random:
        unit = int(m.random.choice(np.unique(candidates)))
    else:  # round robin: the next unit in program order
        after = candidates[candidates > m.last]
        unit = int((after if len(after) else candidates).min())
    m.last = unit
    warps = first == unit
    if random and program.level[unit] < WARPGROUP:
        keep = m.random.random(int(warps.sum())) < 0.6
        if keep.any():
            warps[warps] = keep
    index = np.flatnonzero(able & (pc == unit) & warps.repeat(32))
    return unit, index, convergence(m, index, together, live)


def whole_warpgroups(m: MachineState, lowest: np.ndarray, together: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Return a mask of the threads at a warpgroup unit that all four warps have reached."""
    if not (level == WARPGROUP).any() or m.per_cta % 128:
        return np.zeros(m.threads, bool)
    groups = lowest.reshape(-1, 4)
    whole = together.reshape(-1, 4).all(1) & (groups.min(1) == groups.max(1)) & ~m.done.reshape(-1, 128).any(1)
    return (level == WARPGROUP) & whole.repeat(128)


def convergence(m: MachineState, index: np.ndarray, together: np.ndarray, live: np.ndarray) -> int:
    """Return the level of collectives that the chosen threads may run without another choice."""
    warps = distinct(index >> 5)
    if not together[warps].all() or len(index) != int(live.reshape(-1, 32)[warps].sum()):
        return THREAD
    groups = len(warps) % 4 == 0 and len(index) == 32 * len(warps)
    if groups and (warps.reshape(-1, 4) == (warps[::4] // 4 * 4)[:, None] + np.arange(4)).all():
        return WARPGROUP
    return WARP


def step(m: MachineState, number: int, index: np.ndarray, level: int) -> None:
    """Run a group until it splits, waits, needs other threads, or has run RUN units."""
    n = len(index)
    contiguous = index[-1] - index[0] + 1 == n
    s = slice(int(index[0]), int(index[-1]) + 1) if contiguous else index
    t = Threads(m, s, n)
    for _ in range(1 if m.settings.mode == "random" else UNITS_PER_TURN):
        unit = m.program.units[number]
        code = unit.run or m.program.code(number)
        m.unit, m.stalled = number, None
        m.entered[number] = 1
        if m.undefined:
            follow(m, number, t)
        m.steps += 1
        result = code(t)
        following = number + 1
        if m.stalled is not None:  # some threads stay in a barrier; those that it released have moved already
            m.pc[index[~m.stalled]] = following
            return
        if unit.ends:
            taken = np.broadcast_to(np.asarray(result), (n,))
            if unit.ends == "return":
                m.done[index[taken]] = True
                exit_threads(m)
                m.pc[index[~taken]] = following
                m.events += 1
                return
            if taken.all():
                following = unit.target
            elif taken.any():
                m.pc[s] = np.where(taken, unit.target, following)
                return
        number = following
        m.pc[s] = number
        if m.program.level[number] > level:
            return
        if m.program.waits[number] and ((m.failed[s] == number) & (m.failed_at[s] == m.events)).any():
            return


def exit_threads(m: MachineState) -> None:
    """Handle exited threads: their cluster barrier no longer waits for them, and their CTA's shared memory may be
    freed."""
    if m.cluster_size == 1:
        return
    for cluster in list(m.state.cluster):
        complete_cluster_phase(m, cluster)
    whole = m.done.reshape(m.slots, -1).all(1)
    for slot in set(np.flatnonzero(whole).tolist()) - m.shared.exited:
        m.shared.check_exit(slot)
        m.shared.exited.add(slot)
